"""A checkpoint loads into any other world size, mesh and placement, bit for bit. One process plays every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from unbroken.checkpoint.capture import direct
from unbroken.checkpoint.catalogue import contents as catalogue
from unbroken.checkpoint.format import sharding
from unbroken.checkpoint.format.position import Position
from unbroken.checkpoint.format.shards import Box, gap_in
from unbroken.checkpoint.restore import reshard
from unbroken.checkpoint.storage.posix import PosixStorage
from unbroken.errors import CheckpointCorrupt, LayoutMismatch, UnsaveableState

MESHES = [(1,), (2,), (3,), (2, 2), (3, 2), (5,), (1, 4)]


@contextmanager
def as_rank(rank: int, mesh_shape: tuple[int, ...]) -> Iterator[Any]:
    """This process as one rank of a world of that mesh; no other process is there, and none is asked."""
    world = torch.Size(mesh_shape).numel()
    if dist.is_initialized():  # a trainer of another test in this process has left its own
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp")[: len(mesh_shape)])
    finally:
        dist.destroy_process_group()


def placements(choice: int, mesh_shape: tuple[int, ...], ndim: int) -> list[Any]:
    """One of the placements that make sense for this mesh and number of dimensions."""
    last = ndim - 1
    one = [[Shard(0)], [Replicate()], [Shard(last)]]
    two = [
        [Shard(0), Replicate()],
        [Shard(0), Shard(0)],
        [Shard(0), Shard(last)],
        [_StridedShard(0, split_factor=mesh_shape[-1]), Shard(0)],
        [Shard(0), _StridedShard(0, split_factor=2)],
        [Replicate(), Shard(last)],
    ]
    options = one if len(mesh_shape) == 1 else two
    return options[choice % len(options)]


def boxes_of(
    shape: Sequence[int], places: Sequence[Any], mesh: Sequence[int], coordinate: Sequence[int]
) -> list[Box]:
    """What the rank at this coordinate of the mesh holds."""
    texts = tuple(map(str, places))
    found = sharding._laid_out(tuple(shape), texts, tuple(places), tuple(mesh), None, tuple(coordinate))
    return list(found[0].boxes)


def spread(full: torch.Tensor, mesh: Any, places: list[Any]) -> DTensor:
    """This rank's share of `full` as a DTensor."""
    boxes = boxes_of(full.shape, places, mesh.shape, mesh.get_coordinate())
    pieces = [full[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))] for box in boxes]
    # Several boxes lie along one dimension here; joined they are this rank's local tensor.
    local = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return DTensor.from_local(local, mesh, places, run_check=False, shape=full.shape, stride=full.stride())


def save(
    root: Path, full: dict[str, torch.Tensor], mesh_shape: tuple[int, ...], choice: int, step: int = 4
) -> str:
    """Writes a checkpoint of these tensors, spread over a mesh; its name."""
    storage, parts = PosixStorage(root), []
    world = torch.Size(mesh_shape).numel()
    for rank in range(world):
        with as_rank(rank, mesh_shape) as mesh:
            model = {n: spread(t, mesh, placements(choice, mesh_shape, t.dim())) for n, t in full.items()}
            state = {"model": model, "plain": torch.arange(5) * 3, "lr": 0.25, "step": step}
            position = Position(1, ((0, 64),), ((100, 108),))
            parts.append(direct.write_rank(storage, state, direct.Stamp("r", 1, step, rank, world, position)))
    return direct.commit(storage, parts).name


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    shapes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3),
    old=st.sampled_from(MESHES), new=st.sampled_from(MESHES), choices=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    split=st.sampled_from([8, 2**27]),
)  # fmt: skip
def test_any_layout_loads_into_any_other(
    tmp_path_factory: Any,
    shapes: list[tuple[int, ...]],
    old: tuple[int, ...],
    new: tuple[int, ...],
    choices: Any,
    split: int,
) -> None:
    root = tmp_path_factory.mktemp("reshard")
    full = {f"w{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    name = save(root, full, old, choices[0])
    for rank in range(torch.Size(new).numel()):
        with as_rank(rank, new) as mesh:
            places = {n: placements(choices[1], new, t.dim()) for n, t in full.items()}
            wanted = {n: spread(t, mesh, places[n]) for n, t in full.items()}
            model = {n: DTensor.from_local(torch.zeros_like(t.to_local()), mesh, t.placements, run_check=False,
                                           shape=t.shape, stride=t.stride()) for n, t in wanted.items()}  # fmt: skip
            state: dict[str, Any] = {
                "model": model,
                "plain": torch.zeros(5, dtype=torch.int64),
                "lr": 0.0,
                "step": 0,
            }
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(reshard, "_SPLIT", split)
                manifest = reshard.load(PosixStorage(root), name, state)
            for n, t in wanted.items():
                assert torch.equal(model[n].to_local(), t.to_local()), (n, places[n])
            if all(len(sharding.describe(t, key=n)[1]) == 1 for n, t in model.items()):
                for t in model.values():
                    t.to_local().zero_()
                dcp.load({"model": model}, storage_reader=reshard.CheckpointReader(root, name), no_dist=True)
                assert all(torch.equal(model[n].to_local(), t.to_local()) for n, t in wanted.items())
            assert torch.equal(state["plain"], torch.arange(5) * 3)
            assert (state["lr"], state["step"]) == (0.25, 4)
            assert manifest.position == Position(1, ((0, 64),), ((100, 108),))


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 11), min_size=1, max_size=3).map(tuple),
    mesh=st.sampled_from([m for m in MESHES if len(m) == 2]), choice=st.integers(0, 5),
)  # fmt: skip
def test_the_boxes_of_all_ranks_tile_the_tensor(
    shape: tuple[int, ...], mesh: tuple[int, int], choice: int
) -> None:
    places = placements(choice, mesh, len(shape))
    boxes = [
        b for i in range(mesh[0]) for j in range(mesh[1]) for b in boxes_of(shape, places, mesh, (i, j))
    ]  # fmt: skip
    assert gap_in(shape, boxes) is None


def test_boxes_agree_with_torch(tmp_path: Path) -> None:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for shape in [(7, 3), (8, 4), (2, 9), (1,), (13,)]:
        for rank in range(6):
            with as_rank(rank, (3, 2)) as mesh:
                for places in (
                    [Shard(0), Shard(0)],
                    [Shard(0), Shard(len(shape) - 1)],
                    [Replicate(), Shard(0)],
                ):
                    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, places)
                    (box,) = boxes_of(shape, places, (3, 2), mesh.get_coordinate())
                    assert box[1] == tuple(sizes)
                    if all(sizes):
                        assert box[0] == tuple(offsets)


def test_gathering_gives_the_pieces_of_another_layout(tmp_path: Path) -> None:
    full = {"w": torch.randn(7, 3), "v": torch.randn(5)}
    name = save(tmp_path, full, (3,), 0)
    storage = PosixStorage(tmp_path)
    pieces = reshard.Pieces(storage, catalogue.read_committed(storage, name))
    for rank in range(4):
        with as_rank(rank, (2, 2)) as mesh:
            live = {n: spread(t, mesh, placements(1, (2, 2), t.dim())) for n, t in full.items()}
            described = {f"model.{n}": sharding.describe(t, key=n) for n, t in live.items()}
        got = reshard.gather(
            pieces, {n: d for n, (d, _) in described.items()} | {"new": sharding.Sharding((2,))}
        )
        assert got.keys() == described.keys()
        for n, (_, parts) in described.items():
            assert all(torch.equal(a, b) for a, b in zip(got[n], parts, strict=True))
    with pytest.raises(LayoutMismatch, match=r"model\.w"):
        reshard.gather(pieces, {"model.w": sharding.Sharding((7, 4))})


def test_a_tensor_of_another_shape_on_each_rank(tmp_path: Path) -> None:
    storage, parts = PosixStorage(tmp_path), []
    for rank in range(3):
        state = {"own": torch.full((rank + 2,), float(rank))}
        parts.append(direct.write_rank(storage, state, direct.Stamp("r", 1, 4, rank, 3)))
    name = direct.commit(storage, parts).name
    for rank in range(3):
        state = {"own": torch.zeros(rank + 2)}
        reshard.load(storage, name, state)
        assert torch.equal(state["own"], torch.full((rank + 2,), float(rank)))
    with pytest.raises(LayoutMismatch, match="own"):
        reshard.load(storage, name, {"own": torch.zeros(9)})


def test_a_flipped_bit_is_found_before_it_is_used(tmp_path: Path) -> None:
    name = save(tmp_path, {"w": torch.ones(64, 4)}, (2,), 0)
    file = tmp_path / name / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 0x40
    file.write_bytes(data)
    state = {"model": {"w": torch.zeros(64, 4)}}
    with pytest.raises(CheckpointCorrupt, match="checksum"):
        reshard.load(PosixStorage(tmp_path), name, state)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    name = save(tmp_path, {"w": torch.ones(6, 4)}, (2,), 0)
    with pytest.raises(LayoutMismatch, match=r"model\.v"):
        reshard.load(PosixStorage(tmp_path), name, {"model": {"w": torch.zeros(6, 4), "v": torch.zeros(2)}})
    with pytest.raises(LayoutMismatch, match=r"\[6, 4\] in the checkpoint, \[6, 5\] here"):
        reshard.load(PosixStorage(tmp_path), name, {"model": {"w": torch.zeros(6, 5)}})
    state = {"model": {"w": torch.zeros(6, 4), "v": torch.zeros(2)}}
    reshard.load(PosixStorage(tmp_path), name, state, allow_partial=True)
    assert state["model"]["w"].sum() == 24


def test_a_rank_outside_of_the_mesh_and_partial_sums() -> None:
    from torch.distributed.tensor import Partial

    with as_rank(0, (2,)) as mesh, pytest.raises(UnsaveableState, match="partial sum"):
        sharding.describe(DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False), key="x")


class Wrapper(torch.Tensor):
    """As fp8 wrappers are: a tensor that hides its scale."""


def test_a_wrapper_tensor_is_refused_by_name() -> None:
    with pytest.raises(UnsaveableState, match=r"model\.fp8"):
        sharding.describe(torch.ones(2).as_subclass(Wrapper), key="model.fp8")


def _train_and_save(rank: int, world: int, root: str, port: int) -> None:
    """A process of a real gloo world: FSDP2-like shards, saved by each rank, committed by rank 0."""
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"tcp://127.0.0.1:{port}")
    mesh = init_device_mesh("cpu", (world,))
    model = {"w": spread(torch.arange(35.0).reshape(7, 5), mesh, [Shard(0)])}
    state = {"w": spread(torch.zeros(7, 5), mesh, [Shard(0)])}
    dcp.load({"model": state}, storage_reader=reshard.CheckpointReader(root))
    assert torch.equal(state["w"].to_local(), model["w"].to_local()), rank
    dist.destroy_process_group()


@pytest.mark.slow
def test_dcp_load_with_its_collectives(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.arange(35.0).reshape(7, 5)}, (2, 2), 3)
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(_train_and_save, (2, str(tmp_path), port), nprocs=2)
