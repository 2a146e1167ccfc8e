"""Waiting for something so long, and no longer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def wait_within(what: Awaitable[T], seconds: float | None) -> T:
    """What it gives; raises TimeoutError after so many seconds, and cancels it then.

    In place of `asyncio.wait_for`, which before Python 3.12 swallows a cancellation that comes while what it waits for is just
    done: who cancels a loop of such waits would wait for ever.
    """
    async with asyncio.timeout(seconds):
        return await what


async def keep_following(
    follow: Callable[[], Awaitable[None]], again_s: float, log: logging.Logger, what: str
) -> None:
    """Follows until that returns; begins again `again_s` seconds after an error, which `log` says of `what`.

    Without a word, whoever relies on it would never hear of anything again: whatever the error is, to stop is worse.
    """
    while True:
        try:
            return await follow()
        except Exception:
            log.exception("%s could not be read; it is read again", what)
        await asyncio.sleep(again_s)


async def run_beside(work: Coroutine[Any, Any, T], *watches: Coroutine[Any, Any, None]) -> T:
    """What `work` gives; the watches run beside it for as long.

    Raises what a watch raises, at once, and cancels the others and `work`: as a task of its own it would end without a word, and
    whoever relies on it would wait for ever.
    """
    working = asyncio.ensure_future(work)
    tasks: set[asyncio.Future[Any]] = {working, *map(asyncio.ensure_future, watches)}
    pending = tasks
    try:
        while not working.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        return working.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
