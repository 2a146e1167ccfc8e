"""A training on a plan that was killed goes on with the same bits, and on any other plan with the same samples."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fork_server import ForkServer, Training
from tests.support.plans import TINY, WORDS

pytestmark = [pytest.mark.slow, pytest.mark.integration]

V1 = ["--pipeline", "2", "--tensor", "2"]
V2 = ["--parameters", "2", "--optimizer", "4", "--recompute", "full"]
PLANS = {
    "V1": V1,
    "V2": V2,
    "zero-bubble": ["--pipeline", "2", "--schedule", "zero-bubble", "--stages", "2", "--gradients", "2"],
    "experts x context": ["--experts", "4", "--context", "2", "--tensor", "2", "--micro-batch", "4"],
}


@pytest.fixture(scope="module")
def plan_server() -> Iterator[ForkServer]:
    n = ForkServer("unbroken.train.parallel.trainer")
    yield n
    n.close()


@pytest.fixture(scope="module")
def argv(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("text")
    (folder / "words.txt").write_text("".join(f"{i} {WORDS}" for i in range(600)))
    return [
        *TINY, "--data", str(folder), "--cache", str(folder / "cache"), "--steps", "12", "--global-batch", "16", "--lr", "0.01",
        "--snapshot-every", "1", "--persist-every", "3", "--comm-timeout", "60", "--log-every", "4",
    ]  # fmt: skip


def checkpoints(folder: Path) -> list[str]:
    return ["--checkpoints", str(folder / "checkpoints")]


@pytest.mark.parametrize(
    "plan", [pytest.param(p, marks=pytest.mark.soak if p == "V1" else ()) for p in PLANS]
)
def test_killed_at_a_random_step(tmp_path: Path, plan_server: ForkServer, argv: list[str], plan: str) -> None:
    undisturbed = Training(plan_server, tmp_path / "a", 4, [*argv, *PLANS[plan]])
    undisturbed.start()
    undisturbed.finish()
    killed = Training(plan_server, tmp_path / "b", 4, [*argv, *PLANS[plan]])
    killed.start(*checkpoints(killed.folder))
    rng = random.Random(plan)
    killed.wait_for_step(rng.randint(3, 8))
    for rank in range(4):  # one would hold the others up until their time-out
        killed.kill(rank)
    assert set(killed.codes()) == {-signal.SIGKILL}
    killed.start(*checkpoints(killed.folder))
    killed.finish()
    assert "resumed step" in killed.log(0).read_text()
    for rank, (x, y) in enumerate(
        zip(undisturbed.all_step_digests(), killed.all_step_digests(), strict=True)
    ):
        assert x.difference(y) is None, f"rank {rank}: {x.difference(y)}\n{killed.said()}"
        assert x.parameters is not None and x.optimizer is not None


def test_from_one_plan_to_another_and_back(tmp_path: Path, plan_server: ForkServer, argv: list[str]) -> None:
    """V1, V2, V1, the reference trainer on one rank: the losses of a run that never changed its plan."""
    whole = Training(plan_server, tmp_path / "whole", 1, argv)
    whole.start()
    whole.finish()
    expected = whole.step_digests(0)
    moves = [(4, 3, V1), (4, 6, V2), (4, 9, ["--pipeline", "2", "--optimizer", "2"]), (1, 12, [])]
    for i, (ranks, until, plan) in enumerate(moves):
        t = Training(plan_server, tmp_path / str(i), ranks, [*argv, "--decay-steps", "12", *plan])
        t.start(*checkpoints(tmp_path), "--steps", str(until))
        t.finish()
        said = t.log(0).read_text()
        before = moves[i - 1][1] if i else 0
        assert f"from step {before} to {until}" in said
        for step, loss in t.step_digests(0).losses.items():
            assert float.fromhex(loss) == pytest.approx(float.fromhex(expected.losses[step]), rel=2e-4), (
                i,
                step,
            )


def test_fast_mode_goes_on_with_the_same_samples_on_the_same_plan_and_another(
    tmp_path: Path, plan_server: ForkServer, argv: list[str]
) -> None:
    """V2 to step 4, V2 again to 8, V1 to 12: the batches and losses of one deterministic rank."""
    whole = Training(plan_server, tmp_path / "whole", 1, argv)
    whole.start()
    whole.finish()
    expected = whole.step_digests(0)
    for until, plan in ((4, V2), (8, V2), (12, V1)):
        t = Training(
            plan_server, tmp_path / f"to-{until}", 4, [*argv, "--decay-steps", "12", "--mode", "fast", *plan]
        )
        t.start(*checkpoints(tmp_path), "--steps", str(until))
        t.finish()
        assert f"from step {until - 4} to {until}" in t.log(0).read_text()
        for step, loss in t.step_digests(0).losses.items():
            assert float.fromhex(loss) == pytest.approx(float.fromhex(expected.losses[step]), rel=2e-4), (
                until,
                step,
            )


def test_skipped_samples_are_as_if_they_had_never_been_there(
    tmp_path: Path, plan_server: ForkServer, argv: list[str]
) -> None:
    """Batches 3 and 4 left out, half of it said only when the run goes on: every rank sees batches 1, 2, 5, 6, ..."""
    whole = Training(plan_server, tmp_path / "a", 4, [*argv, *V2, "--steps", "7"])
    whole.start()
    whole.finish()
    skipping = Training(plan_server, tmp_path / "b", 4, [*argv, *V2, *checkpoints(tmp_path / "b")])
    for until, more in ((1, ["--skip", "32:48"]), (5, ["--skip", "48:64"])):
        skipping.start("--steps", str(until), *more)
        skipping.finish()
    for x, y in zip(whole.all_step_digests(), skipping.all_step_digests(), strict=True):
        assert y.batches == {s: x.batches[s if s <= 2 else s + 2] for s in range(1, 6)}
