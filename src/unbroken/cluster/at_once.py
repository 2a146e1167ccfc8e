"""The same done to many nodes, so many of them at a time: one after the other thousands would take an hour."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from ..errors import RunError
from .contract import Fenced

AT_ONCE = 256
"""Answers of thousands at once would only wait in the loop."""
FENCES_AT_ONCE = 32
"""A fence may be commands of a scheduler's: more at once would make each miss its deadline, and prove nothing."""
GIVEN_BACK_S = 10.0
"""So long a fence may take of a node that is given back."""

T = TypeVar("T")


async def for_each(
    names: Collection[str], work: Callable[[str], Awaitable[T]], at_once: int = AT_ONCE
) -> dict[str, T]:
    """What `work` gives for each of them, in their order. Raises the first of what any of them raises."""
    turn = asyncio.Semaphore(at_once)

    async def one(name: str) -> T:
        async with turn:
            return await work(name)

    found = await asyncio.gather(*(one(n) for n in names))
    return dict(zip(names, found, strict=True))


async def fence_all(
    fence: Callable[[str, float], Awaitable[Fenced]], names: Collection[str]
) -> tuple[list[str], RunError | None]:
    """Fences nodes that are given back: those that are proven, and the error that names the first that is not."""
    found = await for_each(names, lambda name: fence(name, GIVEN_BACK_S), FENCES_AT_ONCE)
    kept = [
        RunError(f"the node is not given back: {f.why}", where=n) for n, f in found.items() if not f.proven
    ]
    return [n for n, f in found.items() if f.proven], next(iter(kept), None)
