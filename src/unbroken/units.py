"""Values that carry their unit: durations in seconds and sizes in bytes, read from and shown to people.

Duration("1h30m") == 5400.0        str(Duration(5400)) == "1h30m"
Bytes("1.5GiB") == 1610612736      str(Bytes(1610612736)) == "1.5 GiB"
"""

from __future__ import annotations

import math
import re

from .errors import UsageError

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)", re.IGNORECASE | re.ASCII)


def plural(count: int, word: str) -> str:
    """`1 node`, `2,000 nodes`."""
    return f"{count:,} {word}{'s' * (count != 1)}"


class Duration(float):
    """Seconds. Accepts a number of seconds or text such as '250ms', '90s', '1h30m', '2d'."""

    def __new__(cls, value: float | str) -> Duration:
        return super().__new__(cls, _parse_duration(value) if isinstance(value, str) else value)

    def __str__(self) -> str:
        s = float(self)
        if not math.isfinite(s):
            return str(s)
        if s < 0:
            return "-" + str(Duration(-s))
        if s == 0:
            return "0s"
        # What rounds up to the next unit is shown in it.
        for scale, unit in ((1e6, "us"), (1e3, "ms")):
            if s * scale < 1000 and float(text := f"{s * scale:.3g}") < 1000:
                return f"{text}{unit}"
        if s < 60 and float(text := f"{s:.1f}") < 60:
            return text.rstrip("0").rstrip(".") + "s"
        whole = round(s)
        days, rest = divmod(whole, 86400)
        hours, rest = divmod(rest, 3600)
        minutes, seconds = divmod(rest, 60)
        parts = [(days, "d"), (hours, "h"), (minutes, "m"), (seconds, "s")]
        shown = [f"{n}{u}" for n, u in parts if n][:2]
        return "".join(shown)

    __repr__ = __str__


class Bytes(int):
    """A size. Accepts a number of bytes or text such as '512MB' (10^6) or '1.5GiB' (2^30)."""

    def __new__(cls, value: float | str) -> Bytes:
        return super().__new__(cls, _parse_bytes(value) if isinstance(value, str) else int(value))

    def __str__(self) -> str:
        n = float(self)
        for unit in ("B", "KiB", "MiB", "GiB"):
            if abs(n if unit == "B" else round(n, 1)) < 1024:
                return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}".replace(".0 ", " ")
            n /= 1024
        return f"{n:.1f} TiB".replace(".0 ", " ")

    __repr__ = __str__


def _parse_duration(text: str) -> float:
    t = text.strip().lower()
    try:
        plain = float(t)
    except ValueError:
        plain = math.nan
    if math.isfinite(plain):
        return plain
    total, end = 0.0, 0
    for m in _PART.finditer(t):
        if m.start() != end or m[2] not in _SECONDS:
            break
        total += float(m[1]) * _SECONDS[m[2]]
        end = m.end()
    if end == 0 or end != len(t):
        raise UsageError(f"'{text}' is not a duration", hint="Write it like 250ms, 90s, 1h30m or 2d")
    return total


def _parse_bytes(text: str) -> int:
    m = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower(), re.ASCII)
    if not m or m[2] not in _BYTES:
        raise UsageError(f"'{text}' is not a size", hint="Write it like 512MB, 1.5GiB or a number of bytes")
    return int(float(m[1]) * _BYTES[m[2]])
