"""A restore of another world size that is refused leaves the live state as it was, whatever was wrong with it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from unbroken.errors import LayoutMismatch

from .test_ranks import Ranks, ranks  # noqa: F401 - a fixture


class Own:
    """An object that loads by itself, and raises if it is told to."""

    def __init__(self, value: int, refuses: bool = False) -> None:
        self.value, self.refuses, self.weights = value, refuses, torch.full((3,), float(value))

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        if self.refuses:
            raise RuntimeError("not with me")
        self.weights.copy_(state["weights"])


def build(
    fill: float, *, groups: int = 1, width: int = 2, value: int = 0, refuses: bool = False
) -> dict[str, Any]:
    """A state with a model, an optimizer that has stepped, a schedule and two objects of one's own."""
    model = torch.nn.Linear(width, 2)
    torch.nn.init.constant_(model.weight, fill)
    parts = [{"params": [p]} for p in model.parameters()] if groups == 2 else model.parameters()
    optimizer = torch.optim.AdamW(parts, lr=0.1)
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return {
        "model": model, "optimizer": optimizer, "schedule": schedule, "mine": Own(value),
        "other": Own(value, refuses), "step": int(fill),
    }  # fmt: skip


def seen(state: dict[str, Any]) -> Any:
    return copy.deepcopy([x.state_dict() if hasattr(x, "state_dict") else x for x in state.values()], {})


@pytest.fixture
def saved(ranks: Callable[..., Ranks]) -> Callable[..., Ranks]:  # noqa: F811
    """Two ranks that have saved step 1 and are gone; called, it opens one rank on their folder."""
    two = ranks(2)
    two.open()
    two.each(lambda r, c: c.save(1, build(7.0, value=5), persist=True).wait("disk", 30))
    two.each(lambda r, c: c.close())

    def one(**options: Any) -> Ranks:
        two.world = 1
        two.open(**options)
        return two

    return one


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"groups": 2}, "groups of parameters"),
        ({"width": 3}, "model.weight"),
        ({"refuses": True}, "not with me"),
    ],
)
def test_nothing_is_changed(saved: Callable[..., Ranks], wrong: dict[str, Any], says: str) -> None:
    r = saved()
    live = build(1.0, value=1, **wrong)
    before = seen(live)
    (error,) = r.each(lambda _, c: c.restore(live))
    assert isinstance(error, LayoutMismatch) and says in str(error), error
    assert repr(seen(live)) == repr(before)


def test_all_of_it_comes_back_where_it_fits(saved: Callable[..., Ranks]) -> None:
    r = saved()
    live = build(1.0, value=1)
    (restored,) = r.each(lambda _, c: c.restore(live))
    assert restored.step == 1 and restored.resharded
    want = build(7.0, value=5)
    assert torch.equal(live["model"].weight, want["model"].weight)
    assert live["mine"].value == live["other"].value == 5 and live["mine"].weights.tolist() == [5.0] * 3
    assert repr(live["optimizer"].state_dict()["state"]) == repr(want["optimizer"].state_dict()["state"])
    assert live["step"] == 7


def test_what_fits_by_name_is_taken_where_that_is_asked_for(saved: Callable[..., Ranks]) -> None:
    r = saved(strict=False)
    live = {"model": build(1.0)["model"], "something new": torch.zeros(2)}
    (restored,) = r.each(lambda _, c: c.restore(live))
    assert restored.step == 1, restored
    assert torch.equal(live["model"].weight, build(7.0)["model"].weight)


def test_nothing_that_fits_is_an_error(saved: Callable[..., Ranks]) -> None:
    r = saved(strict=False)
    live = {"net": build(1.0)["model"]}
    (error,) = r.each(lambda _, c: c.restore(live))
    assert isinstance(error, LayoutMismatch) and "nothing of the checkpoint fits" in str(error)
