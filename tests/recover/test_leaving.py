"""What counts at an end: which snapshot is whole in memory, whose shares each node writes, and what a seal takes in late."""

from __future__ import annotations

from types import SimpleNamespace

from unbroken.checkpoint.catalogue.contents import Found
from unbroken.progress.records.state import RunState
from unbroken.recover.supervise.accept.accepting import Accepting, find_left_behind, find_whole, widen_seals
from unbroken.recover.supervise.attempt.farewell import Last


def held(attempt: int, step: int, *ranks: int, peer: bool = False) -> list[dict[str, object]]:
    return [{"attempt": attempt, "step": step, "rank": r, "complete": True, "peer": peer} for r in ranks]


def test_the_newest_whole_snapshot_is_named_with_the_shares_of_each_node() -> None:
    inventories = {"a": [*held(1, 35, 0, 1), *held(1, 40, 0, 1)], "b": [*held(1, 35, 2, 3), *held(1, 40, 2)]}
    ranks = {0: "a", 1: "a", 2: "b", 3: "b"}
    assert find_whole(inventories, ranks) == [Last(1, 35, {"a": (0, 1), "b": (2, 3)})]


def test_a_copy_at_a_peer_stands_in_for_a_node_that_is_gone() -> None:
    inventories = {"a": [*held(1, 35, 0), *held(1, 35, 1, peer=True)]}
    assert find_whole(inventories, {0: "a", 1: "b"}) == [Last(1, 35, {"a": (0, 1)})]
    assert find_whole({"a": held(1, 35, 0)}, {0: "a", 1: "b"}) == []
    assert find_whole({}, {}) == []


def test_a_later_attempt_supersedes_an_earlier_one_that_was_further() -> None:
    inventories = {"a": [*held(1, 35, 0), *held(2, 30, 0)]}
    assert [(m.attempt, m.step) for m in find_whole(inventories, {0: "a"})] == [(2, 30), (1, 35)]


def found(name: str, *, committed: bool = True) -> Found:
    step, attempt = int(name[5:13]), int(name[15:])
    status = "committed" if committed else "incomplete"
    return Found(name, step, attempt, status, 0.0, 1, 1, "disk")


def state(*records: dict[str, object]) -> RunState:
    return RunState.of([{"t": 1.0, **r} for r in records])


FINALIZED = {"kind": "seal", "attempt": 1, "checkpoints": ["step-00000020.a0001"], "memory": [[1, 35]]}


def test_what_was_find_whole_is_taken_into_the_seal_once_it_is_durable() -> None:
    late = [found("step-00000035.a0001"), found("step-00000020.a0001")]
    assert widen_seals(late, state(FINALIZED)) == {1: ("step-00000020.a0001", "step-00000035.a0001")}
    assert widen_seals([found("step-00000035.a0001", committed=False)], state(FINALIZED)) == {}


def test_what_was_offered_to_a_later_attempt_counts_and_what_nobody_accepted_does_not() -> None:
    seal = {**FINALIZED, "memory": []}
    offered = {"kind": "attempt", "attempt": 2, "slots": ["a"], "candidates": [{"attempt": 1, "step": 30}]}
    late = [found("step-00000030.a0001"), found("step-00000035.a0001")]
    assert widen_seals(late, state(seal, offered)) == {1: ("step-00000020.a0001", "step-00000030.a0001")}


def test_a_snapshot_of_which_a_node_that_is_left_alone_has_a_part_is_found() -> None:
    ranks, behind = {0: "a", 1: "b"}, Last(1, 40, {"a": (0,), "b": (1,)})
    inventories = {"a": held(1, 40, 0), "b": held(1, 40, 1), "spare": []}
    now = state(FINALIZED)
    assert find_left_behind(inventories, ranks, ["a", "spare"], now) == behind
    assert find_left_behind(inventories, ranks, ["a", "b"], now) is None, "nobody is left"
    copied = {**inventories, "a": [*held(1, 40, 0), *held(1, 40, 1, peer=True)]}
    assert find_left_behind(copied, ranks, ["a", "spare"], now) is None, "its copy stays"
    older = {**inventories, "a": [*held(1, 40, 0), *held(1, 35, 0), *held(1, 35, 1, peer=True)]}
    assert find_left_behind(older, ranks, ["a", "spare"], now) == behind, (
        "an older one that stays is no reason"
    )
    durable = state(FINALIZED, {"kind": "durable", "attempt": 1, "step": 40})
    assert (40, 1) not in durable.durable or find_left_behind(
        inventories, ranks, ["a", "spare"], durable
    ) is None
    assert find_left_behind({"a": held(1, 40, 0)}, ranks, ["a"], now) is None, "what is not whole is no loss"


def test_a_snapshot_is_saved_once_it_counts_also_where_it_was_written_elsewhere() -> None:
    brought = {"kind": "accepted", "number": 1, "checkpoints": ["step-00000035.a0001"], "before": 2}

    def is_saved(step: int, *records: dict[str, object], elsewhere: str = "") -> bool:
        recorder = SimpleNamespace(state=state(FINALIZED, *records))
        accepting = Accepting(None, None, None, recorder, None, print, elsewhere)  # type: ignore[arg-type]
        return accepting.is_on_disk(Last(1, step, {}))

    assert is_saved(20) and not is_saved(35)
    assert is_saved(35, {**brought, "place": "/else/run"}, elsewhere="/else/run")
    assert not is_saved(35, {**brought, "place": ""}) and not is_saved(35, {**brought, "place": "/other"})


def test_an_attempt_that_is_not_sealed_is_left_to_its_seal() -> None:
    assert widen_seals([found("step-00000035.a0002")], state(FINALIZED)) == {}


def test_a_journal_of_before_has_no_memory_in_its_seals() -> None:
    old = {"kind": "seal", "attempt": 1, "checkpoints": ["step-00000020.a0001"]}
    assert state(old).accepted == set()
