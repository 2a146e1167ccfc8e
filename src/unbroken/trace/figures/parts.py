"""Pieces that several figures need: curves of a result as series, references as dashed series, tables as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...page.charts.scales import amount
from ...page.charts.spec import Grid, Series
from ...samples.tables import Result
from .colors import REFERENCE
from .reference import Reference

DASHES = ("6 4", "2 3", "8 3 2 3")


def points(result: Result, x: str, y: str, **where: Any) -> tuple[tuple[float, float], ...]:
    """(x, y) of the rows that fit, those without a value left out."""
    part = result.where(**where)
    return tuple(
        (float(a), float(b))
        for a, b in zip(part.column(x), part.column(y), strict=True)
        if a is not None and b is not None
    )


def reference_series(
    references: Sequence[Reference], table: str, x: str, y: str, *, color: str | None = None, **where: Any
) -> list[Series]:
    """The same curve of each reference, dashed."""
    out: list[Series] = []
    for i, r in enumerate(references):
        result = r.findings.get(table)
        if not result or y not in result.columns or any(k not in result.columns for k in where):
            continue
        pts = points(result, x, y, **where)
        if pts:
            out.append(
                Series(
                    f"{r.label} (published)" if r.fitted else r.label,
                    pts,
                    color or REFERENCE[i % 3],
                    DASHES[i % 3],
                )
            )
    return out


def grid(
    result: Result,
    columns: Sequence[tuple[str, str, Callable[[Any], str] | None]],
    limit: int = 40,
    caption: str = "",
) -> Grid:
    """Some columns of a result as text: (column, heading, how to write it)."""
    rows = []
    for r in list(result.dicts())[:limit]:
        rows.append(tuple((f or plain_text)(r[c]) for c, _, f in columns))
    if len(result.rows) > limit:
        caption = (
            caption + " " if caption else ""
        ) + f"The first {limit} of {len(result.rows)}; all are in the JSON."
    first = result.rows[0] if result.rows else ()
    numeric = tuple(
        f is not None or (bool(first) and isinstance(first[result.columns.index(c)], (int, float)))
        for c, _, f in columns
    )
    return Grid(tuple(h for _, h, _ in columns), tuple(rows), numeric, caption)


def plain_text(v: Any) -> str:
    """A value as text; a dash for nothing."""
    if v is None:
        return "–"
    if isinstance(v, float):
        return amount(v)
    if isinstance(v, int):
        return f"{v:,}"
    return str(v)


def one(v: Any) -> str:
    """A number with one digit."""
    return amount(v, 1)


def two(v: Any) -> str:
    """A number with two digits."""
    return amount(v, 2)


def whole(v: Any) -> str:
    """A number without digits."""
    return "–" if v is None else f"{v:,.0f}"


def weighted_first(rows: Iterable[dict[str, Any]], by: str) -> dict[str, Any] | None:
    """The row with the largest value in a column."""
    found = [r for r in rows if r.get(by) is not None]
    return max(found, key=lambda r: r[by], default=None)
