"""The ledger: a snapshot counts when every rank has it, a commit once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unbroken.recover.supervise.attempt.ledger import SnapshotTracker


def test_complete_on_every_rank() -> None:
    tracker = SnapshotTracker(1, 3)
    assert [tracker.on_host(5, [r]) for r in (0, 1, 1, 0)] == [False] * 4
    assert tracker.host_step == -1
    assert tracker.on_host(5, [2]) and tracker.host_step == 5
    assert not tracker.on_host(5, [2]), "told once"


def test_a_rank_that_is_ahead_does_not_make_a_step_complete() -> None:
    tracker = SnapshotTracker(1, 2)
    tracker.on_host(5, [0])
    tracker.on_host(10, [0])
    assert tracker.on_host(10, [1]) and tracker.host_step == 10
    assert not tracker.on_host(5, [1]), "an older step is of no use any more"
    assert tracker.host_step == 10


def test_durable_is_told_once_and_never_goes_back() -> None:
    tracker = SnapshotTracker(1, 2)
    assert [tracker.on_durable(s) for s in (20, 20, 40, 20)] == [True, False, True, False]
    assert tracker.durable_step == 40


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)), max_size=120))
def test_host_step_is_the_newest_step_that_all_have_told(world: int, events: list[tuple[int, int]]) -> None:
    tracker, told = SnapshotTracker(1, world), {}  # type: ignore[var-annotated]
    for step, rank in events:
        if rank >= world:
            continue
        told.setdefault(step, set()).add(rank)
        tracker.on_host(step, [rank])
        assert tracker.host_step == max((s for s, r in told.items() if len(r) == world), default=-1)
