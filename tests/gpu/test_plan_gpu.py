"""A plan on a GPU: what a checkpoint describes is what lies there, weights are drawn, compiled and plain steps agree."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

SMALL = ["--dim", "128", "--layers", "2", "--heads", "2", "--kv-heads", "2", "--hidden", "256", "--seq", "128", "--global-batch", "8",
         "--lr", "0.01", "--warmup", "2", "--dtype", "bfloat16", "--mode", "fast", "--engine", "plan"]  # fmt: skip


def losses(folder: Path, *more: str) -> list[float]:
    from unbroken.progress import attach
    from unbroken.train.config import parse
    from unbroken.train.training import open_corpus, open_training
    from unbroken.train.world import start_world

    config = parse([*SMALL, "--cache", str(folder), *more])
    trainer = open_training(config, start_world(config.run), attach(), open_corpus(config))
    rows = trainer.state()["model"]
    for unit in trainer.zero.units:  # type: ignore[attr-defined]
        for name, w in unit.weights.items():
            assert rows[name].to_local().data_ptr() == w.data_ptr(), f"{name} is described by a copy"
            assert w.abs().max() > 0, f"{name} was not drawn"
    return [trainer.train_step(lambda: None, False)[0] for _ in range(12)]


def test_compiled_and_plain_steps_agree_and_learn(tmp_path: Path) -> None:
    plain = losses(tmp_path)
    compiled = losses(tmp_path, "--compile")
    selective = losses(tmp_path, "--compile", "--recompute", "selective")
    assert plain[-1] < plain[0] - 1
    assert compiled == pytest.approx(plain, rel=0.02) and selective == pytest.approx(plain, rel=0.02)


def test_experts_by_grouped_products_learn_as_those_by_single_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unbroken.train.parallel.experts import Experts

    experts = ["--experts", "4", "--hidden", "128"]
    grouped = losses(tmp_path, *experts)
    monkeypatch.setattr(Experts, "grouped", False)
    single = losses(tmp_path, *experts)
    assert grouped[-1] < grouped[0] - 1
    # Products of 16 bits, added up in another order: after some steps at this rate the two are apart.
    assert grouped[:8] == pytest.approx(single[:8], rel=0.02) and grouped == pytest.approx(single, rel=0.1)
