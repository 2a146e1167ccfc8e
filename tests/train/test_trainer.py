"""The step loop in this process: what a state holds is enough to go on, and mistakes are named."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unbroken.errors import InputError, UsageError
from unbroken.progress import attach
from unbroken.train import script_path
from unbroken.train.config import TrainConfig, parse
from unbroken.train.corpus.order import SamplePosition
from unbroken.train.corpus.tokens import Tokens, open_tokens
from unbroken.train.step_digests import digest
from unbroken.train.trainer import Trainer, build
from unbroken.train.world import World, environment_rank, start_world

TINY = [
    "--steps",
    "9",
    "--dim",
    "16",
    "--layers",
    "1",
    "--heads",
    "2",
    "--kv-heads",
    "1",
    "--hidden",
    "24",
    "--seq",
    "16",
    "--global-batch",
    "6",
]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "a.txt").write_text("".join(chr(97 + (i * i) % 26) for i in range(20_000)))
    return open_tokens(str(folder), folder / "cache")


def trainer(tokens: Tokens, *more: str, size: int = 1) -> Trainer:
    config = parse([*TINY, *more])
    return build(config, World(0, size, 0, torch.device("cpu"), "none"), attach(), tokens)


def steps(t: Trainer, count: int) -> list[float]:
    return [t.train_step(lambda: None, False)[0] for _ in range(count)]


def test_the_state_is_enough_to_go_on(tokens: Tokens) -> None:
    a = trainer(tokens)
    steps(a, 3)
    kept = copy.deepcopy(a.state())
    position = a.position
    rest = steps(a, 3)
    b = trainer(tokens)
    for name, value in b.state()["model"].items():
        value.copy_(kept["model"][name])
    for kind in ("exp_avg", "exp_avg_sq"):
        for name, value in b.state()["optimizer"][kind].items():
            value.copy_(kept["optimizer"][kind][name])
    b.resume(3, kept["training"], position)
    assert steps(b, 3) == rest
    assert digest(a.buckets.parameters()) == digest(b.buckets.parameters())


def test_it_learns(tokens: Tokens) -> None:
    losses = steps(trainer(tokens, "--lr", "0.01", "--warmup", "3", "--steps", "25"), 25)
    assert losses[-1] < losses[0] - 1


def test_micro_batches_change_only_rounding(tokens: Tokens) -> None:
    whole, parts = steps(trainer(tokens), 4), steps(trainer(tokens, "--micro-batch", "2"), 4)
    assert whole != parts and whole == pytest.approx(parts, rel=1e-5)


def test_skipped_samples_are_never_seen(tokens: Tokens) -> None:
    t = trainer(tokens, "--skip", "6:18", "--skip", "20:21")
    steps(t, 3)
    assert t.position.consumed == ((0, 6), (18, 20), (21, 31))
    resumed = trainer(tokens, "--skip", "40:50")
    resumed.resume(3, t.state()["training"], t.position)
    assert resumed.position.skips == ((6, 18), (20, 21), (40, 50))


def test_low_precision_keeps_the_weights_in_float32(tokens: Tokens) -> None:
    t = trainer(tokens, "--dtype", "bfloat16")
    losses = steps(t, 3)
    assert losses == pytest.approx(steps(trainer(tokens), 3), rel=0.02)
    assert {p.dtype for p in t.model.parameters()} == {torch.float32}


def test_the_second_epoch_has_another_order(tokens: Tokens) -> None:
    t = trainer(tokens)
    n = t.order.samples
    assert [t.order[i] for i in range(5)] != [t.order[n + i] for i in range(5)]
    t.position = SamplePosition(((0, n - 2),))
    steps(t, 1)
    assert t.position.consumed == ((0, n + 4),)


def test_mistakes(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="does not divide among 4 ranks"):
        trainer(tokens, size=4)
    with pytest.raises(InputError, match="too few"):
        trainer(tokens, "--seq", "19000")
    with pytest.raises(InputError, match="its model is"):
        t = trainer(tokens)
        t.resume(1, {"identity": t.config.identity("x") | {"model": {}, "data": {}}}, SamplePosition())
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="not below"):
        environment_rank()
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(UsageError, match="not numbers"):
        environment_rank()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        start_world(parse(["--device", "cpu"]).run)
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="no GPU"):
            start_world(TrainConfig(run=parse(["--device", "cuda"]).run).run)
        with pytest.raises(UsageError, match="nccl"):
            start_world(parse(["--backend", "nccl"]).run)


@pytest.mark.slow
@pytest.mark.integration
def test_as_a_file_and_without_the_compiler(tokens: Tokens, tmp_path: Path) -> None:
    """The file works from anywhere, and a whole training imports neither torch's compiler nor sympy."""
    code = (
        "import runpy, sys; path = sys.argv.pop(1)\n"
        "try: runpy.run_path(path, run_name='__main__')\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "print('heavy:', [m for m in ('torch._dynamo', 'torch._inductor', 'sympy', 'pandas', 'typer') if m in sys.modules])"
    )
    argv = [*TINY, "--data", str(tokens.path.parent.parent), "--cache", str(tokens.path.parent)]
    p = subprocess.run(
        [sys.executable, "-c", code, str(script_path()), *argv],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert p.returncode == 0 and "step 9 loss" in p.stdout, p.stdout + p.stderr
    assert "heavy: []" in p.stdout
