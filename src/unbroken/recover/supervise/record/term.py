"""Whether this supervisor still has the run: another one may have claimed a higher term while this one did not run."""

from __future__ import annotations

import asyncio
import logging

from ....errors import StorageError
from ....progress import RunDir
from ...record.base import Record, Superseded
from .clock import Clock

__all__ = ["Superseded", "TermWatch"]

_log = logging.getLogger("unbroken.supervisor")
_EVERY_S = 1.0


class TermWatch:
    """Looks for a higher term than this supervisor's `number`."""

    def __init__(self, run_dir: RunDir, record: Record, number: int, clock: Clock) -> None:
        self._run_dir, self._record, self.number, self._clock = run_dir, record, number, clock
        self._polled = 0.0
        self._newest = number

    @property
    def is_over(self) -> bool:
        """Whether another supervisor has the run by now; of a slow record, as far as was last heard: it takes nothing that
        this one would still write down."""
        return (self._newest if self._record.slow else self._record.newest()) > self.number

    async def follow(self) -> None:
        """Asks a slow record once a second, beside the run; one that does not answer is asked again."""
        silent = False
        while self._record.slow:
            try:
                self._newest = max(self._newest, await asyncio.to_thread(self._record.newest))
                silent = False
            except (OSError, StorageError) as e:
                if not silent:
                    _log.warning("the record of the run does not answer: %s", e)
                silent = True
            await asyncio.sleep(_EVERY_S)

    def check(self, *, at_once: bool = False) -> None:
        """Raises Superseded where another supervisor has the run by now; looks once a second, or `at_once`."""
        now = self._clock.monotonic()
        if at_once or now - self._polled > _EVERY_S:
            self._polled = now
            if self.is_over:
                raise Superseded(
                    "another supervisor took over this run while this one did not run", where=str(self._run_dir.path),
                    hint=f"Watch it with `unbroken status {self._run_dir.path}`",
                )  # fmt: skip
