"""How often to save: Young's and Daly's interval from what a save costs and how often the run fails. No torch.

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974; J. T. Daly, "A
higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006, equation 37.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from dataclasses import dataclass, field

from ..units import Duration

GPU_MTBF_S = 54 * 86400 * 16384 / 419
"""Seconds between two interruptions, of one GPU: Llama 3 405B, 419 in 54 days on 16,384 (arXiv:2407.21783, 3.3.4)."""


def daly(cost_s: float, mtbf_s: float) -> float:
    """The interval (seconds of work between two saves) that loses the least time."""
    if cost_s <= 0:
        return 0.0
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return max(0.0, math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s)


def mtbf(gpus: int, failures: int, observed_s: float) -> float:
    """Seconds between failures of the run: the published rate counts as one failure seen, the run's own are added."""
    expected = GPU_MTBF_S / max(1, gpus)
    return (expected + max(0.0, observed_s)) / (1 + max(0, failures))


@dataclass(frozen=True)
class Bounds:
    """Limits of an automatic interval, in seconds."""

    least_s: float = 1.0
    most_s: float = 3600.0


@dataclass(frozen=True)
class Intervals:
    """What was decided, in steps, and why."""

    snapshot: int
    persist: int
    why: str


@dataclass
class IntervalController:
    """Measures one rank's steps and saves. `began` is the time of the run's first attempt (Unix seconds)."""

    gpus: int
    failures: int = 0
    began: float = field(default_factory=time.time)
    bounds: Bounds = field(default_factory=Bounds)
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    _costs: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    _durable: deque[float] = field(default_factory=lambda: deque(maxlen=5))
    _last: tuple[int, float] | None = None

    def step(self, step: int, now: float) -> None:
        """The training is at this step, at this monotonic time."""
        if self._last is not None and step > self._last[0]:
            self._steps.append((now - self._last[1]) / (step - self._last[0]))
        self._last = (step, now)

    def saved(self, cost_s: float) -> None:
        """A save held the training up for this long."""
        self._costs.append(cost_s)

    def durable(self, seconds: float) -> None:
        """A save was durable after this long."""
        self._durable.append(seconds)

    def decide(self) -> Intervals | None:
        """The intervals now; None before anything was measured."""
        if not self._steps or not self._costs:
            return None
        step_s = max(1e-6, statistics.median(self._steps))
        cost_s = max(1e-4, statistics.median(self._costs))
        mean_s = mtbf(self.gpus, self.failures, time.time() - self.began)
        low, high = self.bounds.least_s, self.bounds.most_s
        snapshot_s = min(high, max(low, daly(cost_s, mean_s)))
        durable_s = statistics.median(self._durable) if self._durable else 10 * cost_s
        # While it is written a checkpoint slows the training by up to 0.3 %; and one must end before the next begins.
        persist_s = min(high, max(snapshot_s, daly(cost_s + 0.003 * durable_s, mean_s), 1.25 * durable_s))
        snapshot = max(1, round(snapshot_s / step_s))
        persist = max(1, round(persist_s / step_s / snapshot)) * snapshot
        why = (
            f"a save holds the training up for {Duration(cost_s)} and is durable after {Duration(durable_s)}; a failure"
            f" is expected every {Duration(mean_s)}; a step takes {Duration(step_s)}"
        )
        return Intervals(snapshot, persist, why)
