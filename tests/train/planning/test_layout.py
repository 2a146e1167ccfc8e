"""A plan laid out: who is in which group, and what is refused with which legal values."""

from __future__ import annotations

from collections import Counter

import pytest

from unbroken.errors import UsageError
from unbroken.train.config import DataConfig, ModelConfig, PlanConfig, TrainConfig, parse
from unbroken.train.planning.layout import (
    ParallelLayout,
    check,
    check_model,
    group_sizes,
    lay_out,
    micro_batches,
)


def test_groups_nest_and_every_rank_has_its_place() -> None:
    layout = lay_out(PlanConfig(pipeline=2, tensor=2, context=2, parameters=2, gradients=4, optimizer=8), 64)
    assert layout.storage == (2, 2, 2, 2, 2, 2)
    assert (layout.copies, layout.data) == (16, 8)
    places = [layout.coordinate(r) for r in range(64)]
    assert len(set(places)) == 64
    first = places[0]
    alike = [r for r, c in enumerate(places) if (c.pipeline, c.tensor, c.replicate) == (0, 0, 0)]
    assert alike == [2 * i for i in range(8)], (
        "an optimizer group is made of neighbours, a tensor group inside it"
    )
    assert (first.pipeline, first.tensor, first.shard) == (0, 0, 0)
    assert [c.tensor for c in places[:4]] == [0, 1, 0, 1]
    assert Counter(c.data for c in places) == dict.fromkeys(range(8), 8)


def test_zero_is_the_next_smaller_group_and_minus_one_is_all() -> None:
    layout = lay_out(PlanConfig(parameters=2, optimizer=-1), 8)
    assert (layout.parameters, layout.gradients, layout.optimizer) == (2, 2, 8)


def test_layers_are_dealt_to_stages_the_ends_last() -> None:
    assert ParallelLayout(4, 4, 1, 1, 1, 1, 1).layers(10) == (
        range(2),
        range(2, 5),
        range(5, 8),
        range(8, 10),
    )
    assert [len(r) for r in ParallelLayout(2, 2, 1, 1, 1, 1, 1, stages=2).layers(7)] == [2, 2, 2, 1]


def test_as_many_group_sizes_as_chains_of_divisors() -> None:
    assert len(list(group_sizes(8))) == 20 and len(list(group_sizes(16))) == 35


@pytest.mark.parametrize(
    ("plan", "world", "message", "legal"),
    [
        (PlanConfig(tensor=3), 8, "--tensor 3", "Legal: 1, 2, 4, 8"),
        (PlanConfig(parameters=3), 8, "--parameters 3", "Legal: 1, 2, 4, 8"),
        (PlanConfig(parameters=2, gradients=1), 8, "--gradients 1", "Legal: 2, 4, 8"),
        (PlanConfig(parameters=4, optimizer=6), 24, "--optimizer 6", "Legal: 4, 8, 12, 24"),
        (PlanConfig(pipeline=4, tensor=4), 8, "= 16 ranks do not divide the 8", "multiple of 16"),
        (PlanConfig(pipeline=2, schedule="interleaved"), 2, "--stages 1", "Legal: 2, 3, 4"),
        (PlanConfig(pipeline=2, stages=2), 2, "--stages 2", "Legal: 1"),
        (PlanConfig(pipeline=2, stages=2, schedule="zero-bubble", parameters=2), 4, "--parameters 2", "Legal: 1"),
        (PlanConfig(pipeline=2, stages=2, schedule="zero-bubble", recompute="full"), 4, "recompute full", "none"),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_divide_is_refused(
    plan: PlanConfig, world: int, message: str, legal: str
) -> None:
    with pytest.raises(UsageError) as e:
        lay_out(plan, world)
    assert message in e.value.message and legal in (e.value.hint or "")


def test_a_model_or_batch_that_does_not_divide_is_refused() -> None:
    two = lay_out(PlanConfig(tensor=2, context=2), 4)
    with pytest.raises(UsageError, match="--kv-heads 1") as e:
        check_model(two, ModelConfig(kv_heads=1), 64)
    assert "Legal: 1" in (e.value.hint or "")
    with pytest.raises(UsageError, match="multiple of 8") as e:
        check_model(two, ModelConfig(), 60)
    assert "56, 64" in (e.value.hint or "")
    with pytest.raises(UsageError, match="8 pieces, but the model has 2 layers"):
        check_model(lay_out(PlanConfig(pipeline=8), 8), ModelConfig(), 64)
    with pytest.raises(UsageError, match="dropout"):
        check_model(two, ModelConfig(dropout=0.1), 64)
    pipeline = lay_out(PlanConfig(pipeline=4), 8)
    with pytest.raises(UsageError, match="do not fill a pipeline of 4"):
        micro_batches(pipeline, DataConfig(global_batch=8, micro_batch=2))
    with pytest.raises(UsageError, match="does not divide a rank's share of 6"):
        micro_batches(pipeline, DataConfig(global_batch=12, micro_batch=4))
    with pytest.raises(UsageError, match="among 2 data-parallel ranks") as e:
        micro_batches(pipeline, DataConfig(global_batch=9))
    assert "8, 10" in (e.value.hint or "")
    with pytest.raises(UsageError, match="--eval-samples 10"):
        check(
            parse(["--engine", "plan", "--global-batch", "8", "--eval-every", "1", "--eval-samples", "10"]), 4
        )


def test_a_plan_is_a_table_of_the_configuration(tmp_path: object) -> None:
    from pathlib import Path

    file = Path(str(tmp_path)) / "v2.toml"
    file.write_text('[plan]\nparameters = 4\noptimizer = -1\nrecompute = "full"\n')
    config = parse(["--config", str(file)])
    assert config.plan == PlanConfig(parameters=4, optimizer=-1, recompute="full") and config.wants_plan
    assert not TrainConfig().wants_plan, "without a plan the reference trainer runs"
    assert TrainConfig(model=ModelConfig(experts=4)).wants_plan
    for argv in (["--recompute", "some"], ["--parameters", "0"], ["--active-experts", "9", "--experts", "4"]):
        with pytest.raises(UsageError):
            parse(argv)


def test_what_checkpoints_of_before_have_is_still_the_same_training() -> None:
    before = {"dim", "layers", "heads", "kv_heads", "hidden", "vocab", "rope_base", "norm_eps", "dropout"}
    assert set(TrainConfig().identity("x")["model"]) == before
    assert TrainConfig(plan=PlanConfig(tensor=2)).identity("x") == TrainConfig().identity("x")
    assert "experts" in TrainConfig(model=ModelConfig(experts=4)).identity("x")["model"]
