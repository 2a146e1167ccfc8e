"""What goes out comes back: to DCP, Hugging Face and torch, and from them, as those libraries themselves read it."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from unbroken.checkpoint.capture import direct
from unbroken.checkpoint.catalogue import contents as catalogue
from unbroken.checkpoint.convert import export
from unbroken.checkpoint.convert import imports as adopt
from unbroken.checkpoint.restore import reshard
from unbroken.checkpoint.storage.posix import PosixStorage
from unbroken.errors import CheckpointCorrupt, CheckpointError, InputError, UnsaveableState, UsageError

from .test_reshard import as_rank, placements, spread


def model() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    embed = torch.randn(16, 4)
    return {
        "embed.weight": embed,
        "layers.0.w": torch.randn(4, 4, dtype=torch.bfloat16),
        "layers.0.n": torch.tensor(3),
        "layers.1.w": torch.randn(7, 3),
        "head.weight": embed,
    }


def whole_state() -> dict[str, Any]:
    module = torch.nn.Linear(3, 2)
    adam = torch.optim.AdamW(module.parameters(), lr=0.5)
    module(torch.ones(3)).sum().backward()
    adam.step()
    return {"model": model(), "optimizer": adam.state_dict(), "step": 40, "betas": (0.9, float("inf"))}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[PosixStorage, str, dict[str, Any]]:
    """A checkpoint on one rank, with optimizer, ties, scalars and values."""
    state, storage = whole_state(), PosixStorage(tmp_path / "ours")
    return (
        storage,
        direct.commit(storage, [direct.write_rank(storage, state, direct.Stamp("r", 2, 40))]).name,
        state,
    )


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit, types included."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and direct.plain_bytes(a) == direct.plain_bytes(b) and a.shape == b.shape
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def emptied(state: Any) -> Any:
    """The same state with zeros, to load into."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {k: emptied(v) for k, v in state.items()}
    return type(state)(emptied(v) for v in state) if isinstance(state, list | tuple) else state


def test_to_dcp(saved: Any, tmp_path: Path) -> None:
    storage, name, state = saved
    done = export.to_dcp(storage, name, tmp_path / "dcp")
    assert (done.tensors, ".metadata" in done.files) == (11, True)
    target = emptied(state)
    dcp.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same(target, state)


def test_to_torch(saved: Any, tmp_path: Path) -> None:
    storage, name, state = saved
    export.to_torch(storage, name, tmp_path / "x.pt")
    back = torch.load(tmp_path / "x.pt", weights_only=True)
    assert same(back, state)
    assert back["model"]["head.weight"].data_ptr() == back["model"]["embed.weight"].data_ptr(), (
        "ties stay tied"
    )


def test_to_huggingface(saved: Any, tmp_path: Path) -> None:
    storage, name, state = saved
    done = export.to_huggingface(storage, name, tmp_path / "hf")
    assert done.files == ("model.safetensors",)
    assert any("head.weight is tied to embed.weight" in n for n in done.notes)
    back = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    assert back.keys() == state["model"].keys() - {"head.weight"}
    assert all(same(back[n], state["model"][n]) for n in back)


def test_to_huggingface_in_several_files(saved: Any, tmp_path: Path) -> None:
    storage, name, state = saved
    (tmp_path / "config").mkdir()
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "config" / file).write_text("{}")
    done = export.to_huggingface(
        storage, name, tmp_path / "hf", max_shard_bytes=100, dtype="float16", beside=tmp_path / "config"
    )
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1
    assert {"config.json", "tokenizer.json", *files} < set(done.files)
    assert "model.safetensors" not in done.files
    back = {n: t for f in files for n, t in safetensors.torch.load_file(tmp_path / "hf" / f).items()}
    assert {n: index["weight_map"][n] for n in back} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in back.values())
    for n, t in back.items():
        want = state["model"][n]
        assert same(t, want.half() if want.is_floating_point() else want)


def test_from_shards(tmp_path: Path) -> None:
    storage, parts = PosixStorage(tmp_path / "ours"), []
    full = {n: t for n, t in model().items() if t.dim()}
    for rank in range(6):
        with as_rank(rank, (3, 2)) as mesh:
            local = {n: spread(t, mesh, placements(4, (3, 2), t.dim())) for n, t in full.items()}
            parts.append(direct.write_rank(storage, {"model": local}, direct.Stamp("r", 1, 5, rank, 6)))
    name = direct.commit(storage, parts).name
    export.to_torch(storage, name, tmp_path / "x.pt")
    assert same(torch.load(tmp_path / "x.pt", weights_only=True)["model"], full)
    export.to_dcp(storage, name, tmp_path / "dcp")
    target = {"model": emptied(full)}
    dcp.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same(target["model"], full)


def test_an_export_that_fails_leaves_nothing(saved: Any, tmp_path: Path) -> None:
    storage, name, _ = saved
    file = tmp_path / "ours" / name / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for work, out in [(export.to_dcp, "dcp"), (export.to_huggingface, "hf"), (export.to_torch, "x.pt")]:
        with pytest.raises(CheckpointCorrupt, match="checksum"):
            work(storage, name, tmp_path / out)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["ours"]


def test_refusals(saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, name, _ = saved
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for work in (export.to_dcp, export.to_huggingface, export.to_torch):
        with pytest.raises(UsageError, match="exists"):
            work(storage, name, tmp_path / "full")
    with pytest.raises(UsageError, match=r"There are: model, optimizer"):
        export.to_huggingface(storage, name, tmp_path / "a", prefix="net")
    with pytest.raises(UsageError, match="no floating-point type"):
        export.to_huggingface(storage, name, tmp_path / "a", dtype="int8")
    with pytest.raises(UsageError, match=r"no config\.json"):
        export.to_huggingface(storage, name, tmp_path / "a", beside=tmp_path / "full")
    monkeypatch.setattr(export, "available_memory", lambda: 10)
    with pytest.raises(CheckpointError, match="in memory"):
        export.to_torch(storage, name, tmp_path / "a")


def test_the_token_that_ends_a_text_is_the_tokenizer_s_where_the_configuration_knows_none(
    tmp_path: Path,
) -> None:
    added = {"added_tokens": [{"id": 3, "content": "<pad>"}, {"id": 7, "content": "<end>"}]}
    files = {"tokenizer.json": added, "tokenizer_config.json": {"eos_token": {"content": "<end>"}}}
    for known, expected in ((None, 7), (2, 2)):
        for name, content in (files | {"config.json": {"eos_token_id": known}}).items():
            (tmp_path / name).write_text(json.dumps(content))
        export._name_end(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text()) == {"eos_token_id": expected}


# adopting -------------------------------------------------------------------------------------------------------


def adopted(tmp_path: Path, source: Path, **more: Any) -> tuple[PosixStorage, str]:
    storage = PosixStorage(tmp_path / "adopted")
    name = adopt.import_checkpoint(source, storage, **more).name
    assert catalogue.verify(tmp_path / "adopted" / name).ok
    return storage, name


def test_a_dcp_checkpoint(tmp_path: Path) -> None:
    state = whole_state()
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    storage, name = adopted(tmp_path, tmp_path / "dcp")
    assert name == "step-00000040.a0000"
    export.to_torch(storage, name, tmp_path / "x.pt")
    assert same(torch.load(tmp_path / "x.pt", weights_only=True), state)
    target = emptied(state)
    reshard.load(storage, name, target)
    assert same(target, state)


@pytest.mark.slow
def test_a_dcp_checkpoint_that_was_sharded(tmp_path: Path) -> None:
    """Written by a real two-process world through torch itself."""
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(_save_sharded, (2, str(tmp_path / "dcp"), port), nprocs=2)
    storage, name = adopted(tmp_path, tmp_path / "dcp", step=7)
    target = {"w": torch.zeros(7, 5)}
    reshard.load(storage, name, target)
    assert torch.equal(target["w"], torch.arange(35.0).reshape(7, 5))


def _save_sharded(rank: int, world: int, out: str, port: int) -> None:
    from torch.distributed.tensor import Shard

    torch.distributed.init_process_group(
        "gloo", rank=rank, world_size=world, init_method=f"tcp://127.0.0.1:{port}"
    )
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world,))
    dcp.save({"w": spread(torch.arange(35.0).reshape(7, 5), mesh, [Shard(0)])}, checkpoint_id=out)
    torch.distributed.destroy_process_group()


def test_huggingface_folders(saved: Any, tmp_path: Path) -> None:
    storage, name, state = saved
    for limit in (300, 10**9):
        export.to_huggingface(storage, name, tmp_path / f"hf{limit}", max_shard_bytes=limit)
        place, new = adopted(tmp_path / str(limit), tmp_path / f"hf{limit}", step=0)
        target = emptied({"model": {n: t for n, t in state["model"].items() if n != "head.weight"}})
        reshard.load(place, new, target)
        assert all(same(t, state["model"][n]) for n, t in target["model"].items())
    place, new = adopted(tmp_path / "one", tmp_path / f"hf{10**9}" / "model.safetensors", step=3)
    assert new == "step-00000003.a0000"


def test_a_torch_file(tmp_path: Path) -> None:
    state = whole_state()
    torch.save(state, tmp_path / "x.pt")
    storage, name = adopted(tmp_path, tmp_path / "x.pt")
    assert dict(catalogue.read_committed(storage, name).aliases) == {
        "model.head.weight": "model.embed.weight"
    }
    export.to_torch(storage, name, tmp_path / "y.pt")
    assert same(torch.load(tmp_path / "y.pt", weights_only=True), state)


@pytest.mark.parametrize(
    ("rename", "want"),
    [
        ([("module", "model")], {"model": {"a.w": 1.0}, "opt": {"lr": 2.0}}),
        ([("module.a", "model.b")], {"model": {"b": {"w": 1.0}}, "opt": {"lr": 2.0}}),
        ([("", "model")], {"model": {"module": {"a.w": 1.0}, "opt": {"lr": 2.0}}}),
        ([("module", "")], {"a.w": 1.0, "opt": {"lr": 2.0}}),
        ([("mod", "x")], {"module": {"a.w": 1.0}, "opt": {"lr": 2.0}}),
    ],
)
def test_renaming(tmp_path: Path, rename: Any, want: Any) -> None:
    torch.save({"module": {"a.w": torch.tensor(1.0)}, "opt": {"lr": torch.tensor(2.0)}}, tmp_path / "x.pt")
    storage, name = adopted(tmp_path, tmp_path / "x.pt", step=1, rename=rename)
    export.to_torch(storage, name, tmp_path / "y.pt")

    def plain(v: Any) -> Any:
        return {k: plain(x) for k, x in v.items()} if isinstance(v, dict) else v.item()

    assert plain(torch.load(tmp_path / "y.pt", weights_only=True)) == want


def test_a_prefix_within_a_key(tmp_path: Path) -> None:
    torch.save({"model": {"module.layers.0.w": torch.ones(2)}}, tmp_path / "x.pt")
    storage, name = adopted(tmp_path, tmp_path / "x.pt", step=1, rename=[("model.module", "model")])
    target = {"model": {"layers.0.w": torch.zeros(2)}}
    reshard.load(storage, name, target)
    assert target["model"]["layers.0.w"].sum() == 2


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_a_run_goes_on_from_an_adopted_one(tmp_path: Path, own_keepers: Path, kind: str) -> None:
    """The whole way: somebody's training, its checkpoint, our import, and `Checkpointer.restore`."""
    from unbroken import Checkpointer

    def build() -> Any:
        module = torch.nn.Linear(4, 3)
        return module, torch.optim.AdamW(module.parameters(), lr=0.1)

    def step(module: Any, adam: Any) -> None:
        adam.zero_grad()
        module(torch.ones(4)).square().sum().backward()
        adam.step()

    module, adam = build()
    step(module, adam)
    theirs = {"model": module.state_dict(), "optimizer": adam.state_dict(), "step": 1}
    if kind == "dcp":
        dcp.save(theirs, checkpoint_id=tmp_path / "theirs", no_dist=True)
    else:
        torch.save(theirs, tmp_path / "theirs")
    adopted(tmp_path, tmp_path / "theirs", drop=["step"])
    mine, my_adam = build()
    checkpointer = Checkpointer(tmp_path / "adopted")
    found = checkpointer.restore({"model": mine, "optimizer": my_adam})
    checkpointer.close()
    assert (found.step, found.source) == (1, "disk")
    for each in ((module, adam), (mine, my_adam)):
        step(*each)
    assert torch.equal(mine.weight, module.weight)


def test_dropping(tmp_path: Path) -> None:
    tied = torch.ones(3)
    state = {"model": {"a.w": tied, "b.w": tied}, "extra": {"x": torch.zeros(1), "n": 1}, "step": 5}
    torch.save(state, tmp_path / "x.pt")
    storage, name = adopted(tmp_path, tmp_path / "x.pt", drop=["extra", "step", "model.a.w"])
    export.to_torch(storage, name, tmp_path / "y.pt")
    assert same(torch.load(tmp_path / "y.pt", weights_only=True), {"model": {"b.w": tied}})
    with pytest.raises(UsageError, match="nothing is called 'ste'"):
        adopt.import_checkpoint(tmp_path / "x.pt", storage, step=9, drop=["ste"])


class Evil:
    """What a hostile pickle does."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["UNBROKEN_TEST_EVIL"],)


def test_nothing_pickled_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trap = tmp_path / "executed"
    monkeypatch.setenv("UNBROKEN_TEST_EVIL", str(trap))
    torch.save({"w": torch.ones(2), "x": Evil()}, tmp_path / "x.pt")
    with pytest.raises(InputError, match="trust-pickle"):
        adopted(tmp_path, tmp_path / "x.pt", step=1)
    dcp.save({"w": torch.ones(2), "x": 1}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(InputError, match="not trusted"):
        adopted(tmp_path, tmp_path / "dcp", step=1)
    for module, name in [("builtins", "eval"), ("torch", "load"), ("os", "system"), ("torch.hub", "load")]:
        call = b"c" + module.encode() + b"\n" + name.encode() + b"\n(Vx\ntR."
        (tmp_path / "dcp" / ".metadata").write_bytes(call)
        with pytest.raises(InputError, match="not trusted"):
            adopted(tmp_path, tmp_path / "dcp", step=1)
    dcp.save({"w": torch.ones(2), "x": Evil()}, checkpoint_id=tmp_path / "dcp2", no_dist=True)
    with pytest.raises(UnsaveableState, match="trust-pickle"):
        adopted(tmp_path, tmp_path / "dcp2", step=1)
    assert not trap.exists()


def test_what_is_no_checkpoint(saved: Any, tmp_path: Path) -> None:
    storage, name, _ = saved
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "torn.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "a.safetensors").write_bytes(safetensors.torch.save({"a": torch.ones(1)}))
    (tmp_path / "hf" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}')
    for source, error in [
        (tmp_path / "nowhere", InputError),
        (tmp_path / "empty", InputError),
        (tmp_path / "text.pt", InputError),
        (tmp_path / "torn.safetensors", CheckpointCorrupt),
        (tmp_path / "list.pt", InputError),
        (tmp_path / "hf", InputError),
        (tmp_path / "ours" / name, InputError),
    ]:
        with pytest.raises(error):
            adopt.import_checkpoint(source, PosixStorage(tmp_path / "adopted"), step=1)
    torch.save({"w": torch.ones(1)}, tmp_path / "w.pt")
    with pytest.raises(UsageError, match="--step"):
        adopt.import_checkpoint(tmp_path / "w.pt", PosixStorage(tmp_path / "adopted"))
    adopted(tmp_path, tmp_path / "w.pt", step=1)
    with pytest.raises(UsageError, match="there already"):
        adopt.import_checkpoint(tmp_path / "w.pt", PosixStorage(tmp_path / "adopted"), step=1)
    with pytest.raises(UsageError, match="two tensors"):
        torch.save({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "ab.pt")
        adopt.import_checkpoint(tmp_path / "ab.pt", storage, step=2, rename=[("a", "b")])
