"""Which steps are computed again before they count: those whose gradient norm is no number or far out, and now and then any."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class SuspicionSettings:
    """A step is suspicious where its gradient norm is no number, or above the median of the last `window` by more than
    `factor` times and by more than `spreads` times their median deviation. `audit_every` steps any one is repeated. Repeats never
    exceed `budget` of the steps made, but for the first suspicion."""

    window: int = 64
    least: int = 16
    factor: float = 5.0
    spreads: float = 20.0
    audit_every: int = 2000
    budget: float = 0.003


class StepSuspicion:
    """Decides from the norms alone: they are the same bits on every rank, so that all decide alike, without asking."""

    def __init__(self, settings: SuspicionSettings = SuspicionSettings()) -> None:
        self.settings = settings
        self._norms: deque[float] = deque(maxlen=settings.window)
        self._steps = 0
        self._repeats = 0

    def judge(self, step: int, norm: float) -> str:
        """Why this step is to be computed again, in words; "" where it is not. To be called once a step."""
        self._steps += 1
        why = self._why(norm)
        if not why:
            self._norms.append(norm)
            if self.is_audit(step) and self._may():
                return "an audit"
            return ""
        return why if self._may() else ""

    def is_audit(self, step: int) -> bool:
        """Whether this step is computed again whatever its norm is, if the budget allows it."""
        return self.settings.audit_every > 0 and step % self.settings.audit_every == 0

    def note_repeats(self, count: int) -> None:
        """So many computations were made again."""
        self._repeats += count

    @property
    def share(self) -> float:
        """Computations made again, of all steps."""
        return self._repeats / max(1, self._steps)

    def _may(self) -> bool:
        return self._repeats == 0 or (self._repeats + 2) <= self.settings.budget * self._steps

    def _why(self, norm: float) -> str:
        s = self.settings
        if not math.isfinite(norm):
            return f"the gradient norm is {norm}"
        if len(self._norms) < s.least:
            return ""
        middle = median(self._norms)
        spread = median(abs(n - middle) for n in self._norms)
        if norm > s.factor * middle and norm - middle > s.spreads * spread:
            return f"the gradient norm is {norm:.3g}, {norm / max(middle, 1e-300):.0f} times the median"
        return ""
