"""The cost model against published measurements, the search, and the command."""

from __future__ import annotations

import dataclasses
import json

import pytest
from benchmarks.plan_published import SETTINGS, crossings, speedup_of_v2, table

from unbroken.errors import UsageError
from unbroken.train.config import RECIPES, PlanConfig
from unbroken.train.planning.command import main
from unbroken.train.planning.cost import TrainingWorkload, cost
from unbroken.train.planning.hardware import HARDWARE
from unbroken.train.planning.layout import lay_out
from unbroken.train.planning.memory import Held
from unbroken.train.planning.search import estimate, search
from unbroken.train.planning.sizes import active_count, flops_per_token, parameter_count


def test_every_cell_of_the_published_table_and_every_crossing() -> None:
    cells = table(HARDWARE["a100"])
    assert len(cells) == 32
    assert max(abs(c.error) for c in cells) < 0.10
    measured = crossings(lambda c: c.measured, cells)
    over_all, group = "tp1, optimizer over all ranks", "tp2, optimizer group 4"
    assert measured == {(over_all, "tp2, optimizer over all ranks"): 512, (over_all, group): 128}
    assert crossings(lambda c: c.predicted, cells) == measured
    # A model without latencies misses the table: it is not the arithmetic alone that fits.
    links = {w: dataclasses.replace(getattr(HARDWARE["a100"], w), latency=0.0) for w in ("inside", "between")}
    blind = table(dataclasses.replace(HARDWARE["a100"], **links))
    assert max(abs(c.error) for c in blind) > 0.3
    assert set(SETTINGS) == {c.setting for c in cells}


def test_v2_is_sixteen_percent_faster_than_v1() -> None:
    assert speedup_of_v2(2048) == pytest.approx(1.16, abs=0.03)


def test_sizes_of_the_recipes() -> None:
    told = {
        "20m": 20e6,
        "125m": 134e6,
        "7b": 6.74e9,
        "13b": 13.0e9,
        "70b": 69e9,
        "123b": 122.6e9,
        "8x7b": 46.7e9,
    }
    for name, n in told.items():
        assert parameter_count(RECIPES[name]) == pytest.approx(n, rel=0.03), name
    assert active_count(RECIPES["8x7b"]) == pytest.approx(12.7e9, rel=0.03)
    assert flops_per_token(RECIPES["7b"], 2048) == pytest.approx(
        6 * 6.607e9 + 12 * 32 * 4096 * 2048, rel=1e-3
    )


def test_the_formula_of_the_study() -> None:
    """2 P parameters, 2 P gradients, 12 P optimizer state, each over its own group."""
    work = TrainingWorkload(RECIPES["7b"], 2048, 64, 1)
    plan = PlanConfig(
        parameters=8, gradients=16, optimizer=64, gradient_dtype="bfloat16", engine="plan", recompute="full"
    )
    held = estimate(plan, 64, work, HARDWARE["h200"]).memory
    n = parameter_count(RECIPES["7b"])
    assert held.parameters == pytest.approx(2 * n / 8, rel=1e-3)
    assert held.gradients == pytest.approx(2 * n / 16, rel=1e-3)
    assert held.optimizer == pytest.approx(12 * n / 64, rel=1e-3)
    assert isinstance(held, Held) and held.total > held.parameters + held.gradients + held.optimizer


def test_a_wider_group_holds_less_and_talks_more() -> None:
    work, hw = TrainingWorkload(RECIPES["7b"], 2048, 512, 2), HARDWARE["a100"]
    narrow, wide = (
        estimate(PlanConfig(optimizer=o, engine="plan", recompute="full"), 64, work, hw) for o in (8, 64)
    )
    assert wide.memory.optimizer < narrow.memory.optimizer / 7
    published = [t for t in wide.step.traffic if t.what.startswith("new values")]
    assert [t.between_nodes for t in published] == [True]
    assert not next(t for t in narrow.step.traffic if t.what.startswith("new values")).between_nodes


def test_the_search_gives_plans_that_are_legal_and_fit_fastest_first() -> None:
    work = TrainingWorkload(RECIPES["7b"], 4096, 8, 0)
    found = search(4, work, HARDWARE["h100"])
    assert found and [e.step.seconds for e in found] == sorted(e.step.seconds for e in found)
    for e in found[:5]:
        lay_out(e.plan, 4)
        assert e.memory.total < 80e9
    with pytest.raises(UsageError, match="no plan for 2 GPUs fits"):
        search(2, TrainingWorkload(RECIPES["123b"], 4096, 4, 0), HARDWARE["h100"])


def test_a_pipeline_without_micro_batches_stands_idle() -> None:
    work, hw = TrainingWorkload(RECIPES["7b"], 4096, 64, 1), HARDWARE["h200"]
    plans = [PlanConfig(pipeline=4), PlanConfig(pipeline=4, stages=2, schedule="interleaved"),
             PlanConfig(pipeline=4, stages=2, schedule="zero-bubble")]  # fmt: skip
    idle = [cost(lay_out(p, 8), p, work, hw).bubble for p in plans]
    assert idle[0] == 2 * idle[1] == pytest.approx(6 * idle[2])


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", "7b", "--gpus", "8", "--json", "--recompute", "full", "--parameters", "8"]
    assert main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    (plan,) = found["plans"]
    assert plan["plan"]["parameters"] == 8 and found["parameters"] == parameter_count(RECIPES["7b"])
    assert plan["memory_bytes"]["total"] == sum(v for k, v in plan["memory_bytes"].items() if k != "total")
    assert main(["--model", "1b", "--gpus", "2", "--top", "1"]) == 0
    assert "tokens/s/GPU" in capsys.readouterr().out
    for argv, why in (
        (["--model", "7c"], "7b"),
        (["--gpus", "0"], "above 0"),
        (["--model", "7b", "--gpus", "1", "--engine", "plan", "--hardware", "a100"], "needs"),
        (["--gpus", "8", "--tensor", "3"], "Legal: 1, 2, 4, 8"),
    ):
        with pytest.raises(UsageError) as e:
            main(argv)
        assert why in str(e.value)


@pytest.mark.parametrize(("gpus", "batch"), [(64, 63), (64, 100), (64, 200), (8, 12)])
def test_a_batch_that_few_plans_divide_is_planned_or_refused_in_words(gpus: int, batch: int) -> None:
    """What a schedule needs is no number of gigabytes."""
    found = search(gpus, TrainingWorkload(RECIPES["7b"], 4096, batch, 0), HARDWARE["h200"])
    assert found
    with pytest.raises(UsageError, match="of the nearest one, the plan needs"):
        search(8, TrainingWorkload(RECIPES["123b"], 4096, batch, 0), HARDWARE["h200"])
