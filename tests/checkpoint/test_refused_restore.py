"""A restore that is refused leaves everything as it was; strict=False says what it took; kinds of values come back."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from unbroken.checkpoint.capture.state import capture
from unbroken.checkpoint.restore.apply import Applier, Stored
from unbroken.errors import LayoutMismatch, UnsaveableState


def kept(state: dict[str, Any], **how: Any) -> Applier:
    """What a checkpoint of this state would give back."""
    captured = capture(state)
    stored = {
        name: Stored(name, *captured.tensors[captured.aliases.get(name, name)], (t.detach().clone(),))
        for name, t in captured.live.items()
    }
    return Applier(stored, captured.tree, captured.notes, "step-00000001.a0001", **how)


class Own:
    """An object that loads by itself, and may refuse."""

    def __init__(self, value: int, refuse: bool = False) -> None:
        self.value, self.refuse = value, refuse

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        if self.refuse and state["value"] == 1:
            raise KeyError("something of its own")


def trained(groups: int = 2) -> dict[str, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 3))
    parts = list(model.parameters())
    optimizer = torch.optim.Adam([{"params": parts[i::groups]} for i in range(groups)], lr=0.1)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return {"own": Own(1), "model": model, "optimizer": optimizer, "inner": {"w": torch.ones(2)}, "step": 1}


def fresh(**other: Any) -> dict[str, Any]:
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 3))
    optimizer = torch.optim.Adam([{"params": list(model.parameters())[i::2]} for i in range(2)], lr=0.5)
    state = {"own": Own(5), "model": model, "optimizer": optimizer, "inner": {"w": torch.zeros(2)}, "step": 0}
    return {**state, **other}


def everything(state: dict[str, Any]) -> Any:
    c = capture(state)
    return {n: t.detach().clone() for n, t in c.live.items()}, c.tree


def other_groups() -> dict[str, Any]:
    state = fresh()
    return {**state, "optimizer": torch.optim.Adam(state["model"].parameters(), lr=0.5)}


REFUSED: list[Callable[[], dict[str, Any]]] = [
    other_groups,
    lambda: fresh(model=torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 4))),
    lambda: fresh(model=torch.nn.Linear(2, 2)),
    lambda: fresh(inner={"w": torch.zeros(3)}),
    lambda: fresh(inner={"w": torch.zeros(2, dtype=torch.float64)}),
    lambda: fresh(inner={"w": torch.zeros(2), "more": torch.zeros(1)}),
    lambda: fresh(inner=[torch.zeros(2)]),
    lambda: fresh(own=Own(5, refuse=True)),
    lambda: fresh(last=Own(5)),
]


@pytest.mark.parametrize("make", REFUSED, ids=range(len(REFUSED)))
def test_a_refused_restore_leaves_everything_as_it_was(make: Callable[[], dict[str, Any]]) -> None:
    applier, state = kept(trained()), make()
    before, tree = everything(state)
    with pytest.raises(LayoutMismatch):
        applier.into(state)
    after, tree_now = everything(state)
    assert tree == tree_now and before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)


def test_an_object_that_refuses_is_named_and_gets_back_what_it_had() -> None:
    state = fresh(own=Own(5, refuse=True))
    with pytest.raises(
        LayoutMismatch, match=r"'own' \(a Own\) does not take its state: KeyError.*nothing was changed"
    ):
        kept(trained()).into(state)
    assert state["own"].value == 5


def test_not_strict_takes_what_fits_and_says_what_it_left() -> None:
    saved, state = trained(), fresh()
    state["model"].add_module("extra", torch.nn.Linear(1, 1))
    extra = state["model"].extra.weight.detach().clone()
    with pytest.raises(LayoutMismatch, match="strict=False"):
        kept(saved).into(state)
    taken = kept(saved, strict=False).into(state)
    assert set(taken.left) == {"model.extra.weight", "model.extra.bias"} and not taken.unused
    assert torch.equal(state["model"][0].weight, saved["model"][0].weight)
    assert torch.equal(state["model"].extra.weight, extra) and state["own"].value == 1


def test_taking_nothing_is_an_error() -> None:
    with pytest.raises(LayoutMismatch, match="nothing of the checkpoint fits"):
        kept({"model": torch.nn.Linear(2, 2)}, strict=False).into({"net": torch.nn.Linear(2, 2)})
    with pytest.raises(LayoutMismatch, match="nothing of the checkpoint fits"):
        kept({"model": torch.nn.Linear(2, 2), "step": 1}, strict=False).into(
            {"net": torch.nn.Linear(2, 2), "step": 0}
        )


@pytest.mark.parametrize(
    "value",
    [Counter({4: 1, "b": 2}), OrderedDict(b=1, a=2), defaultdict(list, {1: [2]}), deque([1, 2], 5), {3, 1}],
    ids=lambda v: type(v).__name__,
)
def test_a_kind_of_container_comes_back_as_itself(value: Any) -> None:
    class Holder:
        def __init__(self) -> None:
            self.held: Any = None

        def state_dict(self) -> dict[str, Any]:
            return {"held": self.held}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.held = state["held"]

    saved, live = Holder(), Holder()
    saved.held = value
    state = {"holder": live, "plain": type(value)()}
    kept({"holder": saved, "plain": value}).into(state)
    for got in (live.held, state["plain"]):
        assert type(got) is type(value) and got == value
    if isinstance(value, defaultdict):
        assert live.held.default_factory is state["plain"].default_factory is list
    if isinstance(value, deque):
        assert live.held.maxlen == 5


def test_a_mapping_of_another_kind_is_refused_with_its_key() -> None:
    class Special(dict):  # type: ignore[type-arg]
        pass

    with pytest.raises(UnsaveableState, match=r"a\.b"):
        capture({"a": {"b": Special(x=1)}})
