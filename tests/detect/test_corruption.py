"""What differing replicas and repeated steps say of a card, and what they do not."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from unbroken.detect.corruption import (
    RepeatKind,
    ReplicaWatch,
    StepSuspicion,
    SuspicionSettings,
    judge_repeats,
    measure_noise,
)

GOOD = {"compared": 3, "alone": 0, "differing": 0, "differences": []}


def message(step: int, **groups: list[tuple[list[int], int]]) -> dict[str, Any]:
    differences = [{"name": n, "groups": [list(g) for g in of]} for n, of in groups.items()]
    return {"step": step, **GOOD, "differing": len(differences), "differences": differences}


def test_a_minority_of_what_was_equal_is_suspect() -> None:
    watch = ReplicaWatch()
    assert watch.take(1, {"step": 10, **GOOD}) is None and watch.equal == (1, 10)
    found = watch.take(1, message(20, w=[([0, 1, 3], 3), ([2], 1)], m=[([0, 1, 3], 3), ([2], 1)]))
    assert found is not None and found.ranks == (2,) and found.confidence > 0.9 and found.equal == (1, 10)
    assert "rank 2 against 3" in found.why and watch.equal == (1, 10), "what came after does not count"


def test_without_a_majority_nobody_is_convicted() -> None:
    watch = ReplicaWatch((1, 10))
    found = watch.take(1, message(20, w=[([0], 1), ([1], 1)]))
    assert found is not None and found.ranks == (0, 1) and found.confidence < 0.6 and not found.scattered


def test_a_program_that_lets_ranks_drift_is_no_card() -> None:
    watch = ReplicaWatch((1, 10))
    found = watch.take(1, message(20, w=[([r], 1) for r in range(8)]))
    assert found is not None and found.scattered and found.confidence < 0.6


def test_what_differs_from_the_start_is_no_replica() -> None:
    watch = ReplicaWatch()
    differs = message(10, own=[([0], 1), ([1], 1)])
    assert watch.take(1, differs) is None and watch.take(1, {**differs, "step": 20}) is None
    assert watch.equal == (1, 20), "all that is compared is equal"
    found = watch.take(1, message(30, own=[([0], 1), ([1], 1)], w=[([0, 1], 2), ([2], 1)]))
    assert found is not None and found.tensors == ("w",) and found.ranks == (2,)


def test_the_same_bits_each_time_are_no_fault_of_the_card() -> None:
    nan = math.nan
    assert judge_repeats([1, 2], [[1, 2], [1, 2]]).kind is RepeatKind.AGREES
    assert judge_repeats([nan], [[nan], [nan]]).kind is RepeatKind.AGREES
    once = judge_repeats([1, 2], [[1, 3], [1, 3]])
    assert once.kind is RepeatKind.DIFFERS and once.first
    often = judge_repeats([1, 2], [[1, 3], [1, 2]])
    assert often.kind is RepeatKind.DIFFERS and not often.first


def test_a_fast_mode_is_measured_by_its_own_noise() -> None:
    random = Random(0)

    def prints(more: float = 0.0) -> list[float]:
        return [100 + random.gauss(0, 1e-3) + more, 5.0]

    noise = measure_noise([prints() for _ in range(4)])
    wrong = sum(
        judge_repeats(prints(), [prints(), prints()], noise).kind is RepeatKind.DIFFERS for _ in range(500)
    )
    assert wrong == 0
    found = judge_repeats(prints(1.0), [prints(), prints()], noise)
    assert found.kind is RepeatKind.DIFFERS and found.first and found.times > 100
    assert judge_repeats([math.nan, 5.0], [prints(), prints()], noise).kind is RepeatKind.DIFFERS


def test_only_what_is_far_out_is_computed_again_and_within_its_budget() -> None:
    random, suspicion = Random(1), StepSuspicion(SuspicionSettings(audit_every=0))
    asked = 0
    for step in range(1, 20_001):
        norm = math.exp(random.gauss(0, 0.3))
        if step % 50 == 0:
            norm = math.nan  # a training that is ill: not each of its steps is made three times
        if suspicion.judge(step, norm):
            asked += 1
            suspicion.note_repeats(2)
    assert asked >= 25 and suspicion.share <= 0.003
    healthy = StepSuspicion(SuspicionSettings(audit_every=0))
    assert not any(healthy.judge(s, math.exp(random.gauss(0, 0.3))) for s in range(1, 5000))
    audited = StepSuspicion(SuspicionSettings(audit_every=1000))
    assert [s for s in range(1, 3001) if audited.judge(s, 1.0)] == [1000, 2000, 3000]
