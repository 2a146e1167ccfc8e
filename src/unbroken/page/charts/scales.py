"""Axes: where a value lies, which ticks it gets, and what they are called."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .spec import Scale


@dataclass(frozen=True)
class Axis:
    """A map from [low, high] to [a, b] pixels."""

    scale: Scale
    low: float
    high: float
    a: float
    b: float

    def at(self, v: float) -> float:
        """The pixel of a value, clipped to the axis."""
        lo, hi, x = self.low, self.high, v
        if self.scale == "log":
            lo, hi, x = math.log10(lo), math.log10(hi), math.log10(max(v, self.low))
        t = (x - lo) / (hi - lo) if hi > lo else 0.5
        return self.a + min(max(t, 0.0), 1.0) * (self.b - self.a)


def nice_range(values: Sequence[float], scale: Scale, from_zero: bool = False) -> tuple[float, float]:
    """A range that holds the values and ends at round numbers."""
    vs = [v for v in values if math.isfinite(v)]
    if not vs:
        return (0.0, 1.0) if scale != "log" else (1.0, 10.0)
    lo, hi = min(vs), max(vs)
    if scale == "log":
        pos = [v for v in vs if v > 0] or [1.0]
        lo, hi = min(pos), max(max(pos), min(pos) * 2)
        return lo, hi
    if scale == "time":
        return (lo, hi if hi > lo else lo + 1)
    if from_zero:
        lo = min(lo, 0.0)
    if hi <= lo:
        hi = lo + (abs(lo) or 1.0)
    step = nice_step((hi - lo) / 4)
    return math.floor(lo / step + 1e-9) * step, math.ceil(hi / step - 1e-9) * step


def nice_step(rough: float) -> float:
    """The step of 1, 2, 2.5 or 5 times a power of ten at or above `rough`."""
    if rough <= 0 or not math.isfinite(rough):
        return 1.0
    base = 10 ** math.floor(math.log10(rough))
    return float(next(m * base for m in (1, 2, 2.5, 5, 10) if m * base >= rough - 1e-12))


SECONDS = ((1, "1 s"), (10, "10 s"), (60, "1 min"), (600, "10 min"), (3600, "1 h"), (6 * 3600, "6 h"), (86400, "1 d"),
           (7 * 86400, "1 wk"), (30 * 86400, "30 d"), (365 * 86400, "1 yr"))  # fmt: skip


def ticks(axis: Axis, kind: Literal["number", "seconds", "time"], room: int = 6) -> list[tuple[float, str]]:
    """Values and labels; about `room` of them."""
    if kind == "time":
        return time_ticks(axis.low, axis.high, room)
    if axis.scale == "log":
        if kind == "seconds":
            found = [(float(v), s) for v, s in SECONDS if axis.low <= v <= axis.high]
            if len(found) > room:
                keep = {1, 60, 3600, 86400, 7 * 86400, 30 * 86400}
                found = [f for f in found if f[0] in keep]
            if len(found) >= 2:
                return found
        base = 2 if axis.high <= 4096 and axis.low >= 0.25 and kind == "number" else 10
        first, last = math.ceil(math.log(axis.low, base) - 1e-9), math.floor(math.log(axis.high, base) + 1e-9)
        stride = max(1, math.ceil((last - first + 1) / room))
        return [(float(base**k), short(float(base**k))) for k in range(first, last + 1, stride)]
    step = nice_step((axis.high - axis.low) / room)
    first = math.ceil(axis.low / step - 1e-9)
    count = math.floor(axis.high / step + 1e-9) - first + 1
    values = [(first + i) * step for i in range(count)]
    if len({short(v) for v in values}) == count and all(
        abs(float(f"{v:.3g}") - v) < 0.01 * step for v in values
    ):
        return [(v, short(v)) for v in values]
    digits = max(0, 1 - math.floor(math.log10(step) + 1e-9)) if step % 1 else 0
    return [(v, f"{v:,.{min(digits, 9)}f}") for v in values]


def power_ticks(axis: Axis) -> list[tuple[float, str]]:
    """Powers of ten."""
    a, b = round(math.log10(axis.low)), round(math.log10(axis.high))
    stride = max(1, math.ceil((b - a) / 6))
    return [(10.0**k, short(10.0**k)) for k in range(a, b + 1, stride)]


def time_ticks(low: float, high: float, room: int) -> list[tuple[float, str]]:
    """Round times and their labels."""
    span = high - low
    for step, form in (
        (60, "%H:%M"), (300, "%H:%M"), (900, "%H:%M"), (3600, "%H:%M"), (4 * 3600, "%d %b %H:%M"), (86400, "%d %b"),
        (7 * 86400, "%d %b"),
    ):  # fmt: skip
        if span / step <= room:
            out: list[tuple[float, str]] = []
            t = float(math.ceil(low / step) * step)
            while t <= high:
                out.append((t, dt.datetime.fromtimestamp(t, dt.UTC).strftime(form)))
                t += step
            return out
    start = dt.datetime.fromtimestamp(low, dt.UTC)
    months: list[tuple[float, str]] = []
    year, month = start.year, start.month
    while True:
        month += 1
        if month > 12:
            year, month = year + 1, 1
        begin = dt.datetime(year, month, 1, tzinfo=dt.UTC)
        if begin.timestamp() > high:
            break
        months.append((begin.timestamp(), begin.strftime("%b %Y")))
    stride = max(1, math.ceil(len(months) / room))
    return months[::stride]


TIME_STEPS = (
    0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200,
    86400, 172800, 345600, 604800, 1209600, 2592000, 7776000, 31536000,
)  # fmt: skip
"""Seconds, minutes, hours, days, weeks, months and years, in the parts that people cut them into."""


def time_step(span: float, most: int) -> float:
    """The step that cuts a time of `span` seconds into at most `most` round pieces."""
    return next((float(s) for s in TIME_STEPS if span / s <= most), span / most)


def duration_ticks(seconds: float, most: int) -> list[float]:
    """Round times from 0 to `seconds`."""
    if not seconds > 0:
        return [0.0]
    step = time_step(seconds, most)
    return [n * step for n in range(int(seconds / step + 1e-9) + 1)]


def short(v: float) -> str:
    """A number as people write it on an axis: 0.5, 12, 3.5k, 2M."""
    if v == 0:
        return "0"
    a = abs(v)
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if a >= limit:
            unit = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}[suffix]
            return f"{v / unit:.3g}{suffix}"
    if a >= 1000:
        return f"{v:,.0f}"
    if a < 0.001:
        return f"{v:.1e}"
    return f"{v:.3g}"


def amount(v: float | None, digits: int = 1) -> str:
    """A number in a table: thousands separated, few digits."""
    if v is None or not math.isfinite(v):
        return "–"
    if v == 0:
        return "0"
    if abs(v) >= 1000:
        return f"{v:,.0f}"
    if abs(v) >= 100 and digits < 2:
        return f"{v:.0f}" if abs(v - round(v)) < 0.05 else f"{v:.1f}"
    if abs(v) < 0.05 and digits <= 1:
        return f"{v:.2g}"
    text = f"{v:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text and (digits > 1 or v == round(v)) else text


def seconds(v: float | None) -> str:
    """A duration for people: 1.4 s, 2 min 2 s, 3.4 h, 12 d."""
    if v is None or not math.isfinite(v):
        return "–"
    if v < 60:
        return f"{v:.0f} s" if v >= 10 or v == round(v) else f"{v:.1f} s"
    if v < 600:
        m, s = divmod(round(v), 60)
        return f"{m} min {s} s" if s else f"{m} min"
    if v < 5400:
        return f"{v / 60:.0f} min"
    if v < 2 * 86400:
        return f"{v / 3600:.1f} h"
    return f"{v / 86400:.1f} d"
