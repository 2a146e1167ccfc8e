"""The arms in simulated time: the published gains with the published policy, and ours on the same run times."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from unbroken.evaluate.plan.contenders import Published, baseline, opencompass, published
from unbroken.evaluate.plan.simulated import (
    Dataset,
    Machines,
    SharedLink,
    SimulatedClock,
    SimulatedOutcome,
    SimulatedWait,
    Techniques,
    Weights,
    bound,
    ours,
)

DATA = [Dataset(f"d{i}", 20.0 + 7 * i, 5.0, 10.0 if i % 3 else 60.0, 400, i % 2 == 0, 4) for i in range(12)]
SMALL = Machines(nodes=1, gpus=4)


@pytest.fixture
def bench() -> Iterator[ModuleType]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    import evaluation_simulated

    yield evaluation_simulated
    sys.path.pop(0)


def test_the_published_gains_are_reproduced(bench: ModuleType) -> None:
    for row in bench.reproduce():
        assert abs(row["off"]) <= 0.05, row
    shares = bench.humaneval()
    assert shares["load and preprocess"] == pytest.approx(0.295, abs=0.01)
    assert shares["metrics"] == pytest.approx(0.19, abs=0.01)


@pytest.mark.parametrize("wrong", [(), pytest.param((1.6, range(2)), marks=pytest.mark.slow)])
def test_ours_reaches_its_targets_with_exact_and_with_wrong_priors(
    bench: ModuleType, wrong: tuple[Any, ...]
) -> None:
    for row in bench.head_to_head(*wrong):
        assert row["reached"], row
        assert row["gain"] > row["published"]


def test_a_link_is_shared_evenly() -> None:
    clock = SimulatedClock()
    link = SharedLink(clock, 10e6)
    ends = {}

    def load(name: str, size: float, after: float) -> Iterator[SimulatedWait]:
        yield SimulatedWait(seconds=after)
        yield SimulatedWait(link=link, size=size)
        ends[name] = clock.now

    for name, size, after in (("a", 100e6, 0.0), ("b", 100e6, 0.0), ("c", 10e6, 4.0)):
        clock.start(load(name, size, after))  # type: ignore[arg-type]
    clock.run()
    assert ends["c"] == pytest.approx(7.0, rel=1e-3)  # from 4 s on at a third of 10
    assert ends["a"] == ends["b"] == pytest.approx(21.0, rel=1e-3)
    assert link.moved == 210e6


def test_one_trial_by_hand() -> None:
    one = [Dataset("d", 100.0, 5.0, 40.0, 100, True)]
    w = Weights(10e9, start_s=10.0)
    c = Machines(nodes=1, gpus=1, link=1e9, pcie=10e9)
    assert baseline(one, w, c).makespan_s == pytest.approx(10 + 10 + 1 + 5 + 100 + 40)
    apart = published(one, w, c, Published(True, True, False))
    assert apart.makespan_s == pytest.approx(
        10 + 10 + 1 + 5 + 100 + 40
    )  # one trial: nothing to share or overlap
    mine = ours(one, w, c, switch_s=0.0)
    assert mine.makespan_s == pytest.approx(
        10 + 1 + 100 + 40
    )  # start-up and prompts while the model is fetched
    assert mine.makespan_s == pytest.approx(bound(one, w, c, switch_s=0.0))


@pytest.mark.parametrize("techniques", [Techniques(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)])  # type: ignore[arg-type]
def test_all_work_is_done_whatever_is_left_out(techniques: Techniques) -> None:
    total = sum(d.infer_s for d in DATA)
    found = ours(DATA, Weights(14e9), SMALL, techniques=techniques)
    assert found.infer_s == pytest.approx(total)
    assert found.makespan_s >= bound(DATA, Weights(14e9), SMALL) - 1e-6
    if techniques.shared_weights:
        assert found.fetched == 14e9


def test_no_arm_beats_the_bound_and_each_does_all_the_work() -> None:
    total = sum(d.infer_s for d in DATA)
    w = Weights(14e9)
    arms: list[SimulatedOutcome] = [
        baseline(DATA, w, SMALL),
        *(opencompass(DATA, w, SMALL, rule=r) for r in ("size", "workers")),
    ]
    arms += [
        published(DATA, w, SMALL, Published(a, b, c))
        for a in (False, True)
        for b in (False, True)
        for c in (False, True)
    ]
    for found in arms:
        assert found.infer_s == pytest.approx(total)
        assert found.makespan_s >= bound(DATA, w, SMALL) - 1e-6


def test_large_models_take_wide_workers() -> None:
    """And their fetch ends, whatever floating point leaves of 140 GB in thirds."""
    for d in (DATA, DATA[:7]):
        assert baseline(d, Weights(140e9), Machines(1, link=25e9 / 8 / 3)).loads == len(d)
    assert [Weights(b).gpus() for b in (14e9, 68e9, 140e9)] == [1, 2, 4]
    assert ours(DATA, Weights(140e9), Machines(2)).workers == 4
