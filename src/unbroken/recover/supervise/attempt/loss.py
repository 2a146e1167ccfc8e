"""The loss of one attempt, as its leading rank reports it step by step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ....detect import Level, LossFinding, LossWatch
from ....progress.records.steps import Step

_EACH = 8
"""After so many steps in a row with a loss, one without is a NaN; before, and where a script reports now and then, it is nothing."""


_TAIL = 1 << 18
Before = Callable[[int], Sequence[float]]
"""The losses of the steps before one, as earlier attempts had them."""


def read_losses(files: Iterable[Path], before: int) -> list[float]:
    """The losses of the steps before this one that the first of these steps.jsonl has which has any, from its end alone."""
    for path in files:
        losses = []
        try:
            with open(path, "rb") as f:
                f.seek(max(0, os.fstat(f.fileno()).st_size - _TAIL))
                lines = f.read().splitlines()
        except OSError:
            continue
        for line in lines:
            try:
                record = json.loads(line)
                if record["step"] < before:
                    losses.append(float.fromhex(record["loss"]))
            except (ValueError, KeyError, TypeError):
                continue  # the first is cut, the last may be half written
        if losses:
            return losses
    return []


class LossFollower:
    """`finding` is the newest one that was not taken yet; a declared one stays."""

    def __init__(self, before: Before = lambda step: ()) -> None:
        self._watch, self._before = LossWatch(), before
        self._in_a_row = 0
        self._last = -1
        self.finding: LossFinding | None = None

    def take(self, step: Step) -> None:
        """Takes one step; of those that were seen before nothing."""
        if step.step <= self._last:
            return
        reported = not math.isnan(step.loss)
        follows = step.step == self._last + 1 or self._last < 0
        if self._last < 0:
            self._watch.remember(self._before(step.step))
        self._last = step.step
        if not reported and self._in_a_row < _EACH:
            self._in_a_row = 0
            return
        self._in_a_row = self._in_a_row + 1 if follows and reported else max(self._in_a_row, int(reported))
        found = self._watch.observe(step.step, step.loss, step.norm)
        if found is not None and (self.finding is None or self.finding.level is not Level.DECLARED):
            self.finding = found
