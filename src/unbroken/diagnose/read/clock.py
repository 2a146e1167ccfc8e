"""Times out of log lines: seconds since the epoch, whatever format the writer used.

Lines without a time zone are read as UTC; what matters is the order within one job, and `chronology` corrects
whole hours between sources. Formats without a year (syslog, glog) take it from the job's other lines.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone
from functools import lru_cache

ISO = r"\d{4}[-/]\d\d[-/]\d\d[ T_]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
GLOG = r"[IWEFC]\d{4} \d\d:\d\d:\d\d(?:\.\d{1,9})?"
SYSLOG = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) [ \d]\d \d\d:\d\d:\d\d"
DMESG = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) (?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) [ \d]\d \d\d:\d\d:\d\d \d{4}"
US = r"\d\d/\d\d/\d{4} \d\d:\d\d:\d\d"

_CLOCK = re.compile(r"\d\d:\d\d:\d\d")
_YEAR = re.compile(r"(20[1-9]\d)[-/](?:0\d|1[0-2])[-/][0-3]\d")
# Each format with how far before the time of day it begins.
_FORMATS = tuple(
    (re.compile(f), back) for f, back in ((ISO, 11), (GLOG, 6), (DMESG, 11), (SYSLOG, 7), (US, 11))
)
_ISO_PARTS = re.compile(
    r"(\d{4})[-/](\d\d)[-/](\d\d)[ T_](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)?"
)
_MONTHS = {
    m: i
    for i, m in enumerate(
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"], 1
    )
}


def find(text: str, year: int) -> float | None:
    """The first time in the first 160 characters of `text`, or None. `year` serves formats without one."""
    m = _CLOCK.search(text, 0, 160)
    while m:
        for pattern, back in _FORMATS:
            start = m.start() - back
            found = pattern.match(text, start) if start >= 0 else None
            if found:
                return parse(found.group(0), year)
        m = _CLOCK.search(text, m.end(), 160)
    return None


@lru_cache(maxsize=4096)
def parse(stamp: str, year: int) -> float | None:
    """Seconds since the epoch of one time stamp in any known format; None where its numbers make no date."""
    try:
        m = _ISO_PARTS.match(stamp)
        if m:
            hours, minutes, seconds = int(stamp[11:13]), int(stamp[14:16]), int(stamp[17:19])
            if hours > 23 or minutes > 59:
                return None
            fraction = float(f"0.{m.group(7)}") if m.group(7) else 0.0
            return (
                _midnight(stamp[:10], m.group(8)) + hours * 3600 + minutes * 60 + min(seconds, 59) + fraction
            )
        if stamp[0] in "IWEFC" and stamp[1:5].isdigit():
            return _plain(year, int(stamp[1:3]), int(stamp[3:5]), stamp[6:])
        parts = stamp.split()
        if len(parts) == 5 and parts[1] in _MONTHS:
            return _plain(int(parts[4]), _MONTHS[parts[1]], int(parts[2]), parts[3])
        if parts[0] in _MONTHS:
            return _plain(year, _MONTHS[parts[0]], int(parts[1]), parts[2])
        if stamp[2:3] == "/":
            return _plain(int(stamp[6:10]), int(stamp[:2]), int(stamp[3:5]), stamp[11:])
    except (ValueError, OverflowError, IndexError):
        return None
    return None


@lru_cache(maxsize=256)
def _midnight(day: str, zone: str | None) -> float:
    """The start of a day like 2026-03-20 in a zone; raises ValueError where it is none."""
    return datetime(int(day[:4]), int(day[5:7]), int(day[8:10]), tzinfo=_zone(zone)).timestamp()


def _zone(text: str | None) -> timezone:
    if not text or text == "Z":
        return UTC
    sign = -1 if text[0] == "-" else 1
    hours, minutes = int(text[1:3]), int(text[-2:])
    return timezone(sign * timedelta(hours=hours, minutes=minutes))


def _plain(year: int, month: int, day: int, clock: str) -> float:
    h, m, s = clock.split(":")
    whole = datetime(year, month, day, int(h), int(m), tzinfo=UTC).timestamp()
    return whole + float(s.replace(",", "."))


def year_in(text: str) -> int | None:
    """The first year that a full date in `text` names, if any."""
    for m in _YEAR.finditer(text):
        before = text[m.start() - 1 : m.start()]
        if not (before.isalnum() or before == "_"):
            return int(m.group(1))
    return None
