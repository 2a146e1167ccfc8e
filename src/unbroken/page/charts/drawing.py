"""What all drawings have: their frame, texts, lines, legend, upright axis."""

from __future__ import annotations

from collections.abc import Iterable

from ..elements import Markup, element, width_of
from ..palette import LIGHT
from .scales import Axis

FONT = "system-ui, -apple-system, Segoe UI, Roboto, Helvetica Neue, Arial, sans-serif"
INK, SOFT, RULE, PAPER = LIGHT["ink"], LIGHT["soft"], LIGHT["rule"], LIGHT["paper"]


def drawing(inside: Iterable[str], width: float, height: float, title: str, **more: object) -> Markup:
    """An <svg> with a title for screen readers. In a page it needs no namespace; `as_file` gives it one."""
    return element(
        "svg", *inside, viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=f"{width:.0f}", height=f"{height:.0f}", role="img", aria_label=title, font_family=FONT, font_size=12, **more,
    )  # fmt: skip


def as_file(svg: str) -> str:
    """The drawing as a file of its own, on white."""
    head, rest = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).split(">", 1)
    return f'{head}><rect width="100%" height="100%" fill="#fff"/>{rest}'


def text(x: float, y: float, said: str, *, anchor: str | None = None, fill: str = SOFT, size: float | None = None,
         bold: bool = False, **more: object) -> Markup:  # fmt: skip
    """A <text> element."""
    return element(
        "text", said, x=float(x), y=float(y), text_anchor=anchor, fill=fill, font_size=size,
        font_weight=600 if bold else None, **more,
    )  # fmt: skip


def line(x1: float, y1: float, x2: float, y2: float, stroke: str = SOFT, **more: object) -> Markup:
    """A <line> element."""
    return element("line", x1=float(x1), x2=float(x2), y1=float(y1), y2=float(y2), stroke=stroke, **more)


def turned(x: float, middle: float, said: str) -> Markup:
    """What a vertical axis shows, written upwards."""
    return text(x, middle, said, anchor="middle", transform=f"rotate(-90 {x:.0f} {middle:.1f})")


def head(title: str) -> list[Markup]:
    """The title of a panel."""
    return [text(0, 14, title, fill=INK, size=13, bold=True)] if title else []


def legend(items: list[tuple[str, str, str]], width: float, y0: float) -> tuple[list[Markup], float]:
    """(elements, height): label, colour, dash of each series, in rows; each a group that a click can toggle."""
    out: list[Markup] = []
    x, y = 0.0, y0
    for i, (label, color, dash) in enumerate(items):
        room = 26 + width_of(label) + 14
        if x + room > width and x > 0:
            x, y = 0.0, y + 18
        ground = element("rect", x=x, y=y - 12, width=room - 8, height=17, fill_opacity=0)
        sample = line(x, y - 4, x + 20, y - 4, color, stroke_width=3, stroke_dasharray=dash or None)
        out.append(element("g", ground, sample, text(x + 26, y, label, fill=INK), cls="key", data_series=i))
        x += room
    return out, (y - y0 + 18 if items else 0)


def top_of(title: str, keys: list[tuple[str, str, str]], width: float) -> tuple[list[Markup], float]:
    """Title and legend (without keys none), and where the drawing below them begins."""
    out, top = head(title), 26.0 if title else 6.0
    if keys:
        drawn, used = legend(keys, width, top + 10)
        out, top = out + drawn, top + used + 4
    return out, top


def left_axis(
    axis: Axis,
    ticks: list[tuple[float, str]],
    right: float,
    title: str,
    top: float,
    foot: float,
    *,
    left: float = 0.0,
) -> tuple[list[Markup], float]:
    """A vertical axis: rules across the drawing, labels, its title; and where the drawing begins on the left (at
    `left`, or where the labels leave room)."""
    left = left or 30 + max((width_of(label) for _, label in ticks), default=20)
    out: list[Markup] = []
    for value, label in ticks:
        y = axis.at(value)
        out += [line(left, y, right, y, RULE), text(left - 7, y + 4, label, anchor="end")]
    return [*out, *([turned(10, (top + foot) / 2, title)] if title else [])], left


def bottom_axis(
    axis: Axis, ticks: list[tuple[float, str]], foot: float, title: str, height: float
) -> list[Markup]:
    """A horizontal axis at `foot`: a line, ticks with labels, its title at the bottom of the drawing."""
    out = [line(axis.a, foot, axis.b, foot)]
    for value, label in ticks:
        x = axis.at(value)
        last = x > axis.b - width_of(label) / 2
        out += [
            line(x, foot, x, foot + 4),
            text(axis.b if last else x, foot + 17, label, anchor="end" if last else "middle"),
        ]
    return [*out, text((axis.a + axis.b) / 2, height - 5, title, anchor="middle")]
