"""Offsets of clocks, what they say of moments elsewhere, and which of several came first."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.cluster.clocks import DRIFT, ClockOffset, Exchange, Moment, find_first, measure

from ..fuzzing import fuzz


def test_the_quickest_exchange_counts_and_half_of_it_is_the_doubt() -> None:
    slow = Exchange(sent=100.0, there=41.0, received=102.0)
    quick = Exchange(sent=103.0, there=43.001, received=103.01)
    offset = measure([slow, quick])
    assert offset.offset_s == pytest.approx(103.005 - 43.001)
    assert offset.uncertainty_s == pytest.approx(0.005, abs=1e-5)
    assert offset.measured == 103.01


def test_without_an_exchange_nothing_is_known() -> None:
    unknown = measure([])
    assert math.isinf(unknown.uncertainty_s)
    assert unknown.translate(5.0) == Moment(-math.inf, math.inf)
    backwards = Exchange(sent=10.0, there=1.0, received=9.0)
    assert measure([backwards]) == unknown, "a clock that was set back in between tells nothing"


@fuzz(60)
@given(
    offset=st.floats(-1e6, 1e6),
    there=st.floats(0, 0.5),
    back=st.floats(0, 0.5),
    drift=st.floats(-1, 1),
    later=st.floats(0, 1e5),
)
def test_the_true_moment_lies_in_what_is_said_however_uneven_the_ways_are(
    offset: float, there: float, back: float, drift: float, later: float
) -> None:
    """The node's clock is ahead by `offset` and drifts by at most what is allowed for, from the exchange on."""
    sent = 1000.0  # on the supervisor's clock, as all true times here
    received = sent + there + back

    def node_clock(true: float) -> float:
        return true + offset + (true - sent) * drift * DRIFT / 2

    found = measure([Exchange(node_clock(sent), sent + there, node_clock(received))])
    true = received + later
    said = found.translate(node_clock(true))
    slack = 1e-6 + abs(offset) * 1e-12
    assert said.earliest - slack <= true <= said.latest + slack


def test_the_further_away_the_less_sure() -> None:
    offset = ClockOffset(60.0, 0.001, measured=1000.0)
    near, far = offset.translate(1000.0), offset.translate(1000.0 + 86400)
    assert (near.earliest, near.latest) == pytest.approx((939.999, 940.001))
    assert far.latest - far.earliest == pytest.approx(2 * (0.001 + DRIFT * 86400))


def test_first_is_certain_only_where_nothing_else_may_have_been() -> None:
    a, b = Moment.at(10.0, 0.1), Moment.at(11.0, 0.1)
    assert find_first({"a": a, "b": b}) == ("a",)
    assert a.is_before(b) and not b.is_before(a)
    near = find_first({"a": Moment.at(10.0, 0.1), "b": Moment.at(10.05, 0.1), "c": Moment.at(12.0, 0.1)})
    assert near == ("a", "b")
    assert find_first({}) == ()


def test_a_clock_minutes_off_changes_nothing_about_what_came_first() -> None:
    """Rank 3's host is ten minutes ahead, and failed a second earlier: by its own time it was the last."""
    ahead, right = ClockOffset(600.0, 0.002, 5000.0), ClockOffset(0.0, 0.002, 4400.0)
    moments = {3: ahead.translate(5000.0), 7: right.translate(4401.0)}
    assert find_first(moments) == (3,)


def test_a_node_whose_clock_is_not_known_makes_nothing_certain() -> None:
    moments = {3: ClockOffset().translate(1.0), 7: ClockOffset(0.0, 0.001, 0.0).translate(1.0)}
    assert find_first(moments) == (7, 3), "what is known better stands in front"


@fuzz(60)
@given(st.dictionaries(st.integers(0, 50), st.tuples(st.floats(0, 100), st.floats(0, 10)), min_size=1))
def test_who_truly_came_first_is_never_missing(intervals: dict[int, tuple[float, float]]) -> None:
    moments = {k: Moment(t, t + width) for k, (t, width) in intervals.items()}
    chosen = random.Random(0)
    true = {k: chosen.uniform(m.earliest, m.latest) for k, m in moments.items()}
    first = find_first(moments)
    assert min(true, key=lambda k: true[k]) in first
    shuffled = list(moments.items())
    chosen.shuffle(shuffled)
    assert find_first(dict(shuffled)) == first, "the order in which they were heard changes nothing"


def test_what_is_no_moment_is_refused() -> None:
    for earliest, latest in ((2.0, 1.0), (math.nan, 1.0), (0.0, math.nan)):
        with pytest.raises(ValueError, match="no moment"):
            Moment(earliest, latest)
    for bad in (math.nan, -1.0):
        with pytest.raises(ValueError, match="uncertainty"):
            ClockOffset(0.0, bad)
