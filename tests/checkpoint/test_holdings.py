"""Which buffer may be filled again: property tests of the keeper's memory against its one promise."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.checkpoint.keeper.buffers.holdings import (
    CLAIMED,
    FINALIZED,
    FREE,
    Buffer,
    Holdings,
    Snapshot,
    SnapshotId,
)


def holdings(ranks: int, count: int = 3) -> Holdings:
    h = Holdings(1 << 30, lambda b: None, attempt=1)
    for i in range(ranks * count):
        h.buffers[i] = Buffer(i, i // count, 100, -1, ready=True)
    return h


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["claim", "seal", "pin", "unpin", "die"])), max_size=80
    )
)
def test_once_a_snapshot_was_whole_on_all_ranks_there_is_always_one(events: list[tuple[int, str]]) -> None:
    """Whatever ranks, writers and deaths do, the newest snapshot that all ranks shared stays in memory on all."""
    world, h = 3, holdings(3)
    claimed: dict[int, Buffer] = {}
    steps = dict.fromkeys(range(world), 0)
    shared: SnapshotId | None = None
    for rank, what in events:
        if what == "claim" and rank not in claimed and (b := h.claim(rank, 100)):
            claimed[rank] = b
        elif what == "seal" and rank in claimed:
            steps[rank] += 1
            snapshot_id = SnapshotId(1, steps[rank])
            if h.finalize(claimed.pop(rank), Snapshot(snapshot_id, rank, world, 100, {})):
                shared = snapshot_id
        elif what == "pin":
            for b in h.of_rank(rank):
                b.pins += b.state == FINALIZED
        elif what == "unpin":
            for b in h.of_rank(rank):
                b.pins = max(0, b.pins - 1)
        elif what == "die" and rank in claimed:
            claimed.pop(rank).state = FREE
        if shared is not None:
            assert all(h.find(shared, r) is not None for r in range(world)), (shared, h.inventory())
        assert all(b.state == CLAIMED for b in claimed.values())


def test_a_pinned_buffer_is_never_given_out() -> None:
    h = holdings(1)
    for step in (1, 2, 3):
        b = h.claim(0, 100)
        assert b is not None
        h.finalize(b, Snapshot(SnapshotId(1, step), 0, 1, 100, {}))
        b.pins += 1
    assert h.claim(0, 100) is None
    h.find(SnapshotId(1, 1), 0).pins -= 1  # type: ignore[union-attr]
    assert h.claim(0, 100) is not None


def test_a_new_attempt_keeps_what_a_restore_may_ask_for_and_frees_the_rest() -> None:
    freed: list[int] = []
    h = Holdings(1 << 30, lambda b: freed.append(b.id), attempt=1)
    for i in range(4):
        h.buffers[i] = Buffer(i, i % 2, 100, -1)
        h.buffers[i].state = CLAIMED
        h.finalize(h.buffers[i], Snapshot(SnapshotId(1, 5 + i // 2), i % 2, 2, 100, {}))
    h.begin(2, [0], [SnapshotId(1, 6)])
    assert h.find(SnapshotId(1, 6), 0) and h.find(SnapshotId(1, 6), 1)
    assert h.find(SnapshotId(1, 5), 0) is None
    assert freed == [1]  # rank 1 lives elsewhere now; its buffer with step 6 may still be asked for
