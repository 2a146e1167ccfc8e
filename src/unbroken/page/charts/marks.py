"""Numbered marks along an axis: badges that never overlap, each a link to what it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..elements import Markup, element

WIDTH = 1000.0
LEFT, RIGHT = 62.0, 14.0
"""Width of a drawing over the whole page, and where its plot begins and ends."""
BADGE_H = 17.0
_BADGE_ROWS = 3


@dataclass(frozen=True)
class Mark:
    """A numbered mark at an x in pixels; `title` is what hovering says, `target` the id that a click goes to."""

    x: float
    label: str
    title: str
    target: str


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
            return [_merge(marks)]
    return placed


def _merge(marks: Sequence[Mark]) -> Row:
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


def badges(rows: Sequence[Row], bottom: float) -> list[Markup]:
    """Rows of badges, growing upwards from `bottom`."""
    out = []
    for i, row in enumerate(rows):
        y = bottom - i * BADGE_H - 8
        for x, half, group in row:
            centre = _inside(x, half)
            more = [f"and {len(group) - 20} more"] if len(group) > 20 else []
            out.append(element(
                "a", element("title", "\n".join([*(m.title for m in group[:20]), *more])),
                element("rect", x=centre - half, y=y - 7, width=2 * half, height=14, rx=7),
                element("text", _label(group), x=centre, y=y + 3.6), href=f"#{group[0].target}", cls="number",
            ))  # fmt: skip
    return out


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
