"""How much a rank works in a window of its steps, seen from outside or as it reports it: what `stragglers` compares.

On a processor: the time of its main thread on one, by the kernel's count (`schedstat`). A rank that waits for the others in a
collective sleeps. How long it waited for a processor is left out: on a host with more ranks than cores, or beside other jobs, that
names somebody else each minute. With a GPU the main thread tells nothing (waiting for a
kernel spins): there what the script reports counts (`run.step(..., busy=...)`), and without it what the GPU's counters say.

The counters' model: in a step a GPU works for W seconds, waits in NCCL for Q, and what is left it has nothing to do. A kernel of NCCL
spins on some of the SMs, so SMs are busy for a W + b Q (b is 0.18 on an H200, 24 of 132), and tensor cores, which it does not use,
for c W. Whoever holds up the others waits least: by busy SMs it stands out by less than its work does (1.10 was read as 1.07). But
somebody who waits in NCCL has busier SMs than one whose GPU has nothing to do, and must not be named for that: the SMs' time by the tensor cores',
(a + b Q / W) / c, grows with waiting, and who is named has less of it than the peers. Tensor cores alone would not do: they count
clock cycles, and a card at its power limit that waits in between has a faster clock (1.10 was read as 1.18).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Protocol

from ..progress import StepRecord
from .stragglers import RankWork

LEAST_STEPS, LEAST_S = 10, 1.0
"""Short steps are put together: what lasts a moment only is some other process's."""
LEAST_ACTIVE = 0.7
"""Where no GPU's SMs are busy for so much of the time, it is not the GPU that a step waits for, and the counters name nobody."""
_SPAN = 0.2
"""What was read of a GPU covers its window, but for so much of it."""


@dataclass(frozen=True)
class GpuActivity:
    """Means of a GPU's counters over the `seconds` up to a reading: the share of its SMs that were busy, and of its tensor cores."""

    seconds: float
    active: float
    tensor: float


class GpuReader(Protocol):
    """Reads the counters of one rank's GPU, and stops nobody who asks."""

    def ask(self) -> None:
        """Has them read now, since the time before."""

    def answer(self) -> GpuActivity | None:
        """What was found since it was last asked, once; None where there is nothing yet, or will be nothing."""


@dataclass(frozen=True)
class WorkWindow:
    """`steps` steps that ended with `step`, in seconds a step: `wall` between its ends, `busy` at work, `peak` the work of the worst step (None where it is not known). Ranks
    with the same `peers` do the same work; `data` it waited for its data (None where it is not known). Where `tensor` is there, the GPU's
    counters were read: it is the share of the time that tensor cores were busy, and `busy` the time that SMs were, which is compared with such alone."""

    step: int
    steps: int
    wall: float
    busy: float
    peak: float | None = None
    peers: int = 0
    data: float | None = None
    tensor: float | None = None


class WorkMeter:
    """One rank's; a new one for each process."""

    def __init__(self, pid: int, *, on_processor: bool = True, gpu: GpuReader | None = None) -> None:
        """`on_processor` is False for ranks with a GPU, of which `gpu` reads the counters; None where they are not to be read."""
        self._pid, self._on_processor, self._gpu = pid, on_processor, gpu
        self._asked: WorkWindow | None = None
        self._count, self._at, self._used = 0, 0.0, 0.0
        self._data_s: float | None = None
        self._begun, self._trained = False, True
        self._reported: list[float | None] = []

    def take(
        self,
        count: int,
        records: Sequence[StepRecord],
        now: float,
        peers: int = 0,
        data_s: float | None = None,
        *,
        training: bool = True,
    ) -> WorkWindow | None:
        """The window that is over, if one is: `count` steps were made so far, `records` are the newest of them, and it has waited `data_s`
        for data so far. `training` is False while it does something else, such as an evaluation."""
        # What a script reckons may be below 0 by a little; whoever gets the window refuses all that comes with such a number.
        self._reported += [
            max(0.0, r.busy) if r.busy is not None and math.isfinite(r.busy) else None for r in records
        ]
        data_s = data_s if data_s is not None and math.isfinite(data_s) else None
        self._trained &= training
        steps, wall = count - self._count, now - self._at
        if self._begun and (steps < LEAST_STEPS or wall < LEAST_S):
            return self._take_counted()
        before, self._used = self._used, read_used(self._pid) if self._on_processor else 0.0
        waited, self._data_s = self._data_s, data_s
        reported, self._reported = self._reported, []
        begun, self._begun = self._begun, True
        self._count, self._at = count, now
        trained, self._trained = self._trained, training
        last = records[-1].step if records else -1
        given = [b for b in reported if b is not None]
        if given:
            self._gpu = None  # the script knows better
        if self._gpu is not None:
            self._asked = None
            self._gpu.ask()
        if not begun or last < 0:
            return None
        data = None if data_s is None else max(0.0, data_s - (waited or 0.0)) / steps
        if reported and len(given) == len(reported):
            return WorkWindow(last, steps, wall / steps, sum(given) / len(given), max(given), peers, data)
        if self._gpu is not None:
            self._asked = WorkWindow(last, steps, wall / steps, 0.0, None, peers, data) if trained else None
            return None
        busy = max(0.0, self._used - before) / steps
        return WorkWindow(last, steps, wall / steps, busy, None, peers, data) if busy > 0 else None

    def _take_counted(self) -> WorkWindow | None:
        """The last window, once its GPU's counters are read."""
        if self._asked is None or self._gpu is None or (found := self._gpu.answer()) is None:
            return None
        w, self._asked = self._asked, None
        if abs(found.seconds / (w.wall * w.steps) - 1) > _SPAN:
            return None  # read late, or over two windows
        return replace(w, busy=found.active * w.wall, tensor=found.tensor) if found.tensor > 0 else None


def reckon_work(windows: Mapping[int, WorkWindow]) -> dict[int, RankWork]:
    """What is compared of the ranks' windows. Where somebody tells his work himself, those alone who do; else what the counters of GPUs say, and
    nothing where the GPUs are not what a step waits for."""
    told = {r: RankWork(w.busy, w.peak, w.data) for r, w in windows.items() if w.tensor is None}
    if told or not windows:
        return told
    shares = {r: w.busy / w.wall for r, w in windows.items() if w.wall > 0}
    if max(shares.values(), default=0.0) < LEAST_ACTIVE:
        return {}
    # Each rank's windows end between two of its steps, at another moment: the share is of the time, and the step's time is common to all.
    step_s = median(w.wall for w in windows.values())
    return {
        r: RankWork(share * step_s, None, windows[r].data, waits=share / tensor)
        for r, share in shares.items()
        if (tensor := windows[r].tensor)
    }


def read_used(pid: int) -> float:
    """Seconds that the main thread was on a processor; 0 where that cannot be read."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
