"""Plain words for numbers: the one sentence under each figure."""

from __future__ import annotations

from collections.abc import Sequence

from ...page.charts.scales import amount, seconds


def pct(v: float | None) -> str:
    """A percentage in words: 12 %, 0.4 %."""
    if v is None:
        return "an unknown share"
    return f"{v:.0f} %" if v >= 9.95 else f"{v:.1f} %"


def join_words(items: Sequence[str]) -> str:
    """a, b and c."""
    items = list(items)
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1] if items else ""


def together(parts: Sequence[str], most: int = 3) -> str:
    """Half sentences as one that can be read: of many, the first two and where the rest is."""
    if len(parts) <= most:
        return "; ".join(parts)
    return "; ".join(parts[:2]) + "; the rest is in the figure"


def hours(v: float | None) -> str:
    """GPU hours with their unit."""
    return f"{amount(v, 0 if v is None or v >= 10 else 2)} GPU hours"


__all__ = ["amount", "hours", "join_words", "pct", "seconds", "together"]
