"""What everybody did when: a line each, bars from start to end; and a share over the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..elements import Markup, element, short
from ..palette import LIGHT
from .drawing import INK, RULE, drawing, line, text
from .scales import time_step

WIDTH = 1120.0
LEFT, RIGHT = 132.0, 32.0
PLOT = WIDTH - LEFT - RIGHT
_HATCHED = ("lost", "failed")


@dataclass(frozen=True)
class Bar:
    """One thing that somebody did, in seconds since the start."""

    kind: str
    """The class that colours it; 'lost' and 'failed' are hatched."""
    start: float
    end: float
    task: str = ""
    says: str = ""


@dataclass(frozen=True)
class Row:
    """One line. Rows with the same `node` stand together under its name."""

    name: str
    bars: tuple[Bar, ...]
    node: str = ""
    life: tuple[float, float] = (0.0, 0.0)
    """When it was there, in seconds since the start."""

    @property
    def heading(self) -> str:
        """What stands above it and its neighbours."""
        return self.node


def _x(seconds: float, span: float) -> float:
    return LEFT + PLOT * seconds / span


def gantt(rows: Sequence[Row], span: float, title: str) -> Markup:
    """The rows over `span` seconds; the page's script zooms them and shows the bars of one task together."""
    height = 22 if len(rows) <= 24 else 14 if len(rows) <= 64 else 10 if len(rows) <= 200 else 4
    gap = 3 if height > 10 else 1
    y, out, heading = 8.0, [], ""
    for row in rows:
        if row.heading and row.heading != heading:
            y += 6 * bool(heading)
            out.append(text(0, y + 11, row.heading, bold=True))
            y += 18
        heading = row.heading
        lane = max(0.0, row.life[0]), min(span, row.life[1])
        parts = []
        if height >= 10:
            full = element("title", row.name)
            named = element("text", short(row.name, LEFT - 16), full, x=LEFT - 8, y=y + height / 2 + min(4.0, height / 3), text_anchor="end", fill=INK, font_size=min(12, height))  # fmt: skip
            parts.append(named)
        parts.append(element(
            "rect", cls="lane", x=_x(lane[0], span), y=y, width=max(0.0, _x(lane[1], span) - _x(lane[0], span)), height=height,
            data_a=f"{lane[0]:.3f}", data_b=f"{lane[1]:.3f}", fill=LIGHT["panel"],
        ))  # fmt: skip
        for bar in row.bars:
            parts += _bar(bar, y, height, span, row.name)
        out.append(element("g", *parts, cls="row", data_name=row.name))
        y += height + gap
    foot = y + 4
    stripes = element("line", x1=0, y1=0, x2=0, y2=6, stroke=LIGHT["orange"], stroke_width=4)
    hatch = element(
        "pattern", element("rect", width=6, height=6, fill=LIGHT["paper"]), stripes, id="hatch", width=6, height=6,
        patternUnits="userSpaceOnUse", patternTransform="rotate(45)",
    )  # fmt: skip
    axis = element("g", *_axis(span, foot, 4), cls="ticks", data_top=4, data_bottom=foot)
    return drawing(
        [element("defs", hatch), axis, *out], WIDTH, foot + 22, title, cls="zooms", id="gantt", data_left=f"{LEFT:.0f}",
        data_plot=f"{PLOT:.0f}", data_span=f"{span:.6f}",
    )  # fmt: skip


def _axis(span: float, foot: float, top: float) -> list[Markup]:
    step, out, n = time_step(span, 10), [], 0
    while n * step <= span * 1.0001:
        x = _x(n * step, span)
        label = text(x, foot + 15, clock(n * step, step), anchor="middle")
        out.append(element("g", line(x, top, x, foot, RULE), label, cls="tick"))
        n += 1
    return out


def clock(seconds: float, step: float) -> str:
    """A time on an axis whose ticks are `step` seconds apart."""
    if seconds == 0:
        return "0"
    if step >= 3600:
        return f"{seconds / 3600:g} h"
    if step >= 60:
        hours = f"{int(seconds // 3600)}:{int(seconds % 3600 // 60):02d} h"
        return f"{seconds / 60:g} min" if seconds < 3600 else hours
    return f"{seconds:g} s" if seconds < 60 else f"{int(seconds // 60)}:{seconds % 60:02.0f} min"


def _bar(bar: Bar, y: float, height: int, span: float, who: str) -> list[Markup]:
    a, b = _x(bar.start, span), _x(bar.end, span)
    title = f"{bar.task}\n{who}: {bar.says}" if bar.task else f"{who}\n{bar.says}"
    out = [element(
        "rect", element("title", title), cls=f"b k-{bar.kind}", x=f"{a:.2f}", y=y, width=f"{max(0.7, b - a):.2f}", height=height,
        rx=2 if height > 10 else None, data_a=f"{bar.start:.3f}", data_b=f"{bar.end:.3f}", data_task=bar.task or None,
        fill="url(#hatch)" if bar.kind in _HATCHED else None,
    )]  # fmt: skip
    if height >= 14 and bar.task:  # what does not fit stays empty; zooming makes room
        out.append(element(
            "text", short(bar.task, b - a - 8, 11), cls=f"t {bar.kind}", x=a + 4, y=y + height / 2 + 4,
            data_a=f"{bar.start:.3f}", data_b=f"{bar.end:.3f}", data_full=bar.task,
        ))  # fmt: skip
    return out


def share_curve(
    values: Sequence[float], made: float, span: float, name: str, more: str, title: str
) -> Markup:
    """A share between 0 and 1 in equal slices of `made` seconds, above a chart of `span` seconds with which it zooms."""
    high, foot = 46.0, 54.0
    points = [f"{_x(0, span):.1f},{foot:.0f}"]
    for i, v in enumerate(values):
        at = f"{foot - high * v:.1f}"
        points += [f"{_x(made * (i + k) / len(values), span):.1f},{at}" for k in (0, 1)]
    points.append(f"{_x(made, span):.1f},{foot:.0f}")
    return drawing(
        [
            text(LEFT - 8, 22, name, anchor="end", fill=INK),
            text(LEFT - 8, 38, more, anchor="end"),
            line(LEFT, foot - high, LEFT + PLOT, foot - high, RULE),
            line(LEFT, foot, LEFT + PLOT, foot, RULE),
            element("polygon", points=" ".join(points), cls="k-infer", fill_opacity="0.35"),
        ],
        WIDTH, 64, title, cls="follows", data_values=" ".join(f"{v:.3f}" for v in values), data_made=f"{made:.6f}",
        data_base=f"{foot:.0f}", data_high=f"{high:.0f}",
    )  # fmt: skip
