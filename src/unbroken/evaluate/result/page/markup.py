"""Escaping, numbers and durations for people."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from ....page.terminal import escape


def esc(value: object) -> str:
    """Text for HTML, in elements and in quoted attributes."""
    return escape(str(value))


def attributes(**given: object) -> str:
    """name="value" pairs; `_` in a name becomes `-`, a trailing one is dropped; None leaves it out."""
    return " ".join(
        f'{k.rstrip("_").replace("_", "-")}="{esc(v)}"' for k, v in given.items() if v is not None
    )


def tag(name: str, *inside: str, **given: object) -> str:
    """An element around markup that is escaped already."""
    more = attributes(**given)
    return f"<{name}{' ' + more if more else ''}>{''.join(inside)}</{name}>"


def duration(seconds: float) -> str:
    """'0.8 s', '42 s', '3 min 20 s', '2 h 05 min', '3 d 4 h'."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 0:
        return "-" + duration(-seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def percent(share: float) -> str:
    """'93.4 %'; never 100 % of what is not whole."""
    if share >= 1.0:
        return "100 %"
    return f"{min(99.9, 100 * share):.1f} %"


def number(value: float) -> str:
    """Four significant places and no needless digits: '0.7391', '23.04', '1.201e+14'."""
    if math.isnan(value):
        return "–"  # of a score: no sample has a verdict
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-4:
        return f"{value:.3e}"
    return f"{value:.{max(0, 4 - max(0, math.floor(math.log10(size)) + 1)) or 1}f}"


def when(moment: float) -> str:
    """A Unix time as UTC, to the minute."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M UTC")


def nice_step(span: float, most: int) -> float:
    """A step of 1, 2, 5, 10, 15, 30 seconds, minutes, ... that cuts `span` seconds into at most `most` pieces."""
    steps = [1, 2, 5, 10, 15, 30]
    ladder = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5] + [s * u for u in (1, 60) for s in steps]
    ladder += [3600 * h for h in (1, 2, 3, 6, 12, 24, 48, 96, 240)]
    for step in ladder:
        if span / step <= most:
            return step
    return span / most
