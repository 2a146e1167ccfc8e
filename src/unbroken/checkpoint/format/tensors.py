"""One tensor in a checkpoint: a rank's share of it (in the part), and all ranks' (in the manifest). No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import add, gt
from typing import Any, NamedTuple

from ...errors import CheckpointCorrupt
from .dtypes import ITEM_BYTES, carrier, known_torch
from .layout import Layout
from .shards import Box, ShardRun, TensorShard, gap_in_runs


@dataclass(frozen=True)
class Sharding:
    """How a tensor is spread: global shape, DTensor placements ("Shard(0)", "Replicate()"), mesh, this rank's boxes."""

    shape: tuple[int, ...]
    placements: tuple[str, ...] = ()
    mesh: tuple[int, ...] = ()
    mesh_names: tuple[str, ...] = ()
    boxes: tuple[Box, ...] = ()

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Sharding:
        """A tensor that this rank holds entirely (not a DTensor)."""
        shape = tuple(map(int, shape))
        return cls(shape, boxes=(((0,) * len(shape), shape),))


class TensorPart(NamedTuple):
    """One rank's share of one tensor; `dtype` is torch's name ("bfloat16"), `shape` the global one."""

    dtype: str
    shape: tuple[int, ...]
    placements: tuple[str, ...]
    mesh: tuple[int, ...]
    mesh_names: tuple[str, ...]
    shards: tuple[TensorShard, ...]

    def bytes_of(self, shard: TensorShard) -> int:
        """The length of this shard in the file."""
        return shard.elements * item_bytes(self.dtype)


@cache
def item_bytes(torch_dtype: str) -> int:
    """Bytes of one element of this torch type as it is stored."""
    how = carrier(torch_dtype)
    return ITEM_BYTES[how.dtype] * (how.split or 1)


def tensor_part(rank: int, layout: Layout, name: str, torch_dtype: str, sharding: Sharding) -> TensorPart:
    """The record of tensor `name`, whose boxes lie in `layout` as `stored_name(name, i)`, in this order."""
    shards = tuple(
        TensorShard(rank, offsets, sizes, layout.span(stored_name(name, i))[0], stored_name(name, i))
        for i, (offsets, sizes) in enumerate(sharding.boxes)
    )
    dtype = torch_dtype.removeprefix("torch.")
    return TensorPart(dtype, sharding.shape, sharding.placements, sharding.mesh, sharding.mesh_names, shards)


def stored_name(name: str, i: int) -> str:
    """The name in the file of a tensor's i-th piece on one rank."""
    return name if i == 0 else f"{name}#{i}"


@dataclass(frozen=True)
class TensorRecord:
    """A tensor over all ranks. `kind`: sharded (pieces tile `shape`), replicated (each holder has it whole), or
    local (each rank its own, of its own shape; `shape` is the lowest rank's)."""

    dtype: str
    shape: tuple[int, ...]
    kind: str
    placements: tuple[str, ...]
    mesh: tuple[int, ...]
    mesh_names: tuple[str, ...]
    runs: tuple[ShardRun, ...]

    def shards(self) -> list[TensorShard]:
        """Every rank's pieces, by rank."""
        return [s for r in self.runs for s in r.shards()]

    @property
    def total_bytes(self) -> int:
        """Of the whole tensor, once."""
        return math.prod(self.shape) * item_bytes(self.dtype)


def part_json(t: TensorPart, name: str) -> list[object]:
    """[type, shape, placements, mesh, mesh names, shards [offsets, sizes, start, name if another]]."""
    shards = [[s.offsets, s.sizes, s.start, "" if s.stored == name else s.stored] for s in t.shards]
    return [t.dtype, t.shape, t.placements, t.mesh, t.mesh_names, shards]


Head = tuple[str, tuple[int, ...], tuple[str, ...], tuple[int, ...], tuple[str, ...]]
"""Type, global shape, placements, mesh and the mesh's names: as a rule the same on every rank."""
Heads = dict[str, tuple[list[object], Head]]
"""The heads read last, by the tensor's name: as they were written, and checked."""


def part_from_json(name: str, value: Any, rank: int, size: int, where: str, heads: Heads) -> TensorPart:
    """Reads `part_json` of tensor `name`, in a file of `size` bytes; raises CheckpointCorrupt.

    A head that was checked for the rank before is not checked again.
    """
    # Plain unpacking, not Fields: a large run has millions of these.
    try:
        *raw, shards_ = value
        known = heads.get(name)
        if known is None or known[0] != raw:
            dtype, shape_, placements, mesh, mesh_names = raw
            known = heads[name] = raw, _head(dtype, _naturals(shape_), placements, mesh, mesh_names)
        head = known[1]
        shape = head[1]
        item = item_bytes(head[0])
        shards = []
        for offsets_, sizes_, start, stored in shards_:
            offsets, sizes = _naturals(offsets_), _naturals(sizes_)
            if len(offsets) != len(shape) or len(sizes) != len(shape):
                raise ValueError("a shard has another number of dimensions than its tensor")
            if any(map(gt, map(add, offsets, sizes), shape)):
                raise ValueError("a shard lies outside of its tensor")
            if type(start) is not int or not 0 <= start <= start + math.prod(sizes) * item <= size:
                raise ValueError("a shard lies outside of its file")
            if type(stored) is not str:
                raise ValueError("a shard's name is not text")
            shards.append(TensorShard(rank, offsets, sizes, start, stored or name))
    except (ValueError, TypeError) as e:
        raise CheckpointCorrupt(
            f"the entry of tensor '{name}' is malformed: {e}"[:300], where=where
        ) from None
    return TensorPart(*head, tuple(shards))


def _head(
    dtype: object, shape: tuple[int, ...], placements: object, mesh: object, mesh_names: object
) -> Head:
    """The checked head of a tensor's entry; raises ValueError."""
    if type(dtype) is not str or not known_torch(dtype):
        raise ValueError(f"unknown type {dtype!r}")
    held = _naturals(mesh)
    if len(shape) > 64 or not isinstance(placements, list) or len(placements) != len(held):
        raise ValueError("its placements do not fit its mesh")
    if not isinstance(mesh_names, list) or not all(type(n) is str for n in [*placements, *mesh_names]):
        raise ValueError("its placements are not text")
    return dtype, shape, tuple(placements), held, tuple(mesh_names)


def _naturals(value: object) -> tuple[int, ...]:
    """The list as natural numbers; raises ValueError for anything else."""
    if type(value) is list:
        for n in value:
            if type(n) is not int or not 0 <= n < 2**63:
                break
        else:
            return tuple(value)
    raise ValueError("natural numbers were expected")


def record_json(t: TensorRecord) -> list[object]:
    """[type, shape, placements, mesh, mesh names, kind, runs]."""
    runs = [r.as_json() for r in t.runs]
    return [t.dtype, t.shape, t.placements, t.mesh, t.mesh_names, t.kind, runs]


def record_from_json(name: str, value: Any, lengths: Sequence[int], where: str) -> TensorRecord:
    """Reads `record_json`; `lengths` are those of the ranks' files. Raises CheckpointCorrupt."""
    where = f"{where}, tensor '{name}'"[:300]
    try:
        dtype, shape, placements, mesh, mesh_names, kind, runs_ = value
        head = _head(dtype, _naturals(shape), placements, mesh, mesh_names)
    except (ValueError, TypeError) as e:
        raise CheckpointCorrupt(f"its entry is malformed: {e}"[:300], where=where) from None
    if kind not in ("sharded", "replicated", "local") or not isinstance(runs_, list):
        raise CheckpointCorrupt("its entry is malformed", where=where)
    ndim = None if kind == "local" else len(head[1])
    runs = tuple(ShardRun.from_json(r, ndim, len(lengths), where) for r in runs_)
    record = TensorRecord(head[0], head[1], kind, *head[2:], runs)
    check_tiles(name, record, where)
    for r in runs:
        longest = r.start + math.prod(r.sizes) * item_bytes(record.dtype)
        if any(lengths[rank] < longest for rank in range(r.rank, r.rank + r.count)):
            raise CheckpointCorrupt("a shard lies outside of its file", where=where)
    return record


def check_tiles(name: str, record: TensorRecord, where: str) -> None:
    """Raises CheckpointCorrupt unless the shards tile the tensor (one that is local has nothing to tile)."""
    if not record.runs:
        raise CheckpointCorrupt(f"no rank holds tensor '{name}'"[:300], where=where)
    if record.kind == "local":
        return
    if why := gap_in_runs(record.shape, record.runs):
        raise CheckpointCorrupt(f"tensor '{name}': {why}"[:400], where=where)
