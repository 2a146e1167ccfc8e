"""Whether somebody asked the run to stop, and pauses that such a request ends."""

from __future__ import annotations

import asyncio
from typing import Any

from ....waiting import wait_within
from .clock import Clock


class StopRequest:
    """Asked once, the run stops at a step boundary; asked again, at once. `first` is when that was (monotonic)."""

    def __init__(self, clock: Clock, changed: asyncio.Event) -> None:
        """`changed` is set by whatever the watch over an attempt has to look at."""
        self._clock, self._changed = clock, changed
        self.asked = asyncio.Event()
        self.count = 0
        self.first: float | None = None

    def __bool__(self) -> bool:
        return self.count > 0

    def ask(self) -> None:
        """Safe to call from a signal handler of the event loop."""
        self.count += 1
        if self.first is None:
            self.first = self._clock.monotonic()
        self.asked.set()
        self._changed.set()

    async def wait_for(self, work: asyncio.Future[Any]) -> None:
        """Waits until the work is done, or a stop is asked for; the work goes on then."""
        asked = asyncio.create_task(self.asked.wait())
        try:
            await asyncio.wait({work, asked}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()

    async def pause(self, seconds: float) -> None:
        """Waits so long, or until a stop is asked for."""
        if not self.count and seconds > 0:
            try:
                await wait_within(self.asked.wait(), seconds)
            except TimeoutError:
                return
