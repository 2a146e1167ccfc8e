"""A training that was killed and resumed equals the undisturbed one bit for bit, on any number of ranks."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from tests.support.fork_server import ForkServer, Training
from unbroken.errors import Exit, InputError

SMALL = [
    *("--steps", "24", "--dim", "32", "--layers", "1", "--hidden", "64", "--seq", "32", "--global-batch", "12"),
    *("--snapshot-every", "2", "--persist-every", "4", "--bucket-mb", "0.02", "--comm-timeout", "60"),
]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("text")
    rng = random.Random(1)
    words = [bytes(rng.choices(range(97, 123), k=rng.randint(2, 9))).decode() for _ in range(300)]
    (folder / "words.txt").write_text(" ".join(rng.choices(words, k=20_000)))
    return ["--data", str(folder), "--cache", str(folder / "cache")]


def checkpoints(folder: Path) -> list[str]:
    return ["--checkpoints", str(folder / "checkpoints")]


def same(a: Training, b: Training) -> None:
    for rank, (x, y) in enumerate(zip(a.all_step_digests(), b.all_step_digests(), strict=True)):
        assert x.difference(y) is None, f"rank {rank}: {x.difference(y)}\n{b.said()}"
        assert x.parameters is not None and x.optimizer is not None
        assert set(x.losses) == set(range(1, len(x.losses) + 1))
    assert len({w.parameters for w in a.all_step_digests()}) == 1, "the ranks ended with different weights"


@pytest.mark.integration
@pytest.mark.parametrize(
    ("ranks", "more"), [(1, ["--dropout", "0.1"]), pytest.param(3, [], marks=pytest.mark.slow)]
)
def test_killed_at_a_random_step(
    tmp_path: Path, fork_server: ForkServer, text: list[str], ranks: int, more: list[str]
) -> None:
    argv = [*SMALL, *text, *more]
    undisturbed = Training(fork_server, tmp_path / "a", ranks, argv)
    undisturbed.start()
    killed = Training(fork_server, tmp_path / "b", ranks, argv)
    killed.start(*checkpoints(killed.folder))
    rng = random.Random(ranks)
    killed.wait_for_step(rng.randint(9, 15))
    killed.kill(rng.randrange(ranks))
    undisturbed.finish()
    assert -signal.SIGKILL in killed.codes()
    killed.start(*checkpoints(killed.folder))
    killed.finish()
    same(undisturbed, killed)
    assert "resumed step" in killed.log(0).read_text()
    assert killed.step_digests(0).executions < 2 * 24


@pytest.mark.slow
@pytest.mark.integration
def test_stopped_by_a_signal_to_one_rank_and_gone_on(
    tmp_path: Path, fork_server: ForkServer, text: list[str]
) -> None:
    """Overlapped reduction on the second half, and one rank alone hears the signal: all stop after the same step."""
    argv = [*SMALL, *text, "--eval-every", "7", "--eval-samples", "8"]
    undisturbed = Training(fork_server, tmp_path / "a", 2, argv)
    undisturbed.start()
    stopped = Training(fork_server, tmp_path / "b", 2, argv)
    stopped.start(*checkpoints(stopped.folder))
    stopped.wait_for_step(5)
    stopped.kill(1, signal.SIGTERM)
    undisturbed.finish()
    assert stopped.codes() == [Exit.RANK_STOPPED_ON_REQUEST] * 2, stopped.said()
    last = max(stopped.step_digests(0).losses)
    assert last == max(stopped.step_digests(1).losses) < 24
    stopped.start(*checkpoints(stopped.folder), "--overlap")
    stopped.finish()
    assert f"resumed step {last} " in stopped.log(0).read_text()
    same(undisturbed, stopped)
    assert stopped.step_digests(0).executions == 24, "a step was lost"
    evals = [
        [line for line in t.said().splitlines() if line.startswith("eval ")] for t in (undisturbed, stopped)
    ]
    assert evals[0] == evals[1] and len(evals[0]) == 3


@pytest.mark.slow
@pytest.mark.integration
def test_another_training_in_the_same_folder_is_refused(
    tmp_path: Path, fork_server: ForkServer, text: list[str]
) -> None:
    one = Training(fork_server, tmp_path, 1, [*SMALL, *text, "--steps", "4", *checkpoints(tmp_path)])
    one.start()
    one.finish()
    one.start("--seed", "3")
    assert one.codes() == [InputError.exit_code]
    assert "another training" in one.log(0).read_text() and "Traceback" not in one.log(0).read_text()
    other = tmp_path / "other"
    other.mkdir()
    (other / "x.txt").write_text("another text, " * 4000)
    one.start("--data", str(other))
    assert one.codes() == [InputError.exit_code]
    assert "its text files were changed since, or --data names others" in one.log(0).read_text()
    one.start("--steps", "6")
    one.finish()
    assert "from step 4 to 6" in one.log(0).read_text()


@pytest.mark.integration
def test_another_number_of_ranks_goes_on_with_the_same_samples(
    tmp_path: Path, fork_server: ForkServer, text: list[str]
) -> None:
    argv = [*SMALL, *text, *checkpoints(tmp_path)]
    two = Training(fork_server, tmp_path / "two", 2, [*argv, "--steps", "8"])
    two.start()
    two.finish()
    one = Training(fork_server, tmp_path / "one", 1, [*argv, "--steps", "12"])
    one.start()
    one.finish()
    whole = Training(fork_server, tmp_path / "whole", 1, [*SMALL, *text, "--steps", "12"])
    whole.start("--decay-steps", "8")
    whole.finish()
    assert "from step 8 to 12" in one.log(0).read_text()
    resumed, undisturbed = one.step_digests(0), whole.step_digests(0)
    assert {s: resumed.batches[s] for s in range(9, 13)} == {s: undisturbed.batches[s] for s in range(9, 13)}
    assert float.fromhex(resumed.losses[9]) == pytest.approx(float.fromhex(undisturbed.losses[9]), rel=1e-3)


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("ranks", "seed"),
    [
        pytest.param(ranks, seed, marks=[] if (ranks, seed) in ((1, 1), (4, 3)) else pytest.mark.soak)
        for ranks in (1, 2, 3, 4)
        for seed in (1, 2, 3)
    ],
)
def test_killed_again_and_again(
    tmp_path: Path, fork_server: ForkServer, text: list[str], ranks: int, seed: int
) -> None:
    argv = [*SMALL, *text, "--steps", "60", "--seed", str(seed), "--dropout", "0.05"]
    undisturbed = Training(fork_server, tmp_path / "a", ranks, argv)
    undisturbed.start()
    undisturbed.finish()
    rng = random.Random(100 * seed + ranks)
    killed = Training(fork_server, tmp_path / "b", ranks, argv)
    for at in (rng.randint(4, 18), rng.randint(20, 36), rng.randint(38, 54)):
        killed.start(*checkpoints(killed.folder))
        killed.wait_for_step(at)
        killed.kill(rng.randrange(ranks))
        killed.codes()
    killed.start(*checkpoints(killed.folder))
    killed.finish()
    same(undisturbed, killed)
