"""How much a rank works in a window of its steps, seen from outside or as it reports it: what `stragglers` compares.

On a processor: the time of its main thread on one, by the kernel's count (`schedstat`). A rank that waits for the others in a
collective sleeps. How long it waited for a processor is left out: on a host with more ranks than cores, or beside other jobs, that
names somebody else each minute. With a GPU the main thread tells nothing (waiting for a
kernel spins): there only what the script reports counts (`run.step(..., busy=...)`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..progress import StepRecord

LEAST_STEPS, LEAST_S = 10, 1.0
"""Short steps are put together: what lasts a moment only is some other process's."""


@dataclass(frozen=True)
class WorkWindow:
    """`steps` steps that ended with `step`, in seconds a step: `wall` between its ends, `busy` at work, `peak` the work of the worst step (None where it is not known). Ranks
    with the same `peers` do the same work; `data` it waited for its data (None where it is not known)."""

    step: int
    steps: int
    wall: float
    busy: float
    peak: float | None = None
    peers: int = 0
    data: float | None = None


class WorkMeter:
    """One rank's; a new one for each process."""

    def __init__(self, pid: int, *, on_processor: bool = True) -> None:
        """`on_processor` is False for ranks with a GPU."""
        self._pid, self._on_processor = pid, on_processor
        self._count, self._at, self._used = 0, 0.0, 0.0
        self._data_s: float | None = None
        self._begun = False
        self._reported: list[float | None] = []

    def take(
        self,
        count: int,
        records: Sequence[StepRecord],
        now: float,
        peers: int = 0,
        data_s: float | None = None,
    ) -> WorkWindow | None:
        """The window that is over, if one is: `count` steps were made so far, `records` are the newest of them, and it has waited `data_s`
        for data so far."""
        # What a script reckons may be below 0 by a little; whoever gets the window refuses all that comes with such a number.
        self._reported += [
            max(0.0, r.busy) if r.busy is not None and math.isfinite(r.busy) else None for r in records
        ]
        data_s = data_s if data_s is not None and math.isfinite(data_s) else None
        steps, wall = count - self._count, now - self._at
        if self._begun and (steps < LEAST_STEPS or wall < LEAST_S):
            return None
        before, self._used = self._used, read_used(self._pid) if self._on_processor else 0.0
        waited, self._data_s = self._data_s, data_s
        reported, self._reported = self._reported, []
        begun, self._begun = self._begun, True
        self._count, self._at = count, now
        last = records[-1].step if records else -1
        if not begun or last < 0:
            return None
        data = None if data_s is None else max(0.0, data_s - (waited or 0.0)) / steps
        given = [b for b in reported if b is not None]
        if reported and len(given) == len(reported):
            return WorkWindow(last, steps, wall / steps, sum(given) / len(given), max(given), peers, data)
        busy = max(0.0, self._used - before) / steps
        return WorkWindow(last, steps, wall / steps, busy, None, peers, data) if busy > 0 else None


def read_used(pid: int) -> float:
    """Seconds that the main thread was on a processor; 0 where that cannot be read."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
