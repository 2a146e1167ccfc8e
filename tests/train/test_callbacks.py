"""A user's own script: a callback whose state goes on after a stop, a trainer with another schedule, a journal of the batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unbroken.data.digest import digest
from unbroken.errors import UsageError
from unbroken.train.callbacks import Callback, by_name
from unbroken.train.config import parse
from unbroken.train.corpus.batches import GlobalBatches
from unbroken.train.corpus.order import SampleOrder, SamplePosition


class Count(Callback):
    """Counts steps over all attempts and remembers losses of evaluations."""

    def __init__(self) -> None:
        self.began_at, self.steps, self.held_out = -1, 0, list[float]()

    def on_start(self, training: Any) -> None:
        self.began_at = training.step

    def on_step(self, training: Any, loss: float, norm: Any) -> None:
        self.steps += 1

    def on_evaluation(self, training: Any, loss: float) -> None:
        self.held_out.append(loss)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "held_out": self.held_out}

    def load_state_dict(self, state: Any) -> None:
        self.steps, self.held_out = state["steps"], list(state["held_out"])


SMALL = ["--dim", "16", "--layers", "1", "--heads", "2", "--kv-heads", "2", "--hidden", "32", "--seq", "16", "--global-batch", "2",
         "--eval-every", "2", "--eval-samples", "2", "--log-every", "100", "--device", "cpu"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["reference", "plan"])
def test_state_goes_on_and_parts_are_exchanged(tmp_path: Path, engine: str) -> None:
    from unbroken.train.loop import train
    from unbroken.train.training import open_training

    (tmp_path / "words.txt").write_text("one two three four five six seven " * 100)
    where = [
        "--data",
        str(tmp_path / "words.txt"),
        "--cache",
        str(tmp_path),
        "--checkpoints",
        str(tmp_path / "c"),
        "--engine",
        engine,
    ]
    rates: list[int] = []

    def with_own_rate(*args: Any) -> Any:
        trainer = open_training(*args)
        if engine == "plan":
            trainer.rate = lambda optim, step, steps: rates.append(step) or 0.01  # type: ignore[attr-defined]
        return trainer

    counts = [Count(), Count()]
    for count, until in zip(counts, ("4", "6"), strict=True):
        assert (
            train(
                parse([*SMALL, *where, "--decay-steps", "6", "--steps", until]),
                open_trainer=with_own_rate,
                callbacks=[count],
            )
            == 0
        )
    first, second = counts
    assert (first.began_at, first.steps, second.began_at, second.steps) == (0, 4, 4, 6)
    assert len(second.held_out) == 3 and second.held_out[:2] == first.held_out
    assert sorted(set(rates)) == ([1, 2, 3, 4, 5, 6] if engine == "plan" else [])


def test_callbacks_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="told apart"):
        by_name([Count(), Count()])


class FewSamples:
    count = 5

    def rows(self, samples: Any) -> Any:
        return samples, samples

    def weight(self, samples: Any) -> int:
        return len(samples)


def test_a_batch_is_its_samples_and_their_digest() -> None:
    order = SampleOrder(5, seed=0)
    found = GlobalBatches(order, FewSamples(), 2).record(3, SamplePosition(((0, 4),), ((5, 7),)))
    assert (found.step, found.samples, found.epoch) == (3, ((4, 5), (7, 8)), 0)
    expected = [digest((i, [order[i]], [order[i]])) for i in (4, 7)]
    assert found.digest == sum(expected) % 2**64
