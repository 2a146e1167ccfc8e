"""One curve over steps, with numbered marks: broken where steps are missing, cut where a few values flatten all others."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..elements import Markup, element
from ..palette import LIGHT
from .drawing import bottom_axis, left_axis
from .marks import BADGE_H, LEFT, RIGHT, WIDTH, Mark, badge_rows, badges
from .scales import Axis, ticks

_MAX_LINES = 60
_MAX_CLIPPED = 200


def curve(
    points: Sequence[tuple[float, float]],
    marks: Sequence[Mark],
    *,
    steps: tuple[float, float],
    gaps: frozenset[int] = frozenset(),
    height: float = 300.0,
    called: str = "loss",
) -> tuple[list[Markup], Axis, Axis]:
    """What is drawn, and its two axes. `points` are (step, value) by rising step, values may be infinite.

    Where a few values would flatten all others, the axis ends below them and a triangle marks each place. The line
    is broken before each step in `gaps`; `called` is what the values are.
    """
    low, high = _range([y for _, y in points if math.isfinite(y)])
    rows = badge_rows(marks)
    top, foot, right = 8.0 + BADGE_H * len(rows), height - 40, WIDTH - RIGHT
    x = Axis("linear", steps[0], max(steps[1], steps[0] + 1), LEFT, right)
    y = Axis("linear", low, high, foot, top + 8)
    out, _ = left_axis(y, ticks(y, "number", 5), right, "", top, foot, left=LEFT)
    whole = [t for t, _ in ticks(x, "number", 8) if t == round(t)]
    out += bottom_axis(x, [(t, f"{t:,.0f}") for t in whole], foot, "step", height)
    ends = foot if len(marks) <= _MAX_LINES else top + 8
    places = sorted({round(m.x) if len(marks) > _MAX_LINES else round(m.x, 1) for m in marks})
    if places:
        out.append(element("path", cls="mark", d="".join(f"M{at} {top:.1f}V{ends:.1f}" for at in places)))
    path: list[str] = []
    clipped: list[tuple[float, float]] = []
    pen = "M"
    breaks = sorted(gaps)
    for step, value in points:
        while breaks and breaks[0] <= step:
            breaks.pop(0)
            pen = "M"
        if not math.isfinite(value) or value > high:
            clipped.append((x.at(step), value))
        if not math.isfinite(value):
            pen = "M"
            continue
        path.append(f"{pen}{x.at(step):.1f} {y.at(value):.1f}")
        pen = "L"
    if len(path) == 1:
        at = path[0][1:].split()
        out.append(element("circle", cx=at[0], cy=at[1], r=3, fill=LIGHT["blue"]))
    elif path:
        out.append(element("path", d="".join(path), fill="none", stroke=LIGHT["blue"], stroke_width=1.6, stroke_linejoin="round"))  # fmt: skip
    tip = y.at(high)
    for at_x, value in clipped[:_MAX_CLIPPED]:
        title = element("title", f"{called} {value:.6g}, above the axis")
        out.append(element("path", title, cls="clip", d=f"M{at_x - 4:.1f} {tip + 7:.1f}h8l-4 -7z"))
    return [*out, *badges(rows, top)], x, y


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The axis for finite values in the order of their steps: all of them, unless a few rise far above both the
    usual ones and those at the beginning."""
    if not values:
        return 0.0, 1.0
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    usual = ordered[max(0, math.ceil(0.98 * len(ordered)) - 1)]
    cap = max(usual, *values[: max(1, len(values) // 200)])
    if cap > low and high - low > 3 * (cap - low):
        high = cap + 0.15 * (cap - low)
    if high <= low:
        pad = abs(high) * 0.05 or 0.5
        return low - pad, high + pad
    pad = (high - low) * 0.04
    return low - pad, high + pad
