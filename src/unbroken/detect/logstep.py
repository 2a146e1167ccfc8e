"""Steps and losses read from what a script prints, in lines and in progress bars, for scripts that do not call `run.step`."""

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
_BAR = re.compile(r"(\d{1,9})/(\d{1,9}) \[[\d:?]+<[\d:?]+, *[\d.?]+(?:it/s|s/it)")
"""tqdm's: ` 33%|###   | 33/100 [00:10<00:21,  3.12it/s, loss=2.31]`."""
_BARS_MAX = 64
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LOSS = re.compile(
    r"\b(?:lm[ _])?(?:train[ _])?loss\b\W{0,4}([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|nan|inf)",
    re.IGNORECASE,
)
_LEARNT_AFTER = 3
_LEARNT_AFTER_BARE = 10


class _Counter:
    """One number that goes up."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._last: int | None = None
        self._advances = self._with_loss = 0

    @property
    def learnt(self) -> bool:
        return self._with_loss >= _LEARNT_AFTER or self._advances >= _LEARNT_AFTER_BARE

    def take(self, step: int, *, with_loss: bool) -> bool:
        """Whether it is news."""
        if self._last is not None and step <= self._last:
            if step < self._last - 1:
                self.forget()  # another counter, or a new start
                self._last = step
            return False
        if self._last is not None:
            self._advances += 1
            self._with_loss += with_loss
        self._last = step
        return True


class StepPattern:
    """Follows one rank's log. A number after a word such as 'step' counts as the step once it has advanced three
    times on lines that tell a loss too, or ten times on any: 'step 4 of 5: loading weights' is no training step.
    Before that nothing is concluded. A progress bar counts in the same way, before such lines, until it is full: what comes
    after a full one is no step, and a bar of the same name and length counts again only where it tells a loss (an evaluation's
    does not)."""

    def __init__(self) -> None:
        self._lines, self._bars = _Counter(), _Counter()
        self._bar: tuple[str, int] | None = None
        """Name and length of the bar that counts."""
        self._full: set[tuple[str, int]] = set()

    @property
    def learnt(self) -> bool:
        """Whether this log prints steps that advance."""
        return self._lines.learnt or self._bars.learnt

    def feed(self, line: str, now: float) -> StepRecord | None:
        """The step that a line reports, where it is a new one; `now` becomes its time (seconds)."""
        plain = _COLOUR.sub("", line) if "\x1b" in line else line
        if "]" in plain and (bar := _BAR.search(plain)) is not None:
            return self._take_bar(plain, int(bar[1]), int(bar[2]), now)
        found = next((m for p in _STEPS if (m := p.search(plain))), None)
        if found is None:
            return None
        told = _LOSS.search(plain)
        loss = math.nan if told is None else float(told[1])
        if not self._lines.take(int(found[1]), with_loss=told is not None) or self._bars.learnt:
            return None
        return StepRecord(step=int(found[1]), tokens=0, loss=loss, time=now)

    def _take_bar(self, line: str, at: int, total: int, now: float) -> StepRecord | None:
        bar = (line.partition("%|")[0].rpartition(":")[0].strip()[-80:], total)
        told = _LOSS.search(line)
        if at == 0 or (told is None and bar in self._full):
            return None
        if bar != self._bar:
            # Another one, such as an evaluation's: as long as that runs, the training's own does not.
            self._bars.forget()
            self._bar = bar
        loss = math.nan if told is None else float(told[1])
        news = self._bars.take(at, with_loss=told is not None)
        is_told = news and (self._bars.learnt or not self._lines.learnt)
        if at >= total:
            if len(self._full) < _BARS_MAX:
                self._full.add(bar)
            self._bars.forget()
        return StepRecord(step=at, tokens=0, loss=loss, time=now) if is_told else None
