"""Steps and losses read from what a script prints, for scripts that do not call `run.step`."""

from __future__ import annotations

import math
import re

from ..progress import StepRecord

_GAP = r"[^\w\n]{0,16}(\d{1,9})\b"
_STEPS = (
    re.compile(r"\b(?:global_?step|step|iter(?:ation)?|num_updates)\b" + _GAP, re.IGNORECASE),
    re.compile(r"\b(?:it|batch)\b" + _GAP, re.IGNORECASE),
)
"""The first that matches counts: a line with 'batch 32' and 'step 7' reports step 7."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LOSS = re.compile(
    r"\b(?:lm[ _])?(?:train[ _])?loss\b\W{0,4}([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|nan|inf)",
    re.IGNORECASE,
)
_LEARNT_AFTER = 3
_LEARNT_AFTER_BARE = 10


class StepPattern:
    """Follows one rank's log. A number after a word such as 'step' counts as the step once it has advanced three
    times on lines that tell a loss too, or ten times on any: 'step 4 of 5: loading weights' is no training step.
    Before that nothing is concluded."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._advances = 0
        self._with_loss = 0

    @property
    def learnt(self) -> bool:
        """Whether this log prints steps that advance."""
        return self._with_loss >= _LEARNT_AFTER or self._advances >= _LEARNT_AFTER_BARE

    def feed(self, line: str, now: float) -> StepRecord | None:
        """The step that a line reports, where it is a new one; `now` becomes its time (seconds)."""
        plain = _COLOUR.sub("", line) if "\x1b" in line else line
        found = next((m for p in _STEPS if (m := p.search(plain))), None)
        if found is None:
            return None
        step = int(found[1])
        loss = _LOSS.search(plain)
        if self._last is not None and step <= self._last:
            if step < self._last - 1:
                self._last, self._advances, self._with_loss = step, 0, 0  # another counter, or a new start
            return None
        if self._last is not None:
            self._advances += 1
            self._with_loss += loss is not None
        self._last = step
        value = float(loss[1]) if loss else math.nan
        return StepRecord(step=step, tokens=0, loss=value, time=now)
