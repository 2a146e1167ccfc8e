"""Options, presets and files fill the same dataclasses; mistakes are named."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from unbroken.errors import InputError, UnknownKey, UsageError
from unbroken.train.config import PRESETS, OptimConfig, TrainConfig, build, learning_rate, parse
from unbroken.train.training import check_sizes


def test_defaults_presets_file_and_options_in_that_order(tmp_path: Path) -> None:
    assert parse([]) == TrainConfig()
    file = tmp_path / "t.toml"
    file.write_text('preset = "small"\n[model]\ndim = 128\n[optim]\nlr = 1\n[data]\nskip = ["3:9"]\n')
    c = parse(["--config", str(file), "--layers", "3", "--overlap"])
    assert (c.model.dim, c.model.layers, c.model.hidden) == (128, 3, 688)
    assert c.optim.lr == 1.0 and c.data.skips == ((3, 9),) and c.run.overlap


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_whole(name: str) -> None:
    c = parse(["--preset", name])
    assert c.data.global_batch % 4 == 0


def test_mistakes_name_the_nearest_key(tmp_path: Path) -> None:
    with pytest.raises(UnknownKey, match="'--steps'"):
        parse(["--stepz=3"])
    file = tmp_path / "t.toml"
    file.write_text("[model]\nlayer = 3\n")
    with pytest.raises(UnknownKey, match="'layers'"):
        parse(["--config", str(file)])
    file.write_text("[modle]\nlayer = 3\n")
    with pytest.raises(UnknownKey, match="'model'"):
        parse(["--config", str(file)])
    file.write_text('[model]\nlayers = "3"\n')
    with pytest.raises(UsageError, match=r"model\.layers"):
        parse(["--config", str(file)])
    file.write_text("preset = 'huge'\n")
    with pytest.raises(UnknownKey):
        parse(["--config", str(file)])
    file.write_text("[model\n")
    with pytest.raises(InputError, match="TOML"):
        parse(["--config", str(file)])
    with pytest.raises(InputError):
        parse(["--config", str(tmp_path / "absent")])


@pytest.mark.parametrize(
    "argv",
    [
        ["--steps", "0"],
        ["--steps", "many"],
        ["--dim", "63"],
        ["--heads", "3"],
        ["--kv-heads", "3"],
        ["--vocab", "100"],
        ["--dropout", "1"],
        ["--skip", "9:3"],
        ["--skip", "x"],
        ["--skip", "1:2:3"],
        ["--device", "tpu"],
        ["--beta1", "1.5"],
        ["--clip", "-1"],
    ],
)
def test_bad_values(argv: list[str]) -> None:
    with pytest.raises(UsageError):
        parse(argv)


@pytest.mark.parametrize(
    "options",
    ["", "--pipeline 2 --tensor 2 --optimizer -1", "--parameters 8 --no-reshard --recompute full --gradient-dtype bfloat16 --compile"],
)  # fmt: skip
def test_a_plan_is_named_by_its_options(options: str) -> None:
    assert parse(["--engine", "plan", *options.split()]).plan.options == options


def test_the_rate_warms_up_and_decays() -> None:
    c = OptimConfig(lr=1.0, min_lr=0.1, warmup=10)
    rates = [learning_rate(c, s, 100) for s in range(1, 101)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[9] == 1.0
    assert rates[-1] == pytest.approx(0.1) and all(a >= b for a, b in itertools.pairwise(rates[9:]))
    assert learning_rate(OptimConfig(warmup=0, decay_steps=50), 80, 100) == OptimConfig().min_lr


def test_a_model_by_name_is_the_planner_s_and_options_win() -> None:
    c = parse(["--model", "7b", "--layers", "2"]).model
    assert (c.dim, c.hidden, c.vocab, c.layers) == (4096, 11008, 32000, 2)
    with pytest.raises(UnknownKey, match="7b"):
        parse(["--model", "7bb"])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"data": {"global_batch": 8}}, "a multiple of 3"),
        ({"data": {"global_batch": 12}, "plan": {"tensor": 2}}, "do(es)? not divide"),
        ({"data": {"global_batch": 12}}, ""),
    ],
)
def test_a_size_that_a_run_may_go_on_with_and_cannot_is_refused_at_the_start(
    values: dict[str, dict[str, int]], said: str
) -> None:
    config = build(values)
    if not said:
        check_sizes(config, (4, 3, 2))
        return
    with pytest.raises(UsageError) as refused:
        check_sizes(config, (4, 3, 2))
    assert "with 3 ranks, which --min-nodes allows (4, 3, 2)" in str(refused.value)
    assert re.search(said, str(refused.value))
