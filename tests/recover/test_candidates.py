"""Which checkpoints an attempt may restore: only sealed folders, and snapshots that are there for every rank."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.checkpoint.catalogue.candidates import candidates
from unbroken.progress.records.candidate import folder_name

SLOTS = {0: "a", 1: "a", 2: "b", 3: "b"}


def held(attempt: int, step: int, *ranks: int, complete: bool = True) -> list[dict[str, Any]]:
    return [{"attempt": attempt, "step": step, "rank": r, "complete": complete} for r in ranks]


def test_nothing() -> None:
    assert candidates({}, {}, SLOTS) == []


def test_whole_in_memory_counts_without_a_folder() -> None:
    (c,) = candidates({}, {"a": held(1, 40, 0, 1), "b": held(1, 40, 2, 3)}, SLOTS)
    assert (c["step"], c["attempt"], c["name"]) == (40, 1, None)
    assert c["memory"] == {"0": "a", "1": "a", "2": "b", "3": "b"}


def test_partly_in_memory_counts_only_with_its_sealed_folder() -> None:
    memory = {"a": held(1, 40, 0, 1)}
    assert candidates({}, memory, SLOTS) == []
    name = folder_name(40, 1)
    (c,) = candidates({1: [name]}, memory, SLOTS)
    assert c["name"] == name and c["memory"] == {"0": "a", "1": "a"}


def test_what_is_being_filled_does_not_count() -> None:
    assert candidates({}, {"a": held(1, 40, 0, 1, complete=False), "b": held(1, 40, 2, 3)}, SLOTS) == []


def test_a_folder_counts_only_for_the_attempt_that_sealed_it() -> None:
    late = folder_name(60, 1)
    assert candidates({2: [late]}, {}, SLOTS) == []
    assert candidates({1: ["rubbish", late]}, {}, SLOTS)[0]["name"] == late


def test_newest_step_first_and_of_one_step_the_newest_attempt() -> None:
    seals = {1: [folder_name(20, 1), folder_name(40, 1)], 2: [folder_name(40, 2)]}
    order = [(c["step"], c["attempt"]) for c in candidates(seals, {}, SLOTS)]
    assert order == [(40, 2), (40, 1), (20, 1)]


def test_the_own_node_is_nearer_than_a_peer_that_holds_a_copy() -> None:
    memory = {"a": held(1, 40, 0, 1, 2, 3), "b": held(1, 40, 2, 3), "z": held(1, 40, 0)}
    (c,) = candidates({}, memory, SLOTS)
    assert c["memory"] == {"0": "a", "1": "a", "2": "b", "3": "b"}


def test_a_spare_finds_the_snapshot_at_the_peer() -> None:
    """Node b is gone; its ranks run on c, and a held copies of theirs."""
    (c,) = candidates({}, {"a": held(1, 40, 0, 1, 2, 3), "c": []}, {0: "a", 1: "a", 2: "c", 3: "c"})
    assert set(c["memory"].values()) == {"a"}


def test_ranks_that_do_not_exist_any_more_are_passed_over() -> None:
    (c,) = candidates({}, {"a": held(1, 40, 0, 1, 2)}, {0: "a", 1: "a"})
    assert set(c["memory"]) == {"0", "1"}


@given(
    st.dictionaries(
        st.sampled_from("abz"),
        st.lists(
            st.tuples(st.integers(1, 3), st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=20
        ),
    ),
    st.dictionaries(st.integers(1, 3), st.lists(st.integers(0, 5), max_size=4)),
)
@settings(max_examples=80, deadline=None)
def test_every_candidate_can_be_restored_by_every_rank(
    memory: dict[str, list[tuple[int, int, int, bool]]], seals: dict[int, list[int]]
) -> None:
    inventories = {
        n: [{"attempt": a, "step": s, "rank": r, "complete": c} for a, s, r, c in entries]
        for n, entries in memory.items()
    }
    named = {a: [folder_name(s, a) for s in steps] for a, steps in seals.items()}
    found = candidates(named, inventories, SLOTS)
    keys = [(c["step"], c["attempt"]) for c in found]
    assert keys == sorted(set(keys), reverse=True)
    for c in found:
        assert c["name"] is None or c["name"] in named[c["attempt"]]
        assert c["name"] is not None or set(c["memory"]) == {str(r) for r in SLOTS}
        for rank, node in c["memory"].items():
            assert (c["attempt"], c["step"], int(rank), True) in memory[node]
