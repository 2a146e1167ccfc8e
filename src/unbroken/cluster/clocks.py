"""Two hosts' clocks are never the same: what a time on one of them says on another, and which of several came first.

ClockOffset   how far a clock is ahead of the supervisor's, and how sure that is; measured by question and answer
Moment        a time on the supervisor's clock, as the interval that it lies in for certain
find_first    what came first among moments, or what may have been, where their intervals overlap

Source of the measurement: the round trip bounds the error (Cristian 1989, NTP: RFC 5905, section 8).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

DRIFT = 200e-6
"""Seconds that two clocks drift apart in a second, at most: quartz has 100 ppm each; slewing adds to one, and is seen."""

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Moment:
    """Seconds on the supervisor's monotonic clock: it was not before `earliest` and not after `latest`."""

    earliest: float
    latest: float

    def __post_init__(self) -> None:
        if not self.earliest <= self.latest:  # refuses NaN too
            raise ValueError(f"no moment lies between {self.earliest} and {self.latest}")

    @classmethod
    def at(cls, time: float, uncertainty_s: float = 0.0) -> Moment:
        """The moment around a time that may be wrong by so much in either direction."""
        return cls(time - uncertainty_s, time + uncertainty_s)

    def is_before(self, other: Moment) -> bool:
        """Whether it was earlier for certain. False both where it was later and where nobody can say."""
        return self.latest < other.earliest


@dataclass(frozen=True)
class ClockOffset:
    """A clock's reading minus the supervisor's, in seconds, as it was `measured` (on that same clock), give or take
    `uncertainty_s`. Not known at all before the first measurement: the uncertainty is infinite then."""

    offset_s: float = 0.0
    uncertainty_s: float = math.inf
    measured: float = 0.0

    def __post_init__(self) -> None:
        if math.isnan(self.offset_s) or math.isnan(self.measured) or not self.uncertainty_s >= 0:
            raise ValueError("an offset is a number, and its uncertainty none below zero")

    def translate(self, there: float) -> Moment:
        """When that clock showed `there`, on the supervisor's clock. The further from the measurement, the less sure."""
        if math.isinf(self.uncertainty_s):
            return Moment(-math.inf, math.inf)
        drift = DRIFT * abs(there - self.measured)
        return Moment.at(there - self.offset_s, self.uncertainty_s + drift)


@dataclass(frozen=True)
class Exchange:
    """One question to the supervisor: `sent` and `received` on the asker's clock, `there` what the supervisor's showed
    while it answered. All in seconds."""

    sent: float
    there: float
    received: float


def measure(exchanges: Iterable[Exchange]) -> ClockOffset:
    """The offset of the asker's clock, from whichever exchange bounds it best; unknown where there is none.

    The supervisor read its clock at some instant of the round trip: the middle is wrong by half of it at most, however
    differently long the two ways are. An answer that came before its question was sent (a clock that was set back in
    between) says nothing and is left out.
    """
    best = ClockOffset()
    whole = [e for e in exchanges if e.received >= e.sent]
    now = max((e.received for e in whole), default=0.0)
    for e in whole:
        half = (e.received - e.sent) / 2
        middle = e.sent + half
        # An old exchange has had time to become wrong.
        uncertainty = half + DRIFT * (now - middle)
        if uncertainty < best.uncertainty_s:
            best = ClockOffset(middle - e.there, uncertainty, now)
    return best


def find_first(moments: Mapping[K, Moment]) -> tuple[K, ...]:
    """All that may have been first, the likeliest (the one that was over first) in front; one alone was it for certain.

    Whatever certainly came after something else was not it.
    """
    if not moments:
        return ()
    over = min(m.latest for m in moments.values())
    left = [key for key, m in moments.items() if m.earliest <= over]
    # The same answer whatever order they were heard in.
    return tuple(sorted(left, key=lambda k: (moments[k].latest, moments[k].earliest, str(k))))
