"""What a rank tells of its GPU's work is what the GPU worked, and not what it waited for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from unbroken.progress import attach  # noqa: E402
from unbroken.train.checks.busy import BusyTime  # noqa: E402
from unbroken.train.config import parse  # noqa: E402
from unbroken.train.training import open_corpus, open_training  # noqa: E402
from unbroken.train.world import start_world  # noqa: E402

pytestmark = pytest.mark.gpu


def test_what_is_launched_inside_counts_and_what_waits_after_it_does_not() -> None:
    device = torch.device("cuda", 0)
    busy, a = BusyTime(device), torch.randn(4096, 4096, device=device)

    def work(times: int) -> None:
        for _ in range(times):
            a @ a

    work(3)
    torch.cuda.synchronize()
    began = time.perf_counter()
    work(40)
    torch.cuda.synchronize()
    usual = time.perf_counter() - began
    with busy:
        work(40)
    work(80)  # as a reduction that waits for others
    torch.cuda.synchronize()
    assert busy.take() == pytest.approx(usual, rel=0.3)
    with busy:
        work(20)
    with busy:  # a step that is computed again
        work(20)
    torch.cuda.synchronize()
    assert busy.take() == pytest.approx(usual, rel=0.3)
    assert busy.take() != busy.take(), "nothing since: not a number"


@pytest.mark.parametrize("engine", ["reference", "plan"])
def test_trainers_tell_a_part_of_their_step(engine: str, tmp_path: Path) -> None:
    words = ["--dim", "512", "--layers", "4", "--heads", "4", "--kv-heads", "4", "--hidden", "1024", "--seq", "256", "--global-batch", "8",
             "--cache", str(tmp_path), *(["--engine", "plan"] if engine == "plan" else [])]  # fmt: skip
    config = parse(words)
    trainer = open_training(config, start_world(config.run), attach(), open_corpus(config))
    took = 0.0
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        trainer.train_step(lambda: None, False)
        torch.cuda.synchronize()
        took = time.perf_counter() - began
    assert 0.2 * took < trainer.busy < took
