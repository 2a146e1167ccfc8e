"""A list that is kept as it is at the API: an answer that makes no sense ends nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from unbroken.cluster.kubernetes import reflection
from unbroken.cluster.kubernetes.conditions import Object
from unbroken.cluster.kubernetes.reflection import Reflection


class OddApi:
    """Lists one pod; its first watch tells of an object without metadata."""

    def __init__(self) -> None:
        self.watches = 0

    async def list(self, *_: Any, **__: Any) -> tuple[list[Object], str]:
        return [{"metadata": {"name": "p", "uid": "1", "resourceVersion": "1"}}], "1"

    async def watch(self, *_: Any, **__: Any) -> AsyncIterator[tuple[str, Object]]:
        self.watches += 1
        if self.watches == 1:
            yield "MODIFIED", {}
        yield "MODIFIED", {"metadata": {"name": "p", "uid": "1", "resourceVersion": "2"}}
        await asyncio.sleep(60)


def test_an_answer_that_makes_no_sense_is_said_and_all_is_listed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reflection, "_AGAIN_S", 0.0)
    seen: list[str] = []
    changed = asyncio.Event()

    def note(kind: str, before: Object, now: Object) -> None:
        seen.append(f"{kind} {now['metadata']['resourceVersion']}")
        if kind == "MODIFIED":
            changed.set()

    async def main() -> None:
        pods = Reflection(OddApi(), lambda: None, on_change=note)  # type: ignore[arg-type]
        pods.start()
        try:
            async with asyncio.timeout(10):
                await changed.wait()
        finally:
            await pods.stop()
        assert pods.error is None

    asyncio.run(main())
    assert seen == ["ADDED 1", "MODIFIED 2"]
