"""Drawings as small as a line of text: an interval on a scale, a row of values, a few points with their errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..elements import Markup, element
from ..palette import LIGHT
from .drawing import drawing, line, text
from .scales import Axis

BLUE, RULE = LIGHT["blue"], LIGHT["rule"]


def interval(value: float, error: float | None) -> Markup:
    """A value between 0 and 1 on a line, with two errors to each side; '' where it lies outside."""
    if not 0 <= value <= 1:
        return Markup()
    x, out = 100 * value, [element("rect", x=0, y=6.5, width=100, height=1, fill=RULE)]
    if error is not None and math.isfinite(error):
        a, b = max(0.0, x - 200 * error), min(100.0, x + 200 * error)
        out.append(element("rect", x=a, y=4, width=max(0.5, b - a), height=6, fill=BLUE, fill_opacity="0.3"))
    out.append(element("rect", x=min(98.5, max(0.0, x - 0.75)), y=1, width=1.5, height=12, fill=BLUE))
    return element(
        "svg", *out, viewBox="0 0 100 14", style="width:100px", preserveAspectRatio="none", aria_hidden="true"
    )


def row_of(values: Sequence[float], title: str) -> Markup:
    """Values in their order as one line, with the lowest and highest beside it. They have to be finite."""
    axis = Axis("linear", min(values), max(values), 110, 10)
    wide = 1000.0 / max(1, len(values) - 1)
    path = "".join(f"{'L' if i else 'M'}{i * wide:.1f} {axis.at(v):.1f}" for i, v in enumerate(values))
    drawn = element("path", d=path, fill="none", stroke=BLUE, stroke_width=1.6, stroke_linejoin="round")
    ends = [text(1006, 14, f"{max(values):.3g}"), text(1006, 114, f"{min(values):.3g}")]
    return drawing([drawn, *ends], 1060, 122, title)


@dataclass(frozen=True)
class Point:
    """A value with two errors to each side; `worse` marks a fall."""

    x: int
    value: float
    error: float | None = None
    worse: bool = False


def points(values: Sequence[Point], low: float, high: float, title: str, x: str) -> Markup:
    """Few values over `x`, a line between them; the axis goes from `low` to `high`."""
    width, height = 360.0, 150.0
    first, last = values[0].x, values[-1].x
    across, up = (
        Axis("linear", first, max(last, first + 1), 34, width - 12),
        Axis("linear", low, high, height - 18, 12),
    )
    path = "".join(
        f"{'L' if i else 'M'}{across.at(p.x):.1f} {up.at(p.value):.1f}" for i, p in enumerate(values)
    )
    out = [
        element("text", f"{high:.3g}", x=0, y=16),
        element("text", f"{low:.3g}", x=0, y=132),
        element("text", str(first), x=34, y=148),
        element("text", f"{x} {last}", x=348, y=148, text_anchor="end"),
        element("path", d=path, fill="none", stroke=BLUE, stroke_width=1.4),
    ]
    for p in values:
        at = across.at(p.x)
        if p.error:
            ends = up.at(p.value - 2 * p.error), up.at(p.value + 2 * p.error)
            out.append(line(at, ends[0], at, ends[1], BLUE, stroke_opacity="0.35"))
        look = {"cls": "fall"} if p.worse else {"fill": BLUE}
        said = element("title", f"{x} {p.x}: {p.value:.4f}")
        out.append(element("circle", said, cx=at, cy=up.at(p.value), r=2.5, **look))
    return drawing(out, width, height, title, cls="spark")
