"""A loss that does not come back: the reference trainer is taken back, leaves out the samples, and goes on without them."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
import torch

from unbroken.checkpoint.catalogue.contents import listing, read_committed
from unbroken.checkpoint.storage import open_storage
from unbroken.data.position import count
from unbroken.progress import attach
from unbroken.progress.records.steps import read_steps
from unbroken.train.config import parse
from unbroken.train.corpus.tokens import Tokens
from unbroken.train.trainer import build
from unbroken.train.training import open_corpus
from unbroken.train.world import World

from .conftest import RunUnderTest

NewRun = Any
BAD = (90 * 8, 90 * 8 + 3)
POISONED = f"""
import os, sys
from unbroken.train import trainer
from unbroken.train.__main__ import main

step = trainer.Trainer.train_step

def poisoned(self, *arguments):
    loss, *rest = step(self, *arguments)
    # Weights that met the bad samples stay bad, as those of a training that diverged.
    met = any(a < {BAD[1]} and b > {BAD[0]} for a, b in self.position.consumed)
    return (float("nan") if met and KIND == "nan" else loss + 5.0 * met, *rest)

trainer.Trainer.train_step = poisoned
KIND = "WHICH"
sys.exit(main())
"""
OPTIONS = [
    "--steps",
    "160",
    "--global-batch",
    "8",
    "--seq",
    "64",
    "--snapshot-every",
    "5",
    "--persist-every",
    "5",
    "--keep",
    "30",
]


def consumed(run: RunUnderTest) -> Any:
    """The data position of the newest checkpoint."""
    storage = open_storage(str(run.run_dir.checkpoints))
    newest = max((f for f in listing(storage) if f.committed), key=lambda f: (f.attempt, f.step))
    return newest.step, read_committed(storage, newest.name).position


def train_clean(skip: tuple[int, int]) -> list[float]:
    """The losses of a training that never met the samples, on one rank."""
    config = parse([*OPTIONS, "--skip", f"{skip[0]}:{skip[1]}"])
    tokens = open_corpus(config)
    assert isinstance(tokens, Tokens)
    trainer = build(config, World(0, 1, 0, torch.device("cpu"), "none"), attach(), tokens)
    return [trainer.train_step(lambda: None, False)[0] for _ in range(160)]


@pytest.mark.slow
def test_a_training_that_diverges_goes_on_without_the_samples_that_led_to_it(new_run: NewRun) -> None:
    run = new_run(
        "--nodes", "2", "--nproc", "1", script=POISONED.replace("WHICH", "rises"), args=OPTIONS
    ).start()
    assert run.wait(240) == 0, run.output
    (incident,) = run.incidents()
    assert incident["kind"] == "loss_spike" and incident["action"] == "rollback_skip"
    assert incident["verdict"]["reason"] == "LossSpike"
    (rollback,) = run.journal("rollback")
    ((begin, end),) = rollback["skip"]
    assert begin <= BAD[0] and BAD[1] <= end
    assert end - begin < 70 * 8, "no more than what lies around it"
    step, position = consumed(run)
    assert step == 160
    assert position.samples == ((0, begin), (end, 160 * 8 + end - begin)), "exactly the others, each once"
    assert position.skips == ((begin, end),) and count(position.samples) == 160 * 8
    losses = [s.loss for s in read_steps(run.run_dir.steps(2))]
    before = [s.loss for s in read_steps(run.run_dir.steps(1)) if s.step <= rollback["before"]]
    assert max(losses) < 5.0 and median(losses[-40:]) < median(before[-40:]), (
        "it goes on falling, as if nothing had been"
    )
    taken = {s.step: s.loss for n in (1, 2) for s in read_steps(run.run_dir.steps(n))}
    clean = train_clean((begin, end))
    assert max(abs(taken[i + 1] - x) for i, x in enumerate(clean)) < 0.01, (
        "the losses of a training that never met them"
    )
    assert "samples [" in run.output and "the loss left its band" in run.output


@pytest.mark.slow
def test_a_nan_meets_the_same_data_once_more_and_skips_them_when_it_comes_again(new_run: NewRun) -> None:
    run = new_run(
        "--nodes", "2", "--nproc", "1", script=POISONED.replace("WHICH", "nan"), args=OPTIONS
    ).start()
    assert run.wait(240) == 0, run.output
    assert [i["action"] for i in run.incidents()] == ["rollback_skip", "rollback_skip"]
    first, second = run.journal("rollback")
    assert first["skip"] == [] and second["skip"][0][0] <= BAD[0] and second["before"] < first["before"]
    step, position = consumed(run)
    assert step == 160 and not any(a < BAD[1] and b > BAD[0] for a, b in position.samples)


@pytest.mark.slow
@pytest.mark.soak
def test_where_it_is_asked_for_it_is_told_and_the_run_goes_on(new_run: NewRun) -> None:
    options = ["--nodes", "1", "--nproc", "1", "--on-divergence", "tell"]
    run = new_run(*options, script=POISONED.replace("WHICH", "rises"), args=OPTIONS).start()
    assert run.wait(240) == 0, run.output
    assert run.incidents() == [] and run.attempts() == 1
    (told,) = run.journal("loss")
    assert told["declared"] and told["what"] == "divergence"
    assert run.output.count("the loss left its band") == 1
