"""What the parts of a supervisor log, as lines of its view: with their time, and the same one not over and over."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from .view import View

_LOGGERS = ("unbroken", "asyncio")
_QUIET_S = 60.0


class ToView(logging.Handler):
    """Says warnings and errors; one that comes again within a minute is counted and said with the next."""

    def __init__(self, view: View, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._view, self._clock = view, clock
        self._last: dict[tuple[str, str], tuple[float, int]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Takes one record; never raises."""
        try:
            key, now = (record.name, str(record.msg)), self._clock()
            since, more = self._last.get(key, (-_QUIET_S, 0))
            if now - since < _QUIET_S:
                self._last[key] = (since, more + 1)
                return
            self._last[key] = (now, 0)
            text = record.getMessage()
            if record.exc_info and record.exc_info[1] is not None:
                text += f": {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
            self._view.say(text + (f" ({more} more like it before)" if more else ""))
        except Exception:  # noqa: BLE001 - logging must not end a run
            self.handleError(record)


@contextlib.contextmanager
def logged_to(view: View) -> Iterator[None]:
    """While this lasts, warnings of our parts and of asyncio are lines of the view and go nowhere else."""
    handler = ToView(view)
    before = []
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        before.append((logger, logger.propagate))
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in before:
            logger.removeHandler(handler)
            logger.propagate = propagate
