"""Optimizers of other frameworks, in their shapes: what hides its state is refused, what has an adapter is saved by its parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unbroken import Checkpointer
from unbroken.checkpoint.capture import adapters
from unbroken.checkpoint.capture.state import capture
from unbroken.errors import UnsaveableState


class Distributed:
    """Megatron's DistributedOptimizer: its state dict leaves the tensors to another function."""

    def __init__(self, model: nn.Module) -> None:
        self.masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=0.1)

    def step(self) -> None:
        for p in self.masters:
            p.grad = torch.ones_like(p)
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": {"param_groups": [{"lr": 0.1, "step": 1}]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("it would load nothing")


class Chained:
    """Megatron's ChainedOptimizer."""

    def __init__(self, *chained: Distributed) -> None:
        self.chained_optimizers = list(chained)

    def step(self) -> None:
        for o in self.chained_optimizers:
            o.step()

    def zero_grad(self) -> None: ...

    def state_dict(self) -> list[Any]:
        return [o.state_dict() for o in self.chained_optimizers]

    def load_state_dict(self, state: Any) -> None: ...


class Container(torch.optim.Optimizer):
    """torchtitan's OptimizersContainer, as far as it hides: an Optimizer of torch whose own state stays empty."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1)]
        super().__init__(list(model.parameters()), {})

    def step(self, closure: Any = None) -> None:
        for o in self.optimizers:
            o.step()


class Shell:
    """Accelerate's and Lightning's: looks through to the optimizer in it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(adapters, "_registered", {})
    yield


def stepped(optimizer: Any, model: nn.Module) -> Any:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("make", [Distributed, lambda m: Chained(Distributed(m)), Container])
def test_what_has_stepped_and_shows_no_tensor_is_refused(make: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = make(model)
    assert capture({"o": optimizer}), "nothing is lost yet"
    stepped(optimizer, model)
    with pytest.raises(UnsaveableState, match=r"'o' cannot be saved: .* has stepped") as e:
        capture({"m": model, "o": optimizer})
    assert "unbroken.hooks" in str(e.value.hint)


def test_what_looks_through_and_what_has_no_state_is_saved() -> None:
    model = nn.Linear(2, 2)
    shell = Shell(stepped(torch.optim.AdamW(model.parameters()), model))
    assert "o.state.0.exp_avg" in capture({"o": shell}).pieces
    sgd = Shell(stepped(torch.optim.SGD(model.parameters()), model))
    assert not capture({"o": sgd}).pieces
    schedule = torch.optim.lr_scheduler.ConstantLR(shell.optimizer)
    assert not capture({"s": schedule}).pieces, "a scheduler holds its optimizer, and is none"


@pytest.mark.usefixtures("own_keepers")
def test_the_parts_that_an_adapter_gives_come_back(tmp_path: Path) -> None:
    name = f"{Distributed.__module__}.{Distributed.__qualname__}"
    adapters.register(name, lambda o: {"optimizer": o.optimizer, "masters": o.masters})
    adapters.register(name.replace("Distributed", "Chained"), lambda o: list(o.chained_optimizers))

    def state() -> dict[str, Any]:
        torch.manual_seed(1)
        model = nn.Linear(2, 2)
        return {
            "model": model, "step": 0, "nested": {"o": Chained(Distributed(model)), "seen": 0, "more": [1, {"x": 2}]},
        }  # fmt: skip

    before = state()
    stepped(before["nested"]["o"], before["model"])
    before["step"], before["nested"]["seen"], before["nested"]["more"][1]["x"] = 1, 5, 6
    with Checkpointer(tmp_path / "c", snapshot_every=1, persist_every=1) as checkpoints:
        checkpoints.save(1, before)
        checkpoints.save(2, before)
        checkpoints.wait("disk", 60)
        after = state()
        inner = after["nested"]["o"].chained_optimizers[0]
        masters = list(inner.masters)
        assert checkpoints.restore(after)
    saved = before["nested"]["o"].chained_optimizers[0]
    assert all(torch.equal(a, b) for a, b in zip(inner.masters, saved.masters, strict=True))
    assert all(a is b for a, b in zip(inner.masters, masters, strict=True)), "in place"
    momentum = [o.optimizer.state[o.masters[0]]["exp_avg"] for o in (inner, saved)]
    assert torch.equal(*momentum) and momentum[0].abs().sum() > 0
    assert (after["step"], after["nested"]["seen"], after["nested"]["more"]) == (1, 5, [1, {"x": 6}])
    assert isinstance(after["nested"]["o"], Chained)


def test_a_subclass_has_the_adapter_of_its_class_and_state_without_wrappers_is_left_alone() -> None:
    adapters.register(f"{Distributed.__module__}.{Distributed.__qualname__}", lambda o: o.optimizer)

    class Mine(Distributed):
        pass

    model = nn.Linear(2, 2)
    mine = Mine(model)
    assert adapters.take_apart({"a": [mine]})["a"][0] is mine.optimizer
    state = {"m": model, "o": torch.optim.SGD(model.parameters()), "n": [{"x": 1}]}
    assert adapters.take_apart(state) is state
