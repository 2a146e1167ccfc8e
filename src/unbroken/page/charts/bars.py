"""Bars, upright or lying, grouped or stacked."""

from __future__ import annotations

import math

from ..elements import Markup, element, short, width_of
from .drawing import INK, PAPER, SOFT, drawing, left_axis, line, text, top_of
from .scales import Axis, amount, nice_range, power_ticks, ticks
from .spec import Bars


def _top(c: Bars, width: int) -> tuple[list[Markup], float]:
    keys = [(g[0], g[1], "") for g in c.groups] + [(p[0], SOFT, "3 2") for p in c.published]
    return top_of(c.title, keys if c.legend and len(keys) > 1 else [], width)


def _values(c: Bars) -> list[float]:
    """What the axis must hold: sums where bars are stacked, and what is published."""
    sums = [sum(g[2][i] or 0 for g in c.groups) for i in range(len(c.categories))]
    own = sums if c.stacked else [v for g in c.groups for v in g[2] if v is not None]
    return [*own, *(v for p in c.published for v in p[1] if v is not None)]


def _title(c: Bars, category: str, label: str, value: float) -> Markup:
    unit = f" {c.unit}" if c.unit else ""
    return element("title", f"{category} · {label}: {amount(value, c.digits)}{unit}")


def _bar(c: Bars, i: int, k: int, x: float, y: float, width: float, height: float) -> Markup:
    label, color, values = c.groups[k]
    return element(
        "rect", _title(c, c.categories[i], label, values[i] or 0.0), cls="s", data_series=k, x=x, y=y, width=width,
        height=height, rx=1.5, fill=color,
    )  # fmt: skip


def bars(c: Bars, width: int, height: int) -> Markup:
    """Upright bars."""
    out, top = _top(c, width)
    values, base, right = _values(c), height - 44.0, width - 6.0
    if c.log:
        positive = [v for v in values if v > 0] or [1.0]
        low = 10 ** math.floor(math.log10(min(positive)))
        high = max(10 ** math.ceil(math.log10(max(positive)) + 1e-9), low * 10)
        axis = Axis("log", low, high, base, top + 12)
    else:
        low, high = nice_range(values, "linear", from_zero=True)
        axis = Axis("linear", low, 100.0 if c.unit == "%" and c.stacked else high, base, top + 12)
    places = power_ticks(axis) if c.log else ticks(axis, "number", 5)
    drawn, left = left_axis(axis, places, right, c.value, top, base)
    slot = (right - left) / max(len(c.categories), 1)
    inner = min(slot * 0.78, 90)
    each = inner / (1 if c.stacked else max(len(c.groups), 1))
    stride = max(1, math.ceil(max((width_of(x) for x in c.categories), default=10) / max(slot - 4, 1)))
    for i, category in enumerate(c.categories):
        x0 = left + slot * i + (slot - inner) / 2
        floor = 0.0
        for k, (_, _, vs) in enumerate(c.groups):
            v = vs[i]
            if v is None:
                continue
            y0, y1 = (axis.at(floor), axis.at(floor + v)) if c.stacked else (base, axis.at(v))
            x = x0 if c.stacked else x0 + k * each
            said = amount(v, c.digits)
            drawn.append(_bar(c, i, k, x + 0.5, min(y0, y1), max(each - 1, 1.0), max(abs(y0 - y1), 0.6)))
            if not c.stacked and each >= 30:
                drawn.append(text(x + each / 2, y1 - 4, said, anchor="middle", fill=INK, size=11))
            if c.stacked and abs(y0 - y1) > 15 and each > 30:
                middle = (y0 + y1) / 2 + 4
                drawn.append(
                    text(x + each / 2, middle, said, anchor="middle", fill=PAPER, size=11, bold=True)
                )
            floor += v
        for label, published in c.published:
            if (v := published[i]) is not None:
                y = axis.at(v)
                tick = line(x0 - 3, y, x0 + inner + 3, y, stroke_width=2, stroke_dasharray="3 2")
                drawn.append(element("g", _title(c, category, label, v), tick))
        if i % stride == 0:
            drawn.append(text(left + slot * (i + 0.5), base + 17, category, anchor="middle"))
    drawn.append(line(left, base, right, base))
    return drawing([*out, *drawn], width, height, c.title or c.value)


def horizontal_bars(c: Bars, width: int) -> Markup:
    """Lying bars, one row a category: for names."""
    out, top = _top(c, width)
    single = c.stacked or len(c.groups) == 1
    row = 22.0 if single else 8.0 + 13.0 * len(c.groups)
    left = min(max((width_of(x) for x in c.categories), default=40) + 12, width * 0.42)
    values = _values(c)
    high = 100.0 if c.stacked and c.unit == "%" else (max(values, default=1) or 1)
    widest = max((width_of(amount(v, c.digits), 11) for v in values), default=20)
    axis = Axis("linear", 0.0, high, left, width - (8 if c.stacked else widest + 12))
    y = top + 6
    for i, category in enumerate(c.categories):
        out.append(text(left - 8, y + row / 2 + 2, short(category, left - 8), anchor="end", fill=INK))
        floor = 0.0
        for k, (_, _, vs) in enumerate(c.groups):
            v = vs[i]
            if v is None:
                continue
            x0, x1 = (axis.at(floor), axis.at(floor + v)) if c.stacked else (left, axis.at(v))
            high_ = row - 7 if single else 12.0
            at = y + 1 if single else y + 1 + 13 * k
            said = amount(v, c.digits)
            out.append(_bar(c, i, k, x0, at, max(x1 - x0, 0.6), high_))
            if not c.stacked:
                out.append(text(x1 + 5, at + high_ - 2.5, said, size=11))
            elif x1 - x0 > width_of(said, 11) + 8:
                out.append(
                    text(
                        (x0 + x1) / 2, at + high_ - 3.5, said, anchor="middle", fill=PAPER, size=11, bold=True
                    )
                )
            floor += v
        for label, published in c.published:
            if (v := published[i]) is not None:
                x = axis.at(v)
                tick = line(x, y - 1, x, y + row - 4, INK, stroke_width=2, stroke_dasharray="3 2")
                out.append(element("g", _title(c, category, label, v), tick))
        y += row
    out.append(text(left, y + 14, c.value))
    return drawing(out, width, y + 20, c.title or c.value)
