"""Numbers and durations for people."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime


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


def natural(name: str) -> tuple[tuple[str, int], ...]:
    """A key that puts node-2 before node-10."""
    return tuple((text, int(digits or 0)) for text, digits in re.findall(r"([^0-9]*)([0-9]*)", name))
