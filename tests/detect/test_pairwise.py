"""The pairwise test: what it convicts, what it must never convict, and what it says where it cannot know."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping

import pytest

from unbroken.detect.pairwise import (
    FaultModel,
    Judgement,
    NodeFault,
    PairResult,
    PairwiseTest,
    TwoRounds,
    judge,
    sort_pair,
)
from unbroken.detect.pairwise.posterior import node_probabilities, pair_probability
from unbroken.errors import UsageError
from unbroken.testing.pair_field import PairFault, PairField


def run(field: PairField, seconds: float = 300.0, seed: int = 0) -> tuple[Judgement, PairwiseTest]:
    test = PairwiseTest(field.nodes, field.ring, seconds=seconds, test_s=30.0, seed=seed)
    elapsed = 0.0
    while pairs := test.next_round(elapsed):
        members = [n for p in pairs for n in p]
        assert len(members) == len(set(members)), "a node is in two tests at once"
        test.take(field.test(pairs))
        elapsed += 30.0
    assert elapsed <= seconds
    return test.judge(), test


NODES = [f"n{i:02d}" for i in range(16)]


@pytest.mark.parametrize("fault", [PairFault.DEAD, PairFault.HANGING, PairFault.SLOW])
@pytest.mark.parametrize("count", [5, 16, 17])
def test_a_solid_fault_is_convicted_and_nobody_else(fault: PairFault, count: int) -> None:
    nodes = NODES[:count] if count <= 16 else [*NODES, "n16"]
    for seed in range(5):
        answer, _ = run(PairField(nodes, {nodes[seed % count]: fault}, seed=seed), seed=seed)
        assert answer.convicted_nodes == {nodes[seed % count]}
        (c,) = answer.convicted
        assert c.fault is (NodeFault.SLOW if fault is PairFault.SLOW else NodeFault.FAILING)
        assert not answer.links and not answer.suspects


@pytest.mark.parametrize("fault", [PairFault.LINK, PairFault.ONE_WAY, PairFault.SLOW_LINK])
def test_a_bad_link_convicts_nobody_and_its_direction_is_named(fault: PairFault) -> None:
    for seed in range(5):
        link = sort_pair(NODES[seed], NODES[seed + 1])
        answer, _ = run(PairField(NODES, {}, {link: fault}, seed=seed), seed=seed)
        assert not answer.convicted
        (found,) = answer.links
        assert found.nodes == link
        assert found.slow is (fault is PairFault.SLOW_LINK)
        assert found.sender == (link[0] if fault is PairFault.ONE_WAY else None)
        assert answer.suspects == {*link}, "an end that fails now and then would look the same"


def test_two_bad_links_at_one_node_do_not_convict_it() -> None:
    links = {sort_pair(NODES[4], NODES[5]): PairFault.LINK, sort_pair(NODES[5], NODES[6]): PairFault.LINK}
    answer, _ = run(PairField(NODES, {}, links))
    assert not answer.convicted
    assert {link.nodes for link in answer.links} == links.keys()


def test_healthy_nodes_are_never_called_healthy() -> None:
    answer, _ = run(PairField(NODES))
    assert not answer.kept_off
    assert answer.describe("n03") == "n03: p below 0.3 after 10 repeats"


def test_one_failure_makes_both_suspects_and_innocents_return_from_the_background() -> None:
    field = PairField(NODES, {"n02": PairFault.INTERMITTENT}, seed=3)
    test = PairwiseTest(NODES, field.ring, seconds=60.0, test_s=30.0)
    test.take(
        [
            PairResult(("n02", "n09"), False),
            *(PairResult(p, True, 1.0) for p in [("n00", "n01"), ("n03", "n04")]),
        ]
    )
    answer = test.judge()
    assert not answer.convicted and answer.suspects == {"n02", "n09"}
    assert "suspect" in answer.describe("n09")
    test.go_on_with(answer.suspects, ["n10", "n11", "n12"], 3600.0)
    elapsed = 0.0
    while test.judge().suspects and (pairs := test.next_round(elapsed)):
        assert all({*p} & {"n02", "n09"} and not {"n02", "n09"} <= {*p} for p in pairs)
        test.take(field.test(pairs))
        elapsed += 30.0
    assert test.judge().convicted_nodes == {"n02"}
    assert not test.judge().suspects


def test_a_test_that_fails_everywhere_convicts_nobody() -> None:
    answer, _ = run(PairField(NODES, dict.fromkeys(NODES, PairFault.DEAD)))
    assert not answer.convicted and "whole fabric" in answer.undecided
    assert answer.suspects == {*NODES}


def test_two_nodes_that_fail_with_each_other_are_both_suspects() -> None:
    answer, _ = run(PairField(["a", "b"], {"a": PairFault.DEAD}))
    assert not answer.convicted and answer.suspects == {"a", "b"}


def test_no_round_begins_that_does_not_end_in_time() -> None:
    test = PairwiseTest(NODES, seconds=100.0, test_s=30.0)
    assert test.next_round(0.0) and test.next_round(70.0)
    assert test.next_round(70.5) == []
    assert not test.judge().convicted, "without a result nobody is convicted"


def test_pairs_of_which_nothing_was_heard_are_missing_and_no_more() -> None:
    field = PairField(NODES, {"n01": PairFault.DEAD})
    test = PairwiseTest(NODES, field.ring, seconds=300.0, test_s=30.0)
    for k in range(10):
        test.take(field.test(test.next_round(k * 30.0))[::2])
    assert test.judge().convicted_nodes <= {"n01"}


def test_a_node_cannot_be_paired_with_itself_or_be_alone() -> None:
    with pytest.raises(UsageError):
        sort_pair("a", "a")
    with pytest.raises(UsageError):
        PairwiseTest(["a"])


def total(
    faulty: Mapping[str, float],
    links: Mapping[tuple[str, str], float],
    keep: Callable[[dict[str, bool]], bool],
) -> float:
    """The summed weight of all states of the nodes that `keep` wants, each tried."""
    out = 0.0
    for states in itertools.product([False, True], repeat=len(faulty)):
        bad = dict(zip(faulty, states, strict=True))
        weight = math.prod(faulty[n] for n in faulty if bad[n])
        weight *= math.prod(w for (a, b), w in links.items() if not bad[a] and not bad[b])
        out += weight if keep(bad) else 0.0
    return out


def test_the_sum_over_explanations_is_that_of_trying_all() -> None:
    draw = random.Random(7)
    for _ in range(30):
        nodes = [f"x{i}" for i in range(draw.randint(2, 6))]
        pairs = [p for p in itertools.combinations(nodes, 2) if draw.random() < 0.6] or [(nodes[0], nodes[1])]
        faulty = {n: draw.uniform(0.01, 0.5) for n in nodes}
        links = {p: draw.uniform(0.0, 0.1) for p in pairs}
        everything = total(faulty, links, lambda bad: True)
        for n, p in node_probabilities(faulty, links).items():
            assert p == pytest.approx(total(faulty, links, lambda bad, n=n: bad[n]) / everything)  # type: ignore[misc]
        pair = pairs[0]
        both = total(faulty, links, lambda bad, p=pair: not bad[p[0]] and not bad[p[1]]) / everything  # type: ignore[misc]
        assert pair_probability(pair, faulty, links) == pytest.approx(both)


def test_many_seeds_convict_no_healthy_node_and_miss_no_solid_one() -> None:
    for seed in range(12):
        field = PairField.scatter(64, 1 + seed % 6, seed=seed)
        answer, _ = run(field, seed=seed)
        assert not answer.convicted_nodes - field.faulty.keys()
        assert {
            n for n, f in field.faulty.items() if f is not PairFault.INTERMITTENT
        } <= answer.convicted_nodes


def test_the_published_rounds_pass_a_node_that_fails_only_once_and_see_no_slow_one() -> None:
    field = PairField(NODES[:9], {"n02": PairFault.SLOW, "n04": PairFault.DEAD})
    test = TwoRounds(field.nodes)
    groups = test.first()
    assert sorted(len(g) for g in groups) == [2, 2, 2, 3]
    pairs = test.second({g: field.passes(g) for g in groups})
    assert test.convict(pairs, [field.passes(p) for p in pairs]) == {"n04"}


def test_what_is_certain_does_not_depend_on_the_order_of_the_results() -> None:
    field = PairField.scatter(32, 3, seed=5)
    answer, test = run(field, seed=5)
    results = list(test.results)
    random.Random(1).shuffle(results)
    again = judge(results, [sort_pair(*p) for p in field.ring], FaultModel())
    assert again.convicted_nodes == answer.convicted_nodes and again.suspects == answer.suspects
