"""Lanes over time: what everybody did, and in each lane what differs from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..elements import Markup, element
from .drawing import INK, bottom_axis, line, text
from .marks import BADGE_H, LEFT, Row, badges
from .scales import Axis, duration_ticks

LANE_H = 9.0
KINDS = (
    "training", "setup", "finishing", "starting", "replayed", "unnoticed", "down", "away", "spare", "fault",
)  # fmt: skip
"""Kinds of stretches; later ones are drawn above earlier ones."""

Window = tuple[str, float, float]
"""(kind, from x, to x)."""


def lanes(
    base: Sequence[Window],
    rows: Sequence[tuple[float, Sequence[Window]]],
    marks: Sequence[Row],
    pauses: Sequence[tuple[float, str]],
    *,
    x: Axis,
    labels: Sequence[tuple[str, float]],
    height: float,
    time_text: Callable[[float], str],
) -> list[Markup]:
    """`base` is what every lane shows; `rows` are (y, what differs in this lane), `labels` (text, y), `pauses`
    (x, title). The base is drawn once and used in every lane, which keeps the page small."""
    top, foot = 4.0 + BADGE_H * len(marks), height - 40
    out = bottom_axis(x, [(t, time_text(t)) for t in duration_ticks(x.high, 8)], foot, "time", height)
    out.append(element("defs", element("g", *_windows(base, 0.0), id="lane")))
    for at_y, own in rows:
        out += [element("use", href="#lane", y=at_y), *_windows(own, at_y)]
    out += [text(LEFT - 8, at, said, anchor="end", fill=INK, size=11) for said, at in labels]
    out += [
        element("g", element("title", title), line(at, top, at, foot), cls="pause") for at, title in pauses
    ]
    return [*out, *badges(marks, top)]


def _windows(spans: Sequence[Window], y: float) -> list[Markup]:
    """One path for each kind; what is shorter than a pixel is drawn a pixel wide, or not at all where the same
    kind is there already."""
    shapes: dict[str, list[str]] = {}
    drawn_to: dict[str, float] = {}
    for kind, x0, x1 in spans:
        if x1 - x0 < 0.6:
            if drawn_to.get(kind, -1.0) >= x0 - 0.4:
                continue
            x1 = x0 + 0.6
        drawn_to[kind] = x1
        shapes.setdefault(kind, []).append(f"M{x0:.1f} {y:.1f}h{x1 - x0:.1f}v{LANE_H:.0f}h{x0 - x1:.1f}z")
    return [element("path", cls=f"k-{k}", d="".join(shapes[k])) for k in KINDS if k in shapes]
