"""The hang detector with a clock of its own: phases, learnt step time, one rank that holds the others up rightfully."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.detect import Hang, HangDetector, Level, RankView
from unbroken.progress import Phase, Timeouts
from unbroken.units import Duration

TIMES = Timeouts(
    hang=Duration(60), suspect=Duration(5), first_step=Duration(600), evaluating=Duration(300),
    checkpointing=Duration(200), idle=Duration(1000), stop=Duration(30),
)  # fmt: skip


class Watch:
    """Looks every `tick` seconds at ranks that a test moves; time passes only by `passes`."""

    def __init__(
        self, ranks: int = 4, *, told: bool = True, phase: Phase = Phase.TRAINING, tick: float = 0.5
    ) -> None:
        self.detector = HangDetector(TIMES, steps_known=told)
        self.now, self.tick = 1000.0, tick
        self.views = {r: RankView(1, phase, 0) for r in range(ranks)}
        self.detector.poll(self.now, self.views)

    def set(self, *ranks: int, phase: Phase = Phase.TRAINING, finished: bool = False) -> None:
        for r in ranks:
            old = self.views[r]
            self.views[r] = RankView(old.count, phase, old.step, finished)

    def step(self, *ranks: int) -> None:
        for r in ranks or list(self.views):
            old = self.views[r]
            self.views[r] = RankView(old.count + 1, Phase.TRAINING, (old.step or 0) + 1)

    def passes(self, seconds: float) -> Hang:
        """The worst answer while `seconds` pass without news."""
        worst = Hang(Level.OK, 0, 0, 0, Phase.TRAINING)
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(end, self.now + self.tick)
            told = self.detector.poll(self.now, self.views)
            worst = max(worst, told, key=lambda h: h.level)
        return worst


def test_suspect_then_declared_then_over() -> None:
    w = Watch()
    assert w.passes(5).level is Level.OK
    assert w.passes(1).level is Level.SUSPECT
    assert w.passes(54).level is Level.SUSPECT
    hang = w.passes(1)
    assert hang.level is Level.DECLARED
    assert (hang.suspect_s, hang.declare_s) == (5, 60) and hang.idle_s > 60
    w.step()
    assert w.passes(5).level is Level.OK


def test_a_suspected_step_that_comes_is_no_hang() -> None:
    w = Watch()
    for _ in range(20):
        assert w.passes(40).level is Level.SUSPECT
        w.step()
        assert w.passes(1).level is Level.OK


@pytest.mark.parametrize(
    ("phase", "suspect", "declare"),
    [
        (Phase.STARTING, 300, 600), (Phase.COMPILING, 300, 600), (Phase.TRAINING, 5, 60),
        (Phase.EVALUATING, 5, 300), (Phase.CHECKPOINTING, 5, 200), (Phase.STOPPING, 100, 200),
        (Phase.EXITING, 5, 60),
    ],
)  # fmt: skip
def test_each_phase_has_its_deadline(phase: Phase, suspect: float, declare: float) -> None:
    w = Watch(phase=phase)
    assert w.detector.deadlines(phase) == (suspect, declare)
    assert w.passes(suspect).level is Level.OK
    assert w.passes(declare - suspect).level is Level.SUSPECT
    assert w.passes(1).level is Level.DECLARED


def test_learnt_from_the_slowest_of_the_last_hundred() -> None:
    w = Watch()
    w.detector.step_took(40.0)
    for _ in range(99):
        w.detector.step_took(1.0)
    assert w.detector.deadlines(Phase.TRAINING) == (160, 160)
    assert w.passes(160).level is Level.OK
    w.step()
    w.detector.step_took(1.0)  # the slow one is 101 steps ago now
    assert w.detector.deadlines(Phase.TRAINING) == (5, 60)
    w.detector.step_took(3.0)
    assert w.detector.deadlines(Phase.TRAINING) == (12, 60)


def test_one_rank_behind_is_named() -> None:
    w = Watch()
    w.step(0, 1, 3)
    hang = w.passes(61)
    assert hang.level is Level.DECLARED and hang.behind == (2,)
    w = Watch()
    assert w.passes(61).behind == ()


def test_a_rank_that_never_stepped_is_behind_those_at_step_zero() -> None:
    w = Watch(ranks=2)
    w.views[1] = RankView(0, Phase.TRAINING, None)
    w.passes(1)
    assert w.passes(70).behind == (1,)


def test_ranks_wait_for_one_that_evaluates() -> None:
    w = Watch()
    w.set(0, phase=Phase.EVALUATING)
    told = w.passes(299)
    assert told.level is Level.SUSPECT and told.phase is Phase.EVALUATING
    w.set(0)
    # The others have been waiting for 299 s: they still get a whole deadline for the step that comes now.
    assert w.passes(5).level is Level.OK
    w.step()
    assert w.passes(5).level is Level.OK


def test_an_evaluation_beyond_its_deadline_is_a_hang() -> None:
    w = Watch()
    w.set(3, phase=Phase.EVALUATING)
    told = w.passes(302)
    assert told.level is Level.DECLARED and told.phase is Phase.EVALUATING


def test_a_hang_after_an_evaluation_is_found() -> None:
    w = Watch()
    w.set(0, phase=Phase.CHECKPOINTING)
    w.passes(100)
    w.set(0)
    assert w.passes(61).level is Level.DECLARED


def test_a_slow_starter_holds_the_others_up_rightfully() -> None:
    w = Watch()
    w.set(1, phase=Phase.STARTING)
    assert w.passes(290).level is Level.OK


def test_finished_ranks_are_not_expected_to_advance() -> None:
    w = Watch()
    w.set(0, 1, 2, 3, finished=True)
    assert w.passes(5000).level is Level.OK
    w = Watch()
    w.set(0, finished=True)
    told = w.passes(61)
    assert told.level is Level.DECLARED and 0 not in told.behind


def test_steps_that_are_not_told_count_only_as_idleness() -> None:
    w = Watch(told=False)
    assert w.passes(1000).level is Level.OK
    assert w.passes(1).level is Level.DECLARED


@pytest.mark.parametrize("pause", [30.0, 3600.0, 86400.0 * 365])
def test_the_watchers_own_pause_counts_for_nothing(pause: float) -> None:
    """A stopped supervisor, or a laptop that slept, must not kill a healthy run on waking."""
    w = Watch()
    w.passes(3)
    w.now += pause
    assert w.detector.poll(w.now, w.views).level is Level.OK
    w.step()
    assert w.passes(5).level is Level.OK
    # It still finds a hang afterwards, after the time it watched itself.
    assert w.passes(61).level is Level.DECLARED


def test_a_clock_that_stands_or_goes_back_adds_nothing() -> None:
    w = Watch()
    for now in (1000.0, 900.0, 1000.0, 1000.0, 950.0):
        assert w.detector.poll(now, w.views).level is Level.OK


def test_no_ranks() -> None:
    assert HangDetector(TIMES).poll(0.0, {}).level is Level.OK


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.01, 4.9)), min_size=1, max_size=80))
@settings(max_examples=60, deadline=None)
def test_ranks_that_keep_stepping_are_never_suspected(moves: list[tuple[int, float]]) -> None:
    """Each rank steps at least every 4.9 s, in whatever order."""
    w = Watch(tick=0.1)
    due = dict.fromkeys(w.views, 4.9)
    for rank, gap in moves:
        gap = min(gap, *due.values())
        assert w.passes(gap).level is Level.OK
        due = {r: left - gap for r, left in due.items()}
        for r in {rank} | {r for r, left in due.items() if left < 1e-6}:
            w.step(r)
            due[r] = 4.9
