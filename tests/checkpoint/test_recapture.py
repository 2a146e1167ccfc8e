"""A state that is captured again: what was recognised must be what a full look gives, whatever has been done to it between."""

from __future__ import annotations

import gc
import random
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from unbroken.checkpoint.capture import recapture
from unbroken.checkpoint.capture.recapture import Capturer
from unbroken.checkpoint.capture.state import Captured, capture

State = dict[str, Any]


def trained() -> State:
    """A model with tied weights and a buffer, its optimizer after two steps, its average, a scheduler, plain values."""
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    )
    model[3].weight = model[2].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = {
        "model": model, "optimizer": optimizer, "scheduler": scheduler, "average": AveragedModel(model),
        "more": {"seen": 0, "scale": torch.ones(2), "list": [1, (2.5, None)]},
    }  # fmt: skip
    for _ in range(2):
        step(state)
    return state


def step(state: State) -> None:
    state["model"](torch.randn(3, 4)).sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    if "scheduler" in state:
        state["scheduler"].step()


def where(t: torch.Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.device


def shown(c: Captured) -> tuple[Any, ...]:
    """All of it that can be compared."""
    pieces = [(n, where(t)) for n, t in c.pieces.items()]
    live = [(n, where(t)) for n, t in c.live.items() if n not in c.notes["arrays"]]
    return (
        pieces,
        live,
        list(c.live),
        dict(c.tensors),
        dict(c.aliases),
        c.tree,
        c.notes,
        c.protected,
        c.signature(),
    )


@pytest.fixture
def full_looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each full look."""
    looks: list[int] = []

    describe = recapture.described

    def counted(*a: Any) -> Captured:
        looks.append(1)
        return describe(*a)

    monkeypatch.setattr(recapture, "described", counted)
    return looks


def test_the_same_state_is_recognised_and_its_values_are_read_anew(full_looks: list[int]) -> None:
    state, capturer = trained(), Capturer()
    for n in range(1, 6):
        step(state)
        state["more"]["seen"] = n
        state["more"]["list"][0] = n
        found = capturer.capture(state)
        assert shown(found) == shown(capture(state))
        assert found.tree["more"]["seen"] == n
        assert found.tree["scheduler"]["last_epoch"] == n + 2
        assert found.tree["optimizer"]["param_groups"][0]["lr"] == state["optimizer"].param_groups[0]["lr"]
    assert len(full_looks) == 1


def first_state(o: torch.optim.Optimizer) -> dict[str, Any]:
    return next(iter(o.state.values()))


class Other(nn.Linear):
    def state_dict(self, *a: Any, **k: Any) -> Any:
        return {**super().state_dict(*a, **k)}


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"n": self.__dict__.setdefault("n", 7)}

    def set_extra_state(self, state: Any) -> None:
        pass


def replace_parameter(s: State) -> None:
    s["model"][0].weight = nn.Parameter(torch.randn(4, 4))


def swap_memory(s: State) -> None:
    s["model"][0].weight.data = torch.randn(4, 4)


def transpose_memory(s: State) -> None:
    s["model"][0].weight.data = s["model"][0].weight.data.t()


def other_type(s: State) -> None:
    s["model"][0].bias.data = s["model"][0].bias.data.double()


def freeze(s: State) -> None:
    p = s["model"][0].bias
    p.requires_grad_(not p.requires_grad)


def freeze_average(s: State) -> None:
    p = next(s["average"].parameters())
    p.requires_grad_(not p.requires_grad)


def new_buffer(s: State) -> None:
    s["model"][1].running_mean = torch.zeros(4)


def silent_buffer(s: State) -> None:
    s["model"][1]._non_persistent_buffers_set ^= {"running_var"}


def more_buffer(s: State) -> None:
    s["model"][0].register_buffer(f"b{random.random()}".replace(".", "_"), torch.zeros(1))


def no_bias(s: State) -> None:
    s["model"][0].bias = None


def more_module(s: State) -> None:
    s["model"][0].add_module(f"m{len(s['model'][0]._modules)}", nn.Linear(2, 2))


def other_module(s: State) -> None:
    s["model"][1] = nn.BatchNorm1d(4)


def untie(s: State) -> None:
    s["model"][3].weight = nn.Parameter(torch.randn(4, 4))


def tie(s: State) -> None:
    s["model"][3].weight = s["model"][2].weight


def hooked(s: State) -> None:
    more = torch.zeros(1)

    def hook(m: Any, d: Any, prefix: str, meta: Any) -> None:
        d[prefix + "more"] = more

    handles.append(s["model"][0].register_state_dict_post_hook(hook))


handles: list[Any] = []


def unhooked(s: State) -> None:
    while handles:
        handles.pop().remove()


def other_class(s: State) -> None:
    s["model"][0].__class__ = Other if type(s["model"][0]) is nn.Linear else nn.Linear


def extra_state(s: State) -> None:
    s["model"][0].__class__ = Extra


def more_group(s: State) -> None:
    s["optimizer"].add_param_group({"params": [nn.Parameter(torch.randn(2))], "lr": 0.5})
    s.pop("scheduler", None)


def other_parameter_in_group(s: State) -> None:
    parameters = s["optimizer"].param_groups[0]["params"]
    s["optimizer"].state.pop(parameters[0], None)
    parameters[0] = nn.Parameter(torch.randn(4, 4))


def value_in_group(s: State) -> None:
    s["optimizer"].param_groups[0]["weight_decay"] = random.random()


def tensor_in_group(s: State) -> None:
    s["optimizer"].param_groups[0]["lr"] = torch.tensor(random.random())


def no_optimizer_state(s: State) -> None:
    s["optimizer"].state.clear()


def other_moment(s: State) -> None:
    if s["optimizer"].state:
        first_state(s["optimizer"])["exp_avg"] = torch.randn(4, 4)


def more_moment(s: State) -> None:
    if s["optimizer"].state:
        first_state(s["optimizer"])[f"k{random.random()}"] = torch.randn(1)


def number_among_moments(s: State) -> None:
    if s["optimizer"].state:
        first_state(s["optimizer"])["step"] = 3


def other_optimizer(s: State) -> None:
    s["optimizer"] = torch.optim.SGD(s["model"].parameters(), lr=random.random(), momentum=0.9)


def plain_value(s: State) -> None:
    s["more"]["seen"] = random.random()


def other_tensor(s: State) -> None:
    s["more"]["scale"] = torch.randn(2)


def parameter_elsewhere(s: State) -> None:
    s["more"]["scale"] = s["model"][0].weight


def array(s: State) -> None:
    s["more"]["array"] = np.arange(20000.0)


def no_array(s: State) -> None:
    s["more"].pop("array", None)


def small_array(s: State) -> None:
    s["more"]["small"] = np.random.rand(3)


def module_in_more(s: State) -> None:
    s["more"]["inner"] = nn.Linear(2, 2)


def more_key(s: State) -> None:
    s[f"k{len(s)}"] = {"x": torch.zeros(1)}


def other_order(s: State) -> None:
    s["more"] = s.pop("more")


def colliding(s: State) -> None:
    s["more"]["x.y"], s["more"]["x"] = torch.zeros(1), {"y": torch.zeros(2)}


def another_kind(s: State) -> None:
    s["more"] = OrderedDict(s["more"])


def nothing(s: State) -> None:
    pass


CHANGES: list[Callable[[State], None]] = [
    replace_parameter, swap_memory, transpose_memory, other_type, freeze, freeze_average, new_buffer, silent_buffer,
    more_buffer, no_bias, more_module, other_module, untie, tie, hooked, unhooked, other_class, extra_state, more_group,
    other_parameter_in_group, value_in_group, tensor_in_group, no_optimizer_state, other_moment, more_moment,
    number_among_moments, other_optimizer, plain_value, other_tensor, parameter_elsewhere, array, no_array, small_array,
    module_in_more, more_key, other_order, colliding, another_kind, nothing,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_after_any_change_it_is_what_a_full_look_gives(change: Callable[[State], None]) -> None:
    state, capturer = trained(), Capturer()
    capturer.capture(state)
    handles.clear()
    change(state)
    for _ in range(2):
        assert shown(capturer.capture(state)) == shown(capture(state))
    unhooked(state)
    assert shown(capturer.capture(state)) == shown(capture(state))


@pytest.mark.parametrize("seed", range(8))
def test_after_many_changes_too(seed: int) -> None:
    draw = random.Random(seed)
    random.seed(seed)
    handles.clear()
    for _ in range(4):
        state, capturer = trained(), Capturer()
        for _ in range(12):
            for change in draw.choices(CHANGES, k=draw.randint(0, 2)):
                if change is no_bias or (change is other_type and state["model"][0].bias is None):
                    continue  # others change it
                change(state)
            capturer._missed = 0
            assert shown(capturer.capture(state)) == shown(capture(state))
        unhooked(state)


def test_it_keeps_no_tensor_alive() -> None:
    state, capturer = trained(), Capturer()
    capturer.capture(state)
    capturer.capture(state)
    held = [weakref.ref(t) for t in capture(state).live.values()]
    storages = [weakref.ref(t.untyped_storage()) for t in state["model"].parameters()]
    assert all(r() is not None for r in held)
    state.clear()
    gc.collect()
    assert not [r for r in held if r() is not None]
    assert not [r for r in storages if r() is not None]
    assert capturer.capture({"a": torch.zeros(1)}).pieces


def test_a_state_that_is_never_the_same_is_not_learnt_for_ever(full_looks: list[int]) -> None:
    model, capturer = nn.Linear(2, 2), Capturer()
    for n in range(1, 8):
        state = {"model": model.state_dict(), "n": n}  # its tensors are others each time
        assert shown(capturer.capture(state))[5]["n"] == n
    assert capturer._known is None and len(full_looks) == 7


def test_what_cannot_be_saved_is_refused_the_second_time_too() -> None:
    from unbroken.errors import UnsaveableState

    state, capturer = trained(), Capturer()
    capturer.capture(state)
    state["more"]["what"] = object()
    for _ in range(2):
        with pytest.raises(UnsaveableState, match=r"more\.what"):
            capturer.capture(state)
    del state["more"]["what"]
    assert shown(capturer.capture(state)) == shown(capture(state))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("alone")
def test_sharded_parameters_are_recognised_and_taken_back_from_a_forward_pass(full_looks: list[int]) -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state, capturer = {"model": model, "optimizer": optimizer}, Capturer()
    for _ in range(4):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.randn(2, 4))  # leaves the root's parameters gathered
        found = capturer.capture(state)
        assert found.tensors["model.1.weight"][1].placements == ("Shard(0)",)
        assert shown(found) == shown(capture(state))
    assert len(full_looks) == 1
    model.to("cpu")  # swaps them, which torch refuses where somebody holds a weak reference
    assert shown(capturer.capture(state)) == shown(capture(state))


class Counts:
    """Counts the calls of its state_dict; what it shows may be other tensors each time."""

    def __init__(self) -> None:
        self.calls, self.fresh = 0, False
        self.t = torch.zeros(1)

    def state_dict(self) -> Any:
        self.calls += 1
        return {"t": torch.zeros(1) if self.fresh else self.t, "n": self.calls}

    def load_state_dict(self, state: Any) -> None:
        pass


def test_every_state_dict_is_called_once_a_save_whatever_has_changed() -> None:
    """It may be a collective: a rank that sees a difference must not call it oftener than the others."""
    state, capturer = trained(), Capturer()
    sampler = Counts()
    state = {"first": {"sampler": sampler}, **state}
    optimizer, hooked_calls = state["optimizer"], [0]
    optimizer.register_state_dict_pre_hook(lambda _: hooked_calls.__setitem__(0, hooked_calls[0] + 1))
    for n in range(1, 12):
        if n == 3:
            other_moment(state)
        if n == 5:
            replace_parameter(state)
        if n == 7:
            sampler.fresh = True
        if n == 9:
            state["more"]["new"] = torch.zeros(1)
        found = capturer.capture(state)
        assert (sampler.calls, hooked_calls[0]) == (n, n)
        assert found.tree["first"]["sampler"]["n"] == n


def test_hooks_before_and_after_a_state_dict_stay_in_pairs() -> None:
    """Such as those that swap an average in for the state dict, and out again."""
    state, capturer = trained(), Capturer()
    calls: list[str] = []
    handles.append(state["model"].register_state_dict_pre_hook(lambda *_: calls.append("before")))
    handles.append(state["model"].register_state_dict_post_hook(lambda *_: calls.append("after")))
    for n in range(1, 5):
        capturer.capture(state)
        assert calls == ["before", "after"] * n
    unhooked(state)
    for _ in range(2):
        capturer.capture(state)
    handles.append(state["model"].register_state_dict_pre_hook(lambda *_: calls.append("before")))
    handles.append(state["model"].register_state_dict_post_hook(lambda *_: calls.append("after")))
    capturer.capture(state)
    assert calls == ["before", "after"] * 5
    unhooked(state)


def test_what_one_module_shows_by_itself_is_read_anew() -> None:
    state, capturer = trained(), Capturer()
    capturer.capture(state)
    module, count = state["model"][0], [0]
    own = type(module)._save_to_state_dict

    def shows(destination: Any, prefix: str, keep_vars: bool) -> None:
        own(module, destination, prefix, keep_vars)
        count[0] += 1
        destination[prefix + "count"] = count[0]

    module._save_to_state_dict = shows
    for n in range(1, 4):
        assert capturer.capture(state).tree["model"]["0.count"] == n


@pytest.mark.filterwarnings("ignore")
def test_modules_of_another_make_are_saved_as_before() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    for other in (torch.jit.script(model), torch.jit.trace(model, torch.zeros(1, 2))):
        capturer = Capturer()
        for _ in range(3):
            assert set(capturer.capture({"m": other}).pieces) == {"m.0.weight", "m.0.bias"}


def test_modules_and_optimizers_deeper_in_the_state_are_recognised(full_looks: list[int]) -> None:
    inner, capturer = trained(), Capturer()
    state = {
        "train": {"parts": [inner["model"], inner["optimizer"]], "n": 0},
        "scheduler": inner["scheduler"],
    }
    for n in range(1, 5):
        step(inner)
        state["train"]["n"] = n
        assert shown(capturer.capture(state)) == shown(capture(state))
    assert len(full_looks) == 1


def test_tensors_may_be_swapped_after_a_save() -> None:
    """torch refuses that for tensors that somebody holds a weak reference to."""
    state, capturer = trained(), Capturer()
    capturer.capture(state)
    torch.utils.swap_tensors(state["model"][0].weight, nn.Parameter(torch.randn(4, 4)))
    assert shown(capturer.capture(state)) == shown(capture(state))


def test_what_cannot_be_learnt_is_not_tried_at_every_save(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    learn = recapture._Known

    def counted(*a: Any) -> Any:
        tried.append(1)
        return learn(*a)

    monkeypatch.setattr(recapture, "_Known", counted)
    capturer = Capturer()
    for _ in range(200):
        capturer.capture({"array": np.arange(20000.0)})
    assert 3 <= len(tried) <= 8
