"""Steps and losses out of metric lines, whichever framework printed them."""

from __future__ import annotations

import math
import re

_LOSS = re.compile(
    r"(?:\blm loss|reduced_train_loss|train[_ /]loss|training loss|\bloss)['\"]?\s*[:=]\s*['\"]?([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf|NaN|Inf)\b)"
)
_STEP = re.compile(
    r"(?:\biteration|\bglobal_step|\bglobal_steps|\bsteps?|\biter|\bStep|\boptimizer_step|\bSTEP)['\"]?\s*[:= ]\s*(\d+)\b"
)
_BAR = re.compile(r"^\s*(?:Epoch \d+: +|Training: +)?\d{1,3}%\|.{0,40}\| (\d+)/(\d+) \[")
_DONE = re.compile(r"\bstep (\d+)(?:/\d+)? (?:done|finished|took)\b|\biteration\s+(\d+)\s*/\s*\d+")
_HINT = re.compile(r"loss|%\||step|iteration|Step|iter")
_OTHER = re.compile(r"(?:aving|oading|aved|esum|heckpoint|val(?:idation)? loss|eval)", re.I)


def read(text: str) -> tuple[float | None, float | None] | None:
    """(step, loss) of a metric line, either may be None; None where the line is not one."""
    if not _HINT.search(text):
        return None
    loss = _LOSS.search(text)
    bar = None if loss else _BAR.match(text)
    if bar:
        return float(bar.group(1)), None
    done = None if loss else _DONE.search(text)
    if loss is None and done is None:
        return None
    if _OTHER.search(text[:200]) and "iteration " not in text[:60]:
        return None
    step = _STEP.search(text)
    number = float(step.group(1)) if step else None
    if number is None and done:
        number = float(done.group(1) or done.group(2))
    return number, _value(loss.group(1)) if loss else None


def _value(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
