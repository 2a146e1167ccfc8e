"""Lines over a common axis."""

from __future__ import annotations

import math

from ..elements import Markup, element
from ..palette import NAMES
from ..terminal import script_json
from .drawing import bottom_axis, drawing, left_axis, line, text, top_of
from .scales import Axis, nice_range, ticks
from .spec import LineChart


def lines(c: LineChart, width: int, height: int) -> Markup:
    """A line chart; the values at the pointer come from `data-chart`."""
    shown = c.legend and (len(c.series) > 1 or any(s.dash for s in c.series))
    out, top = top_of(c.title, [(s.label, s.color, s.dash) for s in c.series] if shown else [], width)
    x_low, x_high = c.x_range or nice_range([p[0] for s in c.series for p in s.points], c.x_scale)
    y_low, y_high = c.y_range or nice_range(
        [p[1] for s in c.series for p in s.points], "linear", from_zero=True
    )
    head, foot, right = top + 8, height - 44.0, width - 12.0
    y_axis = Axis("linear", y_low, y_high, foot, head)
    drawn, left = left_axis(y_axis, ticks(y_axis, "number", 5), right, c.y, head, foot)
    x_axis = Axis(c.x_scale, x_low, x_high, left, right)
    # A month takes so many pixels.
    room = 7 if c.x_kind != "time" else max(2, min(6, int((width - left) / 80)))
    drawn += bottom_axis(x_axis, ticks(x_axis, c.x_kind, room), foot, c.x, height)
    for v, label in c.marks:
        if x_low <= v <= x_high:
            x = x_axis.at(v)
            near = x > width - 40
            drawn.append(line(x, head, x, foot, stroke_dasharray="2 3"))
            drawn.append(
                text(x + (-4 if near else 4), foot - 6, label, size=11, anchor="end" if near else None)
            )
    for i, s in enumerate(c.series):
        pts = [(x_axis.at(x), y_axis.at(y)) for x, y in s.points if math.isfinite(x) and math.isfinite(y)]
        if not pts:
            continue
        d = path(pts, s.step)
        if s.area:
            base = y_axis.at(max(y_low, 0))
            area = f"{d}L{pts[-1][0]:.1f} {base:.1f}L{pts[0][0]:.1f} {base:.1f}Z"
            drawn.append(element("path", cls="s", data_series=i, d=area, fill=s.color, fill_opacity=0.13))
        drawn.append(element(
            "path", cls="s", data_series=i, d=d, fill="none", stroke=s.color, stroke_width=1.8 if s.dash else 2.4,
            stroke_linejoin="round", stroke_dasharray=s.dash or None,
        ))  # fmt: skip
        if len(pts) == 1:
            drawn.append(
                element("circle", cls="s", data_series=i, cx=pts[0][0], cy=pts[0][1], r=3.5, fill=s.color)
            )
    data = {
        "x": [c.x_scale, x_low, x_high, round(left, 1), right, c.x_kind],
        "y": [y_low, y_high, foot, round(head, 1)],
        "yl": c.y,
        "s": [
            {"l": s.label, "c": s.color, "n": NAMES.get(s.color, ""), "p": [[sig(a), sig(b)] for a, b in s.points], "st": int(s.step)}
            for s in c.series
        ],
    }  # fmt: skip
    return drawing([*out, *drawn], width, height, c.title or c.y, data_chart=script_json(data))


def sig(v: float) -> float:
    """Five significant digits are enough to show (times keep their seconds)."""
    return round(v) if abs(v) > 1e8 else float(f"{v:.5g}")


def path(pts: list[tuple[float, float]], step: bool) -> str:
    """An SVG path through the points; points closer than half a pixel are left out."""
    out = [f"M{pts[0][0]:.1f} {pts[0][1]:.1f}"]
    last = pts[0]
    for i, (x, y) in enumerate(pts[1:], 1):
        if i < len(pts) - 1 and abs(x - last[0]) < 0.5 and abs(y - last[1]) < 0.5:
            continue
        out.append(f"H{x:.1f}V{y:.1f}" if step else f"L{x:.1f} {y:.1f}")
        last = (x, y)
    return "".join(out)
