"""A cluster that does not answer is asked again until it does: a run that goes on has nodes of it, and what they hold."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ....cluster.contract import ClusterAway

T = TypeVar("T")
AWAY_AGAIN_S = 5.0


async def wait_while_away(ask: Callable[[], Awaitable[T]], say: Callable[[str], None]) -> T:
    """What `ask` gives, once the cluster answers; who does not want to wait any more cancels it."""
    told = ""
    while True:
        try:
            return await ask()
        except ClusterAway as e:
            if e.message != told:
                told = e.message
                say(f"{told}; the run goes on as soon as that is over")
        await asyncio.sleep(AWAY_AGAIN_S)
