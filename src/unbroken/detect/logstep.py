"""Steps and losses read from what a script prints, for scripts that do not call `run.step`."""

from __future__ import annotations

import math
import re

from ..progress import StepRecord

_STEP = re.compile(r"\b(?:global_?step|step|iter(?:ation)?|it|batch)\b\W{0,4}(\d{1,9})\b", re.IGNORECASE)
_LOSS = re.compile(
    r"\b(?:lm[ _])?(?:train[ _])?loss\b\W{0,4}([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|nan|inf)",
    re.IGNORECASE,
)
_LEARNT_AFTER = 3


class StepPattern:
    """Follows one rank's log. A number after a word such as 'step' counts as the step once it has advanced
    three times; before that nothing is concluded."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._advances = 0

    @property
    def learnt(self) -> bool:
        """Whether this log prints steps that advance."""
        return self._advances >= _LEARNT_AFTER

    def feed(self, line: str, now: float) -> StepRecord | None:
        """The step that a line reports, where it is a new one; `now` becomes its time (seconds)."""
        found = _STEP.search(line)
        if not found:
            return None
        step = int(found[1])
        if self._last is not None and step <= self._last:
            if step < self._last - 1:
                self._last, self._advances = step, 0  # another counter, or a new start
            return None
        if self._last is not None:
            self._advances += 1
        self._last = step
        loss = _LOSS.search(line)
        value = float(loss[1]) if loss else math.nan
        return StepRecord(step=step, tokens=0, loss=value, time=now)
