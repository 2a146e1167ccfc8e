"""The training curve: how fast it stepped, when it fell silent, whether its loss went wrong at the end."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..match.events import LogEnd, LogEvent, MetricLine


@dataclass(frozen=True)
class TrainingCurve:
    """`interval` is the usual time between metric lines in seconds; `last` the last one; `spike` the first metric
    line of a bad window that lasts to the end of training, with `base` the loss before it."""

    interval: float | None = None
    last: MetricLine | None = None
    spike: MetricLine | None = None
    base: float | None = None
    steps: int = 0


def read_curve(progress: Sequence[MetricLine]) -> TrainingCurve:
    """Reads the training curve from all progress lines in order."""
    if not progress:
        return TrainingCurve()
    gaps = [
        b.time - a.time
        for a, b in itertools.pairwise(progress)
        if a.time is not None
        and b.time is not None
        and b.file == a.file
        and b.line - a.line < 50
        and b.time > a.time
    ]
    points = [p for p in progress if p.loss is not None]
    spike, base = _spike(points)
    if spike is None:
        spike, base = _drift(points)
    return TrainingCurve(
        statistics.median(gaps[-500:]) if gaps else None, progress[-1], spike, base, len(progress)
    )


def silent_for(curve: TrainingCurve, ending: LogEnd, line: int, until: float | None) -> float | None:
    """Seconds between the last metric line and `until` (the time of line `line` of that log), where that is far
    more than the usual interval. Metric lines without a time are dated from their neighbours and the pace."""
    if curve.last is None or until is None:
        return None
    usual = curve.interval or ending.pace or 60.0
    last = curve.last.time
    if last is None:
        stamps = [(n, t) for n, t in ending.stamps if n < line]
        if not stamps:
            return None
        number, last = stamps[-1]
        last += min(max(0, curve.last.line - number), 10_000) * (ending.pace or 5.0)
    gap = until - last
    return gap if gap > max(600.0, 8 * usual) else None


def _spike(points: Sequence[MetricLine]) -> tuple[MetricLine | None, float | None]:
    """The first point of a bad window (NaN, or far above the loss before) that lasts to the end."""
    if len(points) < 8:
        bad = [p for p in points if _nan(p)]
        return (bad[0], None) if len(bad) >= 2 and _nan(points[-1]) else (None, None)
    finite = [p.loss for p in points if not _nan(p) and p.loss is not None]
    if not finite:
        return points[0], None
    half: list[float] = finite[: max(4, len(finite) - 3)]
    window = half[-400:]
    base = statistics.median(window)
    spread = statistics.median(abs(x - base) for x in window) or abs(base) * 0.01 or 0.01
    limit = base + max(8 * spread, 0.35 * abs(base), 0.3)
    tail = len(points)
    while tail > 0 and (_nan(points[tail - 1]) or (points[tail - 1].loss or 0.0) > limit):
        tail -= 1
    streak = points[tail:]
    lost = all(_nan(p) for p in streak)  # however long: no training recovers from that
    if len(streak) < 2 or (len(streak) > max(0.5 * len(points), 3) and not lost):
        return None, base
    return streak[0], base


def _drift(points: Sequence[MetricLine]) -> tuple[MetricLine | None, float | None]:
    """Where a loss that had fallen began to climb and never came back: the first line of the climb, and the loss
    before it. Read on medians of windows, so that no noise and no spike that heals counts."""
    finite = [p for p in points if p.loss is not None and math.isfinite(p.loss)]
    size = max(5, len(finite) // 40)
    if len(finite) < 8 * size:
        return None, None
    windows = [finite[i : i + size] for i in range(0, len(finite) - size + 1, size)]
    level = [statistics.median(p.loss or 0.0 for p in w) for w in windows]
    noise = statistics.median(
        statistics.median(abs((p.loss or 0.0) - m) for p in w) for w, m in zip(windows, level, strict=True)
    )
    low = min(range(len(level)), key=level.__getitem__)
    climb = max(0.3, 0.15 * abs(level[low]), 4 * noise)
    if len(level) - low < 4 or level[-1] - level[low] < climb or level[0] - level[low] < climb / 2:
        return None, None
    above = [i for i in range(low, len(level)) if level[i] - level[low] >= climb / 2]
    start = next((i for i in above if all(x - level[low] >= climb / 2 for x in level[i:])), None)
    # Each later part is at least as high as the one before it: a climb, not a step to another data mix.
    if start is None or len(level) - start < 3 or level[-1] < 0.98 * max(level[start:]):
        return None, None
    first = next(
        (p for w in windows[max(low, start - 1) :] for p in w if (p.loss or 0.0) - level[low] >= climb / 2),
        windows[start][0],
    )
    return first, level[low]


def worst_window(progress: Sequence[MetricLine], said: LogEvent) -> MetricLine | None:
    """The metric line that shows what a guard or an operator complained of: the first of the last window of
    non-finite ones, else the first of the last window far above the usual loss."""
    points = [p for p in progress if p.loss is not None and (p.file != said.file or p.line < said.line)][
        -2000:
    ]
    bad = [i for i, p in enumerate(points) if _nan(p)]
    if not bad:
        finite = [p.loss for p in points if p.loss is not None]
        if len(finite) < 8:
            return None
        base = statistics.median(finite)
        spread = statistics.median(abs(x - base) for x in finite)
        bad = [i for i, x in enumerate(finite) if x > base + max(10 * spread, 0.35 * abs(base), 0.3)]
    if not bad:
        return None
    first = len(bad) - 1
    while first > 0 and bad[first] - bad[first - 1] <= 20:
        first -= 1
    return points[bad[first]]


def _nan(point: MetricLine) -> bool:
    return point.loss is not None and not math.isfinite(point.loss)
