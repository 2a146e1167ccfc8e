"""Hand-written SVG: axes, a loss curve with marks, lanes over time. Pure text, no library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 1000.0
LEFT, RIGHT = 62.0, 14.0
_BADGE_ROWS = 3
_BADGE_H = 17.0


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


def badges(marks: Sequence[Mark], bottom: float) -> tuple[str, float]:
    """The marks as numbered badges above `bottom`, in up to three rows; what still collides shares one badge.

    Returns the SVG and the height that it takes. Badge rows grow upwards from `bottom`.
    """
    placed: list[list[tuple[float, float, list[Mark]]]] = [[] for _ in range(_BADGE_ROWS)]
    for mark in sorted(marks, key=lambda m: m.x):
        half = _half_width(mark.label)
        for row in placed:
            if not row or row[-1][0] + row[-1][1] + 2 < mark.x - half:
                row.append((mark.x, half, [mark]))
                break
        else:
            row = placed[-1]
            x, _, group = row[-1]
            group.append(mark)
            row[-1] = (x, _half_width(f"{group[0].label}…{group[-1].label}"), group)
    parts = []
    for i, row in enumerate(placed):
        y = bottom - i * _BADGE_H - 8
        for x, half, group in row:
            label = group[0].label if len(group) == 1 else f"{group[0].label}…{group[-1].label}"
            title = "\n".join(m.title for m in group[:20])
            centre = min(max(x, LEFT + half - 8), WIDTH - half - 1)
            parts.append(
                f'<a href="#{escape(group[0].target)}" class="badge"><title>{escape(title)}</title>'
                f'<rect x="{centre - half:.1f}" y="{y - 7:.1f}" width="{2 * half:.1f}" height="14" rx="7"/>'
                f'<text x="{centre:.1f}" y="{y + 3.6:.1f}">{escape(label)}</text></a>'
            )
    return "".join(parts), _BADGE_H * sum(1 for row in placed if row)


def _half_width(label: str) -> float:
    return 5.0 + 3.2 * len(label)


def curve(
    points: Sequence[tuple[float, float]],
    marks: Sequence[Mark],
    *,
    step_range: tuple[float, float],
    height: float = 300.0,
) -> tuple[str, Scale, Scale]:
    """A loss curve: SVG text and its two scales. `points` are (step, loss) by rising step, losses may be infinite.

    Where a few losses would flatten all others, the axis ends below them and a triangle marks each place.
    """
    finite = [y for _, y in points if math.isfinite(y)]
    low, high = _y_range(finite)
    top = 8.0 + _BADGE_H * (min(_BADGE_ROWS, len(marks)) if marks else 0)
    x = Scale(step_range[0], max(step_range[1], step_range[0] + 1), LEFT, WIDTH - RIGHT)
    y = Scale(low, high, height - 34.0, top + 8.0)
    parts = [_y_axis(y, height), _x_axis(x, ticks(x.low, x.high, 8), _count, height, "step")]
    parts += [
        f'<line class="mark" x1="{m.x:.1f}" x2="{m.x:.1f}" y1="{top:.1f}" y2="{height - 34:.1f}"/>'
        for m in marks
    ]
    path: list[str] = []
    clipped: list[tuple[float, float]] = []
    pen = "M"
    for step, loss in points:
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
    drawn, _ = badges(marks, top)
    parts.append(drawn)
    return "".join(parts), x, y


def _y_range(finite: Sequence[float]) -> tuple[float, float]:
    if not finite:
        return 0.0, 1.0
    ordered = sorted(finite)
    low, high = ordered[0], ordered[-1]
    usual = ordered[max(0, math.ceil(0.97 * len(ordered)) - 1)]
    middle = ordered[len(ordered) // 2]
    if high - low > 8 * max(usual - low, abs(middle) * 1e-6):
        high = usual + 0.15 * (usual - low)
    if high <= low:
        pad = abs(high) * 0.05 or 0.5
        return low - pad, high + pad
    pad = (high - low) * 0.04
    return low - pad, high + pad


def lanes(
    rows: Sequence[tuple[str, float, Sequence[tuple[str, float, float]]]],
    marks: Sequence[Mark],
    pauses: Sequence[tuple[float, str]],
    *,
    x: Scale,
    labels: Sequence[tuple[str, float]],
    height: float,
    time_text: Callable[[float], str],
) -> str:
    """Lanes over time. `rows` are (name, y, [(kind, from x, to x)]), `labels` (text, y), `pauses` (x, title)."""
    parts = [_x_axis(x, time_ticks(x.high, 8), time_text, height, "time")]
    shapes: dict[str, list[str]] = {}
    row_height = 9.0
    for _, at_y, spans in rows:
        drawn_to: dict[str, float] = {}
        for kind, x0, x1 in spans:
            # What is shorter than a pixel is drawn a pixel wide, or not at all where the same kind is there already.
            if x1 - x0 < 0.6:
                if drawn_to.get(kind, -1.0) >= x0 - 0.4:
                    continue
                x1 = x0 + 0.6
            drawn_to[kind] = x1
            shapes.setdefault(kind, []).append(
                f"M{x0:.1f} {at_y:.1f}h{x1 - x0:.1f}v{row_height}h{x0 - x1:.1f}z"
            )
    order = ("spare", "training", "finishing", "starting", "replayed", "unnoticed", "down", "fault")
    parts += [f'<path class="k-{k}" d="{"".join(shapes[k])}"/>' for k in order if k in shapes]
    parts += [f'<text class="lane" x="{LEFT - 8}" y="{at:.1f}">{escape(text)}</text>' for text, at in labels]
    for at, title in pauses:
        parts.append(
            f'<line class="pause" x1="{at:.1f}" x2="{at:.1f}" y1="{_BADGE_H * 3 + 4:.1f}" y2="{height - 34:.1f}">'
            f"<title>{escape(title)}</title></line>"
        )
    drawn, _ = badges(marks, _BADGE_H * 3 + 4)
    return "".join(parts) + drawn


def _y_axis(y: Scale, height: float) -> str:
    parts = []
    for v in ticks(y.low, y.high, 5):
        at = y(v)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text class="tick y" x="{LEFT - 8}" y="{at + 3.6:.1f}">{v:.4g}</text>'
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
    parts.append(f'<text class="tick title" x="{middle}" y="{height - 2}">{escape(title)}</text>')
    return "".join(parts)


def _count(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else ""
