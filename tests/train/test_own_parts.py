"""A model and data of a user's own: on any plan, over a kill, exported under names of their own; what cannot be is refused."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from unbroken.errors import UsageError
from unbroken.progress import RunDir
from unbroken.testing.faults import RunFaults
from unbroken.train.config import ModelConfig
from unbroken.train.corpus.samples import ArrayCorpus, PackedSamples
from unbroken.train.model import Block
from unbroken.train.parallel.loss import NextToken
from unbroken.train.parallel.stage import Stage, fill_buffers

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "own_training.py"
C = ModelConfig(dim=16, layers=1, heads=2, kv_heads=2, hidden=16)


class Scaled(Block):
    """A block with a buffer."""

    def __init__(self, c: ModelConfig, kept: bool) -> None:
        super().__init__(c)
        self.register_buffer("scale", torch.zeros(()), persistent=kept)


class Filled(Scaled):
    def reset(self) -> None:
        self.scale = torch.full_like(self.scale, 2.0)


@pytest.mark.parametrize(
    ("block", "kept", "why"), [(Scaled, False, "which nothing fills"), (Filled, True, "that is to be kept"), (Filled, False, None)]
)  # fmt: skip
def test_buffers_are_filled_or_refused(block: Any, kept: bool, why: str | None) -> None:
    class Own(Stage):
        def block(self, c: ModelConfig) -> nn.Module:
            made: nn.Module = block(c, kept)
            return made

    with torch.device("meta"):
        stage = Own(C, range(1))
    stage.to_empty(device="cpu")
    if why is None:
        fill_buffers(stage)
        assert stage.blocks["0"].scale == 2.0
    else:
        with pytest.raises(UsageError, match=why):
            fill_buffers(stage)
    assert stage.huggingface(C, 8) is None, "nobody said what Hugging Face calls it"


def test_the_fingerprint_of_arrays_is_that_of_their_numbers() -> None:
    made = [
        ArrayCorpus("a", PackedSamples(np.full((2, 3), n), np.zeros((2, 3), np.int64))) for n in (1, 1, 2)
    ]
    assert made[0].fingerprint == made[1].fingerprint != made[2].fingerprint and made[0].count == 6


class Spare(Block):
    """A block with a parameter that its forward pass does not use."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__(c)
        self.spare = nn.Parameter(torch.empty(3))


class Twice(NextToken):
    """Another loss."""

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 2 * super().__call__(logits, targets)


class WithSpares(Stage):
    def block(self, c: ModelConfig) -> nn.Module:
        return Spare(c)


@pytest.mark.slow
def test_another_loss_and_a_parameter_that_is_not_used(tmp_path: Path) -> None:
    from unbroken.progress import attach
    from unbroken.train.config import parse
    from unbroken.train.parallel.trainer import build
    from unbroken.train.world import World

    config = parse(["--dim", "16", "--layers", "1", "--heads", "2", "--kv-heads", "2", "--hidden", "16", "--seq", "8", "--global-batch", "4",
                    "--micro-batch", "2", "--warmup", "1"])  # fmt: skip
    text = np.arange(800).reshape(100, 8) % 7
    data = ArrayCorpus("sevens", PackedSamples(text, (text + 1) % 7))
    trainer = build(
        config, World(0, 1, 0, torch.device("cpu"), "none"), attach(), data, make_stage=WithSpares
    )
    twice = build(
        config,
        World(0, 1, 0, torch.device("cpu"), "none"),
        attach(),
        data,
        make_stage=WithSpares,
        make_loss=Twice,
    )
    before = {n: w.detach().clone() for n, w in trainer.zero.weights.items()}
    losses = [trainer.train_step(lambda: None, False)[0] for _ in range(10)]
    assert twice.train_step(lambda: None, False)[0] == pytest.approx(2 * losses[0])
    moved = {n for n, w in trainer.zero.weights.items() if not torch.equal(w, before[n])}
    assert moved == before.keys() - {"blocks.0.spare"} and losses[-1] < losses[0]


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_goes_on_over_a_kill_and_on_another_plan_and_is_a_qwen3(
    tmp_path: Path, eventually: Callable[..., None]
) -> None:
    transformers = pytest.importorskip("transformers")
    size = ["--dim", "32", "--layers", "2", "--heads", "2", "--kv-heads", "2", "--hidden", "64", "--seq", "32", "--global-batch", "8"]  # fmt: skip
    folder = tmp_path / "run"

    def start(plan: list[str], steps: int, *amend: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "unbroken", "run", *amend, "--run-dir", str(folder), "--nproc", "2", "--", str(SCRIPT)]  # fmt: skip
        more = ["--device", "cpu", "--steps", str(steps), "--persist-every", "20", "--decay-steps", "60"]
        return subprocess.Popen([*command, *size, *plan, *more], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip

    first = start(["--pipeline", "2"], 40)
    eventually((folder / "run.toml").exists, within=30)
    faults = RunFaults(RunDir(folder))
    faults.wait_for_step(15, within=100, alive=lambda: first.poll() is None)
    faults.kill_rank(1)
    out, _ = first.communicate(timeout=120)
    assert first.returncode == 0 and "attempt 2" in out, out
    second = start(["--parameters", "2"], 60, "--amend")
    out, _ = second.communicate(timeout=120)
    assert second.returncode == 0, out
    logs = "".join(p.read_text() for p in folder.glob("attempts/*/*/rank-0.log"))
    assert "resumed step 40" in logs
    export = [sys.executable, "-m", "unbroken", "checkpoint", "export", str(folder / "checkpoints"), "--to", "huggingface", "--out", str(tmp_path / "model")]  # fmt: skip
    subprocess.run(export, check=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    ours = own_model(theirs)
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=2e-5)


def own_model(theirs: Any) -> Stage:
    """The example's model with the weights that transformers loaded."""
    spec = importlib.util.spec_from_file_location("own_training", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    c = ModelConfig(dim=32, layers=2, heads=2, kv_heads=2, hidden=64)
    stage: Stage = script.Model(c, range(2))
    weights, names = theirs.state_dict(), stage.huggingface(c, 32)["names"]  # type: ignore[index]
    stage.load_state_dict({n: weights[names[n]] for n in stage.state_dict()})
    stage.set_positions(c, torch.arange(32), torch.device("cpu"))
    return stage
