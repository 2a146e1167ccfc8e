"""Who makes a training slow is named where one node does, and nobody else."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from unbroken.detect.stragglers import RankWork, SlowCost, SlowFinding, SlowKind, SlowWatch

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
STEPS = 10
"""In a window."""


def watch(ranks: int = 64, per_node: int = 8, stages: int = 1) -> SlowWatch:
    peers = {r: f"{r * stages // ranks}" for r in range(ranks)} if stages > 1 else {}
    return SlowWatch({r: f"n{r // per_node}" for r in range(ranks)}, peers)


def run(
    w: SlowWatch,
    factor: dict[int, float],
    *,
    windows: int = 10,
    seed: int = 0,
    noise: float = 0.01,
    step_s: float = 1.0,
    calm: int = 0,
) -> list[SlowFinding]:
    """What is found in so many windows of ranks whose work is 0.7 s times a factor, after `calm` windows without."""
    draw = random.Random(seed)
    found = []
    for k in range(calm + windows):
        slow = factor if k >= calm else {}
        work = {r: RankWork(0.7 * slow.get(r, 1.0) * draw.gauss(1, noise)) for r in w.nodes}
        excess = max(x.busy for x in work.values()) - 0.7
        f = w.observe((k + 1) * STEPS, step_s + excess, work)
        if f is not None:
            found.append(f)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_one_rank_of_64_a_tenth_slower_is_named_within_100_steps(seed: int) -> None:
    first = run(watch(), {37: 1.1}, seed=seed)[0]
    assert (first.kind, first.ranks, first.nodes) == (SlowKind.NODE, (37,), ("n4",))
    assert first.step <= 100 and 0.05 < first.excess < 0.09


def test_a_slow_node_is_named_with_all_its_ranks() -> None:
    first = run(watch(), dict.fromkeys(range(8, 16), 1.15))[0]
    assert first.nodes == ("n1",) and first.ranks == tuple(range(8, 16))


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_named_for_noise(seed: int) -> None:
    assert not run(watch(8), {}, windows=250, seed=seed, noise=(0.002, 0.02, 0.05, 0.1)[seed % 4])


def test_a_short_slowness_is_left_alone() -> None:
    w = watch()
    assert not run(w, {3: 1.5}, windows=3)
    assert not run(w, {}, windows=20)


@pytest.mark.parametrize("seed", range(3))
def test_where_ranks_take_turns_in_being_slow_nobody_is_named(seed: int) -> None:
    """As ranks do on processors that share their cores: each is 15 % slower for a while, and then another."""
    draw, w, off = random.Random(seed), watch(8, 2), [0.0] * 8
    for k in range(80):
        off = [0.95 * x + draw.gauss(0, 0.08) * 0.31 for x in off]
        work = {r: RankWork(0.02 * (1 + off[r]) * draw.gauss(1, 0.02)) for r in w.nodes}
        found = w.observe(k * STEPS, 0.03, work)
        assert found is None or not found.nodes


def replay(name: str, kind: str) -> list[SlowFinding]:
    """What is said of the windows that a run recorded (benchmarks/stragglers.py), two ranks a node."""
    windows = json.loads((RESULTS / name).read_text())["windows"][kind]
    w, found = watch(8, 2), []
    for step, step_s, busy, most in windows:
        work = {r: RankWork(b, m) for r, (b, m) in enumerate(zip(busy, most, strict=True))}
        found.append(w.observe(step, step_s, work))
    return [f for f in found if f is not None and f.nodes]


def test_in_what_our_own_runs_recorded_the_slow_rank_is_named_and_nobody_else() -> None:
    """The second file is of processors that share their cores: ranks differ by half there, so that nobody can be named."""
    first = replay("stragglers-device-busy-machine.json", "slow")[0]
    assert first.ranks == (5,) and first.step - 100 <= 100
    assert not replay("stragglers-device-busy-machine.json", "steady")
    for kind in ("steady", "uneven", "pauses", "loader"):
        assert not replay("stragglers-device-a.json", kind) and not replay("stragglers-device-b.json", kind)
    assert not replay("stragglers-shared-cores.json", "steady")
    assert not replay("stragglers-shared-cores.json", "slow")


def test_a_rank_that_is_slow_for_good_is_named_after_others_were_for_a_while() -> None:
    w = watch(64)
    run(w, {3: 1.08}, windows=6)
    first = run(w, {37: 1.3}, windows=20)[0]
    assert first.ranks == (37,)


def test_ranks_of_two_nodes_are_not_named() -> None:
    first = run(watch(), {3: 1.2, 60: 1.2})[0]
    assert first.kind is SlowKind.SEVERAL and not first.ranks and not first.nodes


def test_a_stage_is_not_a_node() -> None:
    found = run(watch(stages=4), dict.fromkeys(range(48, 64), 1.3))
    assert {(f.kind, f.nodes) for f in found} == {(SlowKind.STAGE, ())} and "stage 3" in found[0].why
    # A slow rank of it is found among its own.
    both = run(watch(stages=4), dict.fromkeys(range(48, 63), 1.3) | {63: 1.5})
    assert both[-1].ranks == (63,)


def test_uneven_sequences_name_nobody() -> None:
    w, draw, found = watch(), random.Random(1), []
    for k in range(40):
        work = {r: RankWork(0.7 * draw.gauss(1, 0.01)) for r in w.nodes}
        work[draw.randrange(64)] = RankWork(1.1)
        found.append(w.observe(k * STEPS, 1.4, work))
    assert {f.kind for f in found if f} == {SlowKind.UNEVEN}


def test_pauses_now_here_now_there_are_told_as_such() -> None:
    w, draw, found = watch(), random.Random(1), []
    for k in range(20):
        work = {r: RankWork(0.7 * draw.gauss(1, 0.01), peak=0.75) for r in w.nodes}
        for r in draw.sample(range(64), 3):
            work[r] = RankWork(0.72, peak=1.9)
        found.append(w.observe(k * STEPS, 1.2, work))
    assert {f.kind for f in found if f} == {SlowKind.PAUSES}


@pytest.mark.parametrize(
    ("busy", "data", "kind"),
    [(0.7, 0.0, SlowKind.FABRIC), (0.7, 0.4, SlowKind.STORAGE), (1.1, 0.0, SlowKind.EVERYBODY)],
)
def test_a_run_that_grows_slow_on_all_ranks_names_nobody(busy: float, data: float, kind: SlowKind) -> None:
    w, found = watch(16), []
    for k in range(30):
        slow = k >= 15
        work = {r: RankWork(busy if slow else 0.7, data=data if slow else 0.0) for r in w.nodes}
        found.append(w.observe(k * STEPS, 1.4 if slow else 1.0, work))
    assert {(f.kind, f.nodes) for f in found if f} == {(kind, ())}


def test_without_a_signal_nobody_is_named() -> None:
    w = watch(8)
    assert all(w.observe(k, 1.0, {}) is None for k in range(30))
    assert all(w.observe(k, 1.0, {0: RankWork(0.9), 1: RankWork(0.1)}) is None for k in range(30))


def test_the_dearer_action_waits_until_the_loss_has_reached_its_price() -> None:
    cost = SlowCost(price_s=60.0)
    finding = SlowFinding(SlowKind.NODE, 0, 0.5, "", (1,), ("n0",))
    assert [cost.add(finding, 50) for _ in range(4)] == [False, False, True, True]
    other = SlowFinding(SlowKind.NODE, 0, 0.5, "", (9,), ("n1",))
    assert not cost.add(other, 50) and not cost.add(None, 50)
    fabric = SlowFinding(SlowKind.FABRIC, 0, 0.5, "")
    assert [cost.add(fabric, 50) for _ in range(3)] == [False, False, True], (
        "a test of pairs finds a slow card"
    )
    assert not cost.add(SlowFinding(SlowKind.STORAGE, 0, 9.0, ""), 50)
