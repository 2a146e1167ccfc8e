"""What all hooks share, without a framework: the end of a step, the place of the generators, what is refused."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.keepers import end_keepers
from unbroken import data
from unbroken.checkpoint import Restored
from unbroken.errors import Exit, MissingExtra, UsageError
from unbroken.extras import install_command
from unbroken.hooks import training as hooks
from unbroken.hooks.steps import StepLoader
from unbroken.hooks.training import HookedTraining, Loss, Values, check_version


class Checkpoints:
    """What a Checkpointer is asked for; `stored` is what the next one restores."""

    stored: tuple[int, torch.Tensor, dict[str, Any]] | None = None
    others: ClassVar[list[object]] = []
    directory = "runs/one"

    def __init__(self) -> None:
        self.saved: list[tuple[int, bool | None]] = []
        self.closed = False

    def others_at_work(self) -> list[object]:
        return self.others

    def due(self, step: int) -> bool:
        return step % 2 == 0

    def save(self, step: int, state: dict[str, Any], persist: bool | None = None) -> None:
        self.saved.append((step, persist))
        type(self).stored = (step, torch.get_rng_state(), state["loader"].state_dict())

    def restore(self, state: dict[str, Any]) -> Restored | None:
        if self.stored is None:
            return None
        step, generators, loader = self.stored
        torch.set_rng_state(generators)
        state["loader"].load_state_dict(loader)
        return Restored(step, 1, "", "memory", data.Position(), (), False, 0.0)

    def close(self) -> None:
        self.closed = True


class Stops:
    """A run that asks for a stop at a step."""

    rank, active = 0, True
    world_sizes: tuple[int, ...] = ()

    def __init__(self, at: int = 10**9) -> None:
        self.at, self.steps, self.phases = at, list[int](), list[str]()

    def step(self, step: int, *, loss: float = 0.0, tokens: int = 0) -> None:
        self.steps.append(step)

    def should_stop(self, step: int) -> bool:
        return self.at <= step

    def phase(self, name: str) -> Any:
        import contextlib

        self.phases.append(name)
        return contextlib.nullcontext()


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hooks, "Checkpointer", lambda *_, **__: Checkpoints())
    monkeypatch.setattr(Checkpoints, "stored", None)
    monkeypatch.setattr(hooks, "_active", [])
    yield


def begin(run: Stops | None = None, **how: Any) -> tuple[StepLoader, HookedTraining]:
    loader = data.wrap(DataLoader(torch.arange(20), batch_size=2, shuffle=True), accumulate=2, **how)
    hooks._active.clear()
    training = HookedTraining("test")
    training.run = run or Stops()  # type: ignore[assignment]
    steps = StepLoader(loader, training)
    training.begin({"loader": loader})
    return steps, training


def losses(steps: StepLoader, epochs: int, *, exhaust: bool) -> list[tuple[int, list[int], float]]:
    """Step, samples and a draw of "dropout" of each batch, by a loop that exhausts its loader or counts batches."""
    found = []
    while steps.loader.epoch < epochs:
        batches = iter(steps)
        for number, batch in enumerate(batches, 1):
            found.append((steps.loader.step, batch.tolist(), float(torch.rand(()))))
            if not exhaust and number == len(steps) and steps.loader.epoch_ends:
                break
            if not exhaust and steps.loader.epoch_ends:
                break
        if not exhaust:
            if steps.loader.epoch + 1 >= epochs:
                break
            steps.set_epoch(steps.loader.epoch + 1)
    return found


@pytest.mark.parametrize("exhaust", [True, False])
@pytest.mark.parametrize("stop_after", [3, 5, 6, 9])
def test_a_step_ends_when_the_loop_asks_for_more_and_a_resume_goes_on_there(
    exhaust: bool, stop_after: int
) -> None:
    """Five steps an epoch, the last one short; a save every second step."""
    torch.manual_seed(3)
    steps, training = begin()
    whole = losses(steps, 3, exhaust=exhaust)
    steps.finish()
    assert training.run.steps == list(range(1, 16)), "each step once, in order"  # type: ignore[attr-defined]
    assert training.checkpoints.saved == [(s, None) for s in range(2, 16, 2)]  # type: ignore[attr-defined]
    assert training.checkpoints.closed  # type: ignore[attr-defined]
    assert training.run.phases[-1] == "stopping", "what its script does then would be a hang"  # type: ignore[attr-defined]

    Checkpoints.stored = None
    torch.manual_seed(3)
    steps, _ = begin(Stops(stop_after))
    with pytest.raises(SystemExit) as left:
        losses(steps, 3, exhaust=exhaust)
        steps.finish()
    assert left.value.code == Exit.RANK_STOPPED_ON_REQUEST
    torch.manual_seed(99)
    steps, training = begin()
    torch.rand(3)  # what a framework draws while it makes its loaders
    assert training.step == stop_after
    rest = losses(steps, 3, exhaust=exhaust)
    assert rest == whole[len(whole) - len(rest) :] and rest[0][0] in (stop_after, stop_after + 1)


def test_a_stop_that_was_asked_for_before_the_first_step_saves_nothing() -> None:
    loader = data.wrap(DataLoader(torch.arange(8), batch_size=2))
    training = HookedTraining("test")
    training.run = Stops(0)  # type: ignore[assignment]
    with pytest.raises(SystemExit) as left:
        training.begin({"loader": loader})
    assert left.value.code == Exit.RANK_STOPPED_ON_REQUEST
    assert training.checkpoints.saved == [] and training.checkpoints.closed  # type: ignore[attr-defined]


def test_two_hooks_at_once_are_refused_until_the_first_has_ended() -> None:
    first = HookedTraining("one")
    with pytest.raises(UsageError, match="two hooks at once: one's already saves"):
        HookedTraining("two")
    first.finish()
    second = HookedTraining("two")
    del second
    gc.collect()
    HookedTraining("three")


def test_a_training_that_is_over_and_a_checkpointer_of_the_scripts_own_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = HookedTraining("one")
    first.finish()
    with pytest.raises(UsageError, match="one's training is over"):
        first.begin({})
    monkeypatch.setattr(Checkpoints, "others", [first.checkpoints])
    HookedTraining("two").begin({})  # that of a hook which ended
    hooks._active.clear()
    monkeypatch.setattr(Checkpoints, "others", [Checkpoints()])
    with pytest.raises(UsageError, match="three's hook saves into runs/one"):
        HookedTraining("three").begin({})


def test_other_data_is_refused(tmp_path: Path) -> None:
    steps, _ = begin()
    list(steps)
    with pytest.raises(Exception, match="other data: its seed is 0, this loader's is 7"):
        begin(seed=7)


def test_losses_that_are_none() -> None:
    loss = Loss()
    assert loss.read() != loss.read(), "not a number yet"
    for value, expected in ((torch.tensor([2.5]), 2.5), (3, 3.0), (torch.ones(2), 3.0)):
        loss.note(value)
        assert loss.read() == expected
    loss.note("none")
    assert loss.read() != loss.read()


def test_values_go_there_and_back() -> None:
    seen: list[Any] = []
    values = Values(lambda: {"a": 1}, seen.append)
    values.load_state_dict(values.state_dict())
    assert seen == [{"a": 1}]


def test_a_framework_that_is_missing_or_too_old_names_what_to_install() -> None:
    with pytest.raises(MissingExtra, match="needs no-such-trainer") as e:
        check_version("no-such-trainer", "1.0", "hooks-transformers")
    assert install_command("hooks-transformers") in str(e.value.hint)
    with pytest.raises(
        UsageError, match=r"torch [\d.+a-z]+ is too old for its hook, which needs 99\.1"
    ) as old:
        check_version("torch", "99.1", "hooks-transformers")
    assert install_command("hooks-transformers") in str(old.value.hint)
    assert "transformers>=" in install_command("hooks-transformers", prefix="/usr")
    check_version("torch", "2.9", "hooks-transformers")


def test_a_plain_training_through_a_real_checkpointer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_keepers: Path
) -> None:
    from unbroken import Checkpointer

    monkeypatch.setattr(hooks, "Checkpointer", Checkpointer)

    def train(epochs: int) -> list[float]:
        hooks._active.clear()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        loader = data.wrap(DataLoader(torch.arange(16.0)[:, None], batch_size=4, shuffle=True))
        training = HookedTraining("test", tmp_path / "c", snapshot_every=1, persist_every=2)
        steps = StepLoader(loader, training)
        training.begin({"model": model, "optimizer": optimizer, "loader": loader})
        found = []
        for _ in loader.epochs(epochs):
            for x in steps:
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        steps.finish()
        return found

    some = train(1)
    rest = train(3)
    (tmp_path / "c").rename(tmp_path / "old")
    end_keepers(own_keepers)
    assert some + rest == train(3)
