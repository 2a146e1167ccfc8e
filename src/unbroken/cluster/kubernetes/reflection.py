"""A list that is kept as it is at the API: listed once, then followed by a watch, listed again where that has lost its place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from .api import Api, ApiUnanswered, Refused
from .conditions import Object

_log = logging.getLogger("unbroken.kubernetes")
_AGAIN_S = 0.2
_AGAIN_MOST_S = 10.0
_GONE = 410


class Reflection:
    """Objects of one kind, by name. `on_change(kind, before, now)`: kind is ADDED, MODIFIED or DELETED; for the last `now` is its
    last state, as far as that is known."""

    def __init__(
        self, api: Api, method: Callable[..., Any], *args: Any, on_change: Callable[[str, Object, Object], None],
        **kwargs: Any,
    ) -> None:  # fmt: skip
        self._api, self._method, self._args, self._kwargs = api, method, args, kwargs
        self._on_change = on_change
        self.found: dict[str, Object] = {}
        self.error: Refused | ApiUnanswered | None = None
        """Why nothing is heard at the moment."""
        self.listed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to follow; again does nothing."""
        if self._task is None:
            self._task = asyncio.create_task(self._follow())

    async def wait(self) -> None:
        """Waits for the first list. Raises Refused or ApiUnanswered where there is none."""
        assert self._task is not None
        while not self.listed.is_set():
            if self.error is not None:
                raise self.error
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        pause, version = _AGAIN_S, ""
        while True:
            try:
                if not version:
                    version = await self._list()
                version = await self._watch(version)
                pause = _AGAIN_S
                continue
            except Refused as e:
                version = ""
                if e.status == _GONE:
                    _log.debug("the place in the watch is forgotten: listed again")
                    continue
                self._note(e)
            except ApiUnanswered as e:
                self._note(e)
            except Exception as e:  # noqa: BLE001  whatever one answer is, who follows no more would wait for ever
                version = ""
                _log.exception("what the API says cannot be followed: it is listed again")
                self._note(ApiUnanswered(f"what it says makes no sense: {type(e).__name__}: {e}"))
            await asyncio.sleep(pause)
            pause = min(2 * pause, _AGAIN_MOST_S)

    def _note(self, error: Refused | ApiUnanswered) -> None:
        if self.error is None or self.error.message != error.message:
            _log.warning("%s", error)
        self.error = error

    async def _list(self) -> str:
        items, version = await self._api.list(self._method, *self._args, **self._kwargs)
        now = {str(x["metadata"]["name"]): x for x in items}
        for name in [n for n in self.found if n not in now]:
            self._apply("DELETED", self.found[name])
        for name, item in now.items():
            before = self.found.get(name)
            if before is None:
                self._apply("ADDED", item)
            elif before["metadata"].get("uid") != item["metadata"].get("uid"):
                self._apply("DELETED", before)
                self._apply("ADDED", item)
            elif before["metadata"].get("resourceVersion") != item["metadata"].get("resourceVersion"):
                self._apply("MODIFIED", item)
        self.error = None
        self.listed.set()
        return version

    async def _watch(self, version: str) -> str:
        """Follows until the server ends the watch; where the next one goes on."""
        async for kind, item in self._api.watch(self._method, *self._args, version=version, **self._kwargs):
            self.error = None
            version = str(item["metadata"].get("resourceVersion", version))
            if kind != "BOOKMARK":
                self._apply(kind, item)
        return version

    def _apply(self, kind: str, item: Object) -> None:
        name = str(item["metadata"]["name"])
        before = self.found.get(name, {})
        if kind == "DELETED":
            self.found.pop(name, None)
        else:
            self.found[name] = item
        self._on_change(kind, before, item)
