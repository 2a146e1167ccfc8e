"""What is seen of a state, before a byte is copied: which memory, whose, and what only optimizers change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unbroken import Checkpointer
from unbroken.checkpoint.capture.state import capture


class Hides(nn.Module):
    """Says that only one of its parameters is one: the other may be changed by anybody."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.online.parameters(recurse)


def test_only_what_a_module_names_as_its_parameters_is_left_to_optimizers() -> None:
    assert capture({"m": Hides()}).protected == {"m.online.weight"}
    plain = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False))
    assert capture({"m": plain}).protected == {"m.0.weight"}


def test_what_lies_at_one_address_is_one_tensor_only_if_it_is_looked_at_alike() -> None:
    w = torch.arange(12.0)
    c = capture({"a": w, "b": w, "row": w.view(3, 4), "turned": w.view(3, 4).T, "half": w[:6], "none": w[:0]})
    assert dict(c.aliases) == {"b": "a"}
    assert set(c.pieces) == {"a", "row", "turned", "half", "none"}
    several = capture({"x": torch.empty(0), "y": torch.empty(0)})
    assert not several.aliases


class Counts:
    """Counts the calls of its state_dict, which may be a collective."""

    def __init__(self) -> None:
        self.calls = 0

    def state_dict(self) -> Any:
        self.calls += 1
        return {"t": torch.zeros(1), "n": self.calls}

    def load_state_dict(self, state: Any) -> None:
        pass


def test_every_state_dict_and_hook_is_called_once_a_save() -> None:
    model, sampler, calls = nn.Linear(2, 2), Counts(), list[str]()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("optimizer"))
    model.register_state_dict_pre_hook(lambda *_: calls.append("before"))
    model.register_state_dict_post_hook(lambda *_: calls.append("after"))
    for n in range(1, 4):
        found = capture({"model": model, "more": {"sampler": sampler}, "optimizer": optimizer})
        assert (found.tree["more"]["sampler"]["n"], calls) == (n, ["before", "after", "optimizer"] * n)


def test_what_one_module_shows_by_itself_is_captured() -> None:
    module = nn.Linear(2, 2)
    own = type(module)._save_to_state_dict

    def shows(destination: Any, prefix: str, keep_vars: bool) -> None:
        own(module, destination, prefix, keep_vars)
        destination[prefix + "count"] = 1

    module._save_to_state_dict = shows  # type: ignore[method-assign]
    assert capture({"model": nn.Sequential(module)}).tree["model"]["0.count"] == 1


@pytest.mark.filterwarnings("ignore")
def test_modules_of_another_make_are_captured() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    for other in (torch.jit.script(model), torch.jit.trace(model, torch.zeros(1, 2))):
        assert set(capture({"m": other}).pieces) == {"m.0.weight", "m.0.bias"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("alone")
def test_sharded_parameters_are_taken_back_from_a_forward_pass() -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    before = {n: t.data_ptr() for n, t in capture({"model": model}).pieces.items()}
    with torch.no_grad():
        model(torch.randn(2, 4))  # leaves the root's parameters gathered
    found = capture({"model": model})
    assert found.tensors["model.1.weight"][1].placements == ("Shard(0)",)
    assert {n: t.data_ptr() for n, t in found.pieces.items()} == before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("alone")
def test_the_older_sharded_tensor_is_captured() -> None:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    t = sharded_tensor.rand(ChunkShardingSpec(dim=0, placements=["rank:0/cpu"]), 4, 4)
    c = capture({"w": t})
    assert [p.shape for p in c.pieces.values()] == [(4, 4)]


@pytest.mark.usefixtures("alone")
def test_the_layout_of_a_dtensor_is_looked_up_again_where_it_has_another() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    t = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
    assert capture({"w": t}).tensors["w"][1].placements == ("Shard(0)",)
    other = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Replicate()])
    assert isinstance(other, DTensor)
    t._spec = other._spec  # as a redistribution in place does
    assert capture({"w": t}).tensors["w"][1].placements == ("Replicate()",)


def test_a_first_save_in_inference_mode_does_not_spoil_those_after_it(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    c = Checkpointer(tmp_path / "c", snapshot_every=1, persist_every=1, memory="64MiB")
    with torch.inference_mode():
        c.save(1, {"m": model})
    for step in range(2, 6):
        with torch.no_grad():
            model.weight.fill_(float(step))
        c.save(step, {"m": model})
    c.close()
    again = nn.Linear(4, 4)
    with Checkpointer(tmp_path / "c", memory="64MiB") as reader:
        restored = reader.restore({"m": again})
    assert restored is not None and restored.step == 5
    assert torch.equal(again.weight, model.weight)


def test_a_copy_that_cannot_be_made_fails_its_save_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(4, 4)
    c = Checkpointer(tmp_path / "c", snapshot_every=1, persist_every=1, memory="64MiB")
    c.save(1, {"m": model})

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as m:
        m.setattr(c._open().buffers.device.stager, "copy", full)
        saved = c.save(2, {"m": model})
    assert saved.disk is not None and saved.disk.exception(60) is not None
    for step in (3, 4, 5, 6):  # more than there are buffers
        c.save(step, {"m": model})
    c.close()
