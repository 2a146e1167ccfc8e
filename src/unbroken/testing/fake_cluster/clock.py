"""An event loop whose time is simulated: hours pass in milliseconds, and the same run gives the same order every time.

What runs in it uses `asyncio` as ever and takes its time from `loop.time`. Nothing waits: when no callback is ready,
the clock jumps to the next one that is due. Work for other threads is done at once, in place, so that no thread can
change the order. Where nothing is due at all, and something still waits, it says so instead of hanging.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stuck(RuntimeError):
    """Nothing will ever happen: every task waits for something that no timer and no other task will bring."""


class _NoWaiting(selectors.SelectSelector):
    """Looks, but lets the loop's clock jump instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.loop: SimulatedLoop | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        loop = self.loop
        ready = super().select(0) if loop is None or loop.looks_outside else []
        if not ready and loop is not None and (timeout is None or timeout > 0):
            loop.jump(timeout)
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    """The loop. `looks_outside` makes it look at real sockets too, which costs a system call for each turn."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self.looks_outside = False
        selector = _NoWaiting()
        super().__init__(selector)
        selector.loop = self

    def time(self) -> float:
        """Simulated seconds."""
        return self._now

    def jump(self, seconds: float | None) -> None:
        """Moves the clock on to the next timer. Raises Stuck where there is none."""
        if seconds is None:
            waiting = sorted(t.get_name() for t in asyncio.all_tasks(self))
            raise Stuck(f"nothing is due, and {len(waiting)} tasks wait: {', '.join(waiting[:5])}")
        when = getattr(self, "_scheduled", None)
        # To the very moment of the next timer: a sum of differences would drift.
        self._now = max(self._now, when[0].when()) if when else self._now + seconds

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Runs it now, in this thread: what a thread would do takes no simulated time."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as e:  # noqa: BLE001  it is the caller's, who awaits it
            future.set_exception(e)
        return future


def run_simulated(main: Callable[[SimulatedLoop], Coroutine[Any, Any, T]], *, start: float = 0.0) -> T:
    """Runs `main(loop)` to its end in a loop of its own, and ends all tasks that it left. Raises Stuck, and what it raises."""
    loop = SimulatedLoop(start)
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(main(loop))
    finally:
        try:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()
