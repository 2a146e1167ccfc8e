"""Steps and losses out of metric lines, whichever framework printed them."""

from __future__ import annotations

import math
import re

_LOSS = re.compile(
    r"loss['\"]?(?:\s*[:=]\s*['\"]?([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf|NaN|Inf)\b)|\s+([-+]?\d+\.\d+(?:[eE][-+]?\d+)?|nan|inf)\b)"
)
_NAN_GRADIENT = re.compile(r"grad[_ ]norm['\"]?\s*[:=]\s*['\"]?(?:nan|inf|NaN|Inf)\b")
_NAN_ITERATIONS = re.compile(r"number of nan iterations:\s+[1-9]")
_STEP = re.compile(
    r"(?:\biteration|\bglobal_step|\bglobal_steps|\bsteps?|\biter|\bStep|\boptimizer_step|\bSTEP|\btrain_step|\bbatch|\bnum_updates|\bupdates?|\bit)['\"]?\s*[:= ]\s*(\d+)\b"
)
_BAR = re.compile(r"^\s*(?:Epoch \d+: +|Training: +)?\d{1,3}%\|.{0,40}\| (\d+)/(\d+) \[")
_COUNT = re.compile(r"^\s*(\d+)/\d+ \[[=>.\-# ]{3,}\]")  # Keras
_DONE = re.compile(r"\bstep (\d+)(?:/\d+)? (?:done|finished|took)\b|\biteration\s+(\d+)\s*/\s*\d+")
_OTHER = re.compile(r"(?:aving|oading|aved|esum|heckpoint|val(?:idation)? loss|eval)", re.I)


def may(raw: bytes) -> bool:
    """Whether a raw line can be a metric line at all; `read` says nothing of those that cannot."""
    return b"loss" in raw or b"step" in raw or b"%|" in raw or b"iteration" in raw


def read(text: str) -> tuple[float | None, float | None] | None:
    """(step, loss) of a metric line, either may be None; None where the line is not one."""
    loss, found = _loss(text)
    bar = _BAR.match(text) if not found and "%|" in text else None
    if bar:
        return float(bar.group(1)), None
    count = _COUNT.match(text) if found and "/" in text[:12] else None
    if count:
        return float(count.group(1)), loss
    done = None
    if not found and ("step" in text or "iteration" in text):
        done = _DONE.search(text)
    if not found and done is None:
        return None
    if _OTHER.search(text, 0, 200) and "iteration " not in text[:60]:
        return None
    step = _STEP.search(text)
    number = float(step.group(1)) if step else None
    if number is None and done:
        number = float(done.group(1) or done.group(2))
    if ("nan iterations" in text and _NAN_ITERATIONS.search(text)) or _NAN_GRADIENT.search(text):
        loss = math.nan
    return number, loss


def _loss(text: str) -> tuple[float | None, bool]:
    """The training loss that a line names, and whether it names any loss at all."""
    at, named = text.find("loss"), False
    while at >= 0:
        m = _LOSS.match(text, at)
        if m:
            before = text[max(0, at - 8) : at]
            if (
                not before
                or not (before[-1].isalnum() or before[-1] in "_/")
                or before.endswith(("train_", "lm_", "train/", "training_"))
            ):
                return _value(m.group(1) or m.group(2)), True
            named = True
        at = text.find("loss", at + 4)
    return None, named


def _value(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
