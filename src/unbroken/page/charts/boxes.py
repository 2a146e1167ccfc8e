"""Boxes with whiskers, and grids of shades."""

from __future__ import annotations

import math

from ..elements import Markup, element, width_of
from ..palette import LIGHT
from .drawing import INK, RULE, drawing, head, line, text
from .scales import Axis, amount, ticks
from .spec import Boxes, Heat


def boxes(c: Boxes, width: int) -> Markup:
    """Boxes and whiskers on a logarithmic axis, one row each."""
    out, top = head(c.title), 30.0 if c.title else 8.0
    values = [v for b in c.boxes for v in (b.low, b.high)]
    low = min((v for v in values if v > 0), default=1.0)
    left = max((width_of(b.label) for b in c.boxes), default=40) + 14
    axis = Axis("log", low, max(max(values, default=2.0), low * 2), left, width - 16.0)
    row = 30.0
    bottom = top + row * len(c.boxes)
    for v, label in ticks(axis, "number", 8):
        x = axis.at(v)
        out += [line(x, top, x, bottom, RULE), text(x, bottom + 16, label, anchor="middle")]
    for i, b in enumerate(c.boxes):
        y = top + row * (i + 0.5)
        low_x, q1, median, q3, high_x = (axis.at(v) for v in (b.low, b.q1, b.median, b.q3, b.high))
        dash = "3 2" if b.dashed else None
        said = (
            f"{b.label}: median {amount(b.median)}, quartiles {amount(b.q1)} to {amount(b.q3)}, "
            f"whiskers {amount(b.low)} to {amount(b.high)}"
        )
        out.append(text(left - 9, y + 4, b.label, anchor="end", fill=INK))
        out.append(element(
            "g", element("title", said),
            line(low_x, y, high_x, y, b.color, stroke_width=1.6, stroke_dasharray=dash),
            *(line(x, y - 5, x, y + 5, b.color, stroke_width=1.6) for x in (low_x, high_x)),
            element("rect", x=q1, y=y - 9, width=max(q3 - q1, 2.0), height=18, rx=2, fill=b.color, stroke=b.color,
                    fill_opacity="0.08" if b.dashed else "0.25", stroke_width=1.6, stroke_dasharray=dash),
            line(median, y - 9, median, y + 9, b.color, stroke_width=3.4),
        ))  # fmt: skip
    out.append(text((left + width - 16) / 2, bottom + 36, c.value, anchor="middle"))
    return drawing(out, width, bottom + 44, c.title or c.value)


def heat(c: Heat, width: int) -> Markup:
    """A grid of shades, darker for more."""
    out, top = head(c.title), 30.0 if c.title else 10.0
    left = max((width_of(r) for r in c.rows), default=30) + 10
    cell = (width - left - 4) / max(len(c.columns), 1)
    row = max(min(cell, 24.0), 15.0)
    peak = max((v for r in c.values for v in r), default=1.0) or 1.0
    for i, (label, values) in enumerate(zip(c.rows, c.values, strict=True)):
        y = top + row * i
        out.append(text(left - 7, y + row / 2 + 4, label, anchor="end"))
        for column, v, x in zip(
            c.columns, values, (left + cell * k for k in range(len(values))), strict=True
        ):
            out.append(element(
                "rect", element("title", f"{label} {column}: {amount(v, 0)} {c.unit}"), x=x + 0.5, y=y + 0.5,
                width=max(cell - 1, 0.5), height=row - 1, rx=1.5, fill=LIGHT["blue"],
                fill_opacity=f"{0.06 + 0.94 * min(max(v / peak, 0.0), 1.0) ** 0.8:.2f}",
            ))  # fmt: skip
    y = top + row * len(c.rows)
    for k in range(0, len(c.columns), max(1, math.ceil(34 / max(cell, 1)))):
        out.append(text(left + cell * (k + 0.5), y + 15, c.columns[k], anchor="middle"))
    return drawing(out, width, y + 22, c.title)
