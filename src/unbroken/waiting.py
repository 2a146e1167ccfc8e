"""Waiting for something so long, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def wait_within(what: Awaitable[T], seconds: float | None) -> T:
    """What it gives; raises TimeoutError after so many seconds, and cancels it then.

    In place of `asyncio.wait_for`, which before Python 3.12 swallows a cancellation that comes while what it waits for is just
    done: who cancels a loop of such waits would wait for ever.
    """
    async with asyncio.timeout(seconds):
        return await what
