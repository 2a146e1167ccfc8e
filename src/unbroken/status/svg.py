"""Hand-written SVG: axes, a loss curve with marks, lanes over time. Pure text, no library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..page.terminal import escape

WIDTH = 1000.0
LEFT, RIGHT = 62.0, 14.0
_BADGE_ROWS = 3
_MAX_LINES = 60
BADGE_H = 17.0
LANE_H = 9.0
KINDS = (
    "training", "setup", "finishing", "starting", "replayed", "unnoticed", "down", "away", "spare", "fault",
)  # fmt: skip
"""Kinds of stretches; later ones are drawn above earlier ones."""

Stretch = tuple[str, float, float]
"""(kind, from x, to x)."""


@dataclass(frozen=True)
class Scale:
    """Maps values from [low, high] to pixels [start, stop]."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        share = 0.5 if span <= 0 else (value - self.low) / span
        return self.start + share * (self.stop - self.start)


@dataclass(frozen=True)
class Mark:
    """A numbered mark at an x in pixels; `title` is what hovering says, `target` the id that a click goes to."""

    x: float
    label: str
    title: str
    target: str


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round values (1, 2 or 5 times a power of ten apart) inside [low, high]."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low] if math.isfinite(low) else []
    raw = span / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


_TIME_STEPS = (
    0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400,
    172800, 604800, 1209600, 2592000, 7776000, 31536000,
)  # fmt: skip


def time_ticks(seconds: float, about: int) -> list[float]:
    """Round times from 0 to `seconds`."""
    if not seconds > 0:
        return [0.0]
    step = next((s for s in _TIME_STEPS if s >= seconds / max(1, about)), _TIME_STEPS[-1])
    return [n * step for n in range(int(seconds / step + 1e-9) + 1)]


Row = list[tuple[float, float, list[Mark]]]


def badge_rows(marks: Sequence[Mark]) -> list[Row]:
    """The marks laid out as badges in up to three rows, lowest first; where that is not enough, in one row in which
    neighbours share a badge. A badge is (x of its middle, half its width, its marks)."""
    placed: list[Row] = []
    for mark in sorted(marks, key=lambda m: m.x):
        half = _half_width(mark.label)
        free = next((r for r in placed if r[-1][0] + r[-1][1] + 2 < mark.x - half), None)
        if free is not None:
            free.append((mark.x, half, [mark]))
        elif len(placed) < _BADGE_ROWS:
            placed.append([(mark.x, half, [mark])])
        else:
            return [_merged(marks)]
    return placed


def _merged(marks: Sequence[Mark]) -> Row:
    """One row in which marks too close to each other share a badge."""
    row: Row = []
    for mark in sorted(marks, key=lambda m: m.x):
        half = _half_width(mark.label)
        row.append((_inside(mark.x, half), half, [mark]))
        while len(row) > 1 and row[-2][0] + row[-2][1] + 3 > row[-1][0] - row[-1][1]:
            group = row[-2][2] + row[-1][2]
            half = _half_width(_label(group))
            row[-2:] = [(_inside((group[0].x + group[-1].x) / 2, half), half, group)]
    return row


def badges(rows: Sequence[Row], bottom: float) -> str:
    """Rows of badges, growing upwards from `bottom`."""
    parts = []
    for i, row in enumerate(rows):
        y = bottom - i * BADGE_H - 8
        for x, half, group in row:
            title = "\n".join(m.title for m in group[:20])
            centre = _inside(x, half)
            parts.append(
                f'<a href="#{escape(group[0].target)}" class="badge"><title>{escape(title)}</title>'
                f'<rect x="{centre - half:.1f}" y="{y - 7:.1f}" width="{2 * half:.1f}" height="14" rx="7"/>'
                f'<text x="{centre:.1f}" y="{y + 3.6:.1f}">{escape(_label(group))}</text></a>'
            )
    return "".join(parts)


def _inside(x: float, half: float) -> float:
    """The middle of a badge, moved so that all of it can be seen."""
    return min(max(x, LEFT + half - 8), WIDTH - half - 1)


def _label(group: Sequence[Mark]) -> str:
    if len(group) == 1:
        return group[0].label
    first, last = group[0].label, group[-1].label
    return f"{first}–{last}" if int(last) - int(first) == len(group) - 1 else f"{first}…{last}"


def _half_width(label: str) -> float:
    return 5.0 + 3.2 * len(label)


def curve(
    points: Sequence[tuple[float, float]],
    marks: Sequence[Mark],
    *,
    step_range: tuple[float, float],
    gaps: frozenset[int] = frozenset(),
    height: float = 300.0,
) -> tuple[str, Scale, Scale]:
    """A loss curve: SVG text and its two scales. `points` are (step, loss) by rising step, losses may be infinite.

    Where a few losses would flatten all others, the axis ends below them and a triangle marks each place. The line
    is broken before each step in `gaps`.
    """
    finite = [y for _, y in points if math.isfinite(y)]
    low, high = _y_range(finite)
    rows = badge_rows(marks)
    top = 8.0 + BADGE_H * len(rows)
    x = Scale(step_range[0], max(step_range[1], step_range[0] + 1), LEFT, WIDTH - RIGHT)
    y = Scale(low, high, height - 34.0, top + 8.0)
    parts = [
        _y_axis(y, height),
        _x_axis(x, [t for t in ticks(x.low, x.high, 8) if t == round(t)], _count, height, "step"),
    ]
    foot = height - 34 if len(marks) <= _MAX_LINES else top + 8
    places = sorted({round(m.x) if len(marks) > _MAX_LINES else round(m.x, 1) for m in marks})
    if places:
        parts.append(f'<path class="mark" d="{"".join(f"M{at} {top:.1f}V{foot:.1f}" for at in places)}"/>')
    path: list[str] = []
    clipped: list[tuple[float, float]] = []
    pen = "M"
    breaks = sorted(gaps)
    for step, loss in points:
        while breaks and breaks[0] <= step:
            breaks.pop(0)
            pen = "M"
        if not math.isfinite(loss) or loss > high:
            clipped.append((x(step), loss))
            pen = "M" if not math.isfinite(loss) else pen
            if not math.isfinite(loss):
                continue
        path.append(f"{pen}{x(step):.1f} {y(min(loss, high)):.1f}")
        pen = "L"
    if len(path) == 1:
        at = path[0][1:].split()
        parts.append(f'<circle class="loss-dot" cx="{at[0]}" cy="{at[1]}" r="3"/>')
    elif path:
        parts.append(f'<path class="loss" d="{"".join(path)}"/>')
    for at_x, loss in clipped[:200]:
        tip = y(high)
        parts.append(
            f'<path class="clip" d="M{at_x - 4:.1f} {tip + 7:.1f}h8l-4 -7z"><title>loss {loss:.6g}, above the axis'
            "</title></path>"
        )
    parts.append(badges(rows, top))
    return "".join(parts), x, y


def _y_range(losses: Sequence[float]) -> tuple[float, float]:
    """The axis for finite losses in the order of their steps: all of them, unless a few rise far above both the
    usual ones and those at the beginning."""
    if not losses:
        return 0.0, 1.0
    ordered = sorted(losses)
    low, high = ordered[0], ordered[-1]
    usual = ordered[max(0, math.ceil(0.98 * len(ordered)) - 1)]
    cap = max(usual, *losses[: max(1, len(losses) // 200)])
    if cap > low and high - low > 3 * (cap - low):
        high = cap + 0.15 * (cap - low)
    if high <= low:
        pad = abs(high) * 0.05 or 0.5
        return low - pad, high + pad
    pad = (high - low) * 0.04
    return low - pad, high + pad


def lanes(
    base: Sequence[Stretch],
    rows: Sequence[tuple[float, Sequence[Stretch]]],
    marks: Sequence[Row],
    pauses: Sequence[tuple[float, str]],
    *,
    x: Scale,
    labels: Sequence[tuple[str, float]],
    height: float,
    time_text: Callable[[float], str],
) -> str:
    """Lanes over time. `base` is what every lane shows; `rows` are (y, what differs in this lane), `labels`
    (text, y), `pauses` (x, title). The base is drawn once and used in every lane, which keeps the page small."""
    top = 4.0 + BADGE_H * len(marks)
    parts = [_x_axis(x, time_ticks(x.high, 8), time_text, height, "time")]
    parts.append(f'<defs><g id="lane">{_stretches(base, 0.0)}</g></defs>')
    for at_y, own in rows:
        parts.append(f'<use href="#lane" y="{at_y:.1f}"/>{_stretches(own, at_y)}')
    parts += [f'<text class="lane" x="{LEFT - 8}" y="{at:.1f}">{escape(text)}</text>' for text, at in labels]
    for at, title in pauses:
        parts.append(
            f'<line class="pause" x1="{at:.1f}" x2="{at:.1f}" y1="{top:.1f}" y2="{height - 34:.1f}">'
            f"<title>{escape(title)}</title></line>"
        )
    return "".join(parts) + badges(marks, top)


def _stretches(spans: Sequence[Stretch], y: float) -> str:
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
    return "".join(f'<path class="k-{k}" d="{"".join(shapes[k])}"/>' for k in KINDS if k in shapes)


def _y_axis(y: Scale, height: float) -> str:
    parts = []
    places = ticks(y.low, y.high, 5)
    apart = places[1] - places[0] if len(places) > 1 else 1.0
    digits = max(0, -math.floor(math.log10(apart) + 1e-9)) if apart > 0 else 0
    for v in places:
        at = y(v)
        text = f"{v:.{digits}f}" if digits <= 8 and abs(v) < 1e7 else f"{v:.4g}"
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text class="tick y" x="{LEFT - 8}" y="{at + 3.6:.1f}">{text}</text>'
        )
    return "".join(parts)


def _x_axis(x: Scale, at: Sequence[float], text: Callable[[float], str], height: float, title: str) -> str:
    base = height - 34
    parts = [f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>']
    for v in at:
        parts.append(
            f'<line class="axis" x1="{x(v):.1f}" x2="{x(v):.1f}" y1="{base}" y2="{base + 4}"/>'
            f'<text class="tick" x="{x(v):.1f}" y="{base + 17}">{escape(text(v))}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="tick title" x="{middle}" y="{height - 5}">{escape(title)}</text>')
    return "".join(parts)


def _count(value: float) -> str:
    return f"{value:,.0f}"
