"""A small part of `benchmarks/localisation.py`: who was broken is named, and nobody else."""

from __future__ import annotations

import pytest
from benchmarks.localisation import one, summarise
from benchmarks.localisation_kinds import KINDS


@pytest.mark.parametrize("kind", ["disk full", pytest.param("loader worker stuck", marks=pytest.mark.slow)])
def test_the_node_at_fault_is_named_and_no_other(kind: str) -> None:
    found = one(3, kind, 3)
    # The time-out for a hang, and the look after it: which of the two timers of one instant comes first is the loop's own affair.
    assert found["named"] == found["guilty"] and len(found["guilty"]) == 1 and found["seconds"] <= 61


@pytest.mark.slow
def test_a_capped_network_card_is_found_by_a_test_of_pairs_once_it_has_cost_as_much() -> None:
    found = one(1, "bandwidth capped", 6)
    assert found["named"] == found["guilty"] and found["told"] == ["the whole fabric"]


def test_shares_have_their_denominators() -> None:
    assert {n for n, _ in KINDS.values()} == {1, 2, 3}
    found = [
        {"guilty": ["a"], "named": ["a", "b"], "seconds": 3.0},
        {"guilty": ["c"], "named": [], "seconds": None},
        {"guilty": [], "named": [], "seconds": None},
    ]
    total = summarise(found)
    assert (total["at_fault"], total["named"], total["right"]) == (2, 2, 1)
    assert total["precision"] == total["recall"] == 0.5
