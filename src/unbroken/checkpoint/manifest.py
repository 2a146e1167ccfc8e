"""What a checkpoint says of itself: each rank's part, the merged manifest, and the marker that makes it count.

    COMMITTED ──checksum──> manifest.json ──checksum──> rank-00000.json ──checksums──> rank-00000.safetensors

So one small file, created exclusively and last, vouches for every byte, and nothing torn, flipped or mixed from
two saves ever passes. All of them are sealed JSON (sealed.py). What differs from rank to rank (RNG, chunk
checksums, values) stays in the parts, so that the manifest stays small at thousands of ranks. No torch here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..errors import CheckpointCorrupt
from .dtypes import ITEM_BYTES, carrier, known_torch
from .layout import Layout
from .position import Position
from .position import merged as merged_position
from .sealed import Fields, digest, seal, unseal
from .shards import Box, Run, RunBuilder, Shard, gap_in_runs

MANIFEST = "manifest.json"
COMMITTED = "COMMITTED"
CHUNK_BYTES = 16 * 2**20
ALGORITHM = "xxh3_64"
MAX_WORLD = 2**20
_FOLDER = re.compile(r"step-(\d{8,18})\.a(\d{4,9})")


def folder_name(step: int, attempt: int) -> str:
    """The name of the folder that an attempt writes a step's checkpoint to."""
    return f"step-{step:08d}.a{attempt:04d}"


def parse_folder_name(name: str) -> tuple[int, int] | None:
    """(step, attempt) of a checkpoint's folder, or None for any other name."""
    m = _FOLDER.fullmatch(name)
    return (int(m[1]), int(m[2])) if m and folder_name(int(m[1]), int(m[2])) == name else None


def data_name(rank: int) -> str:
    """The name of a rank's tensors."""
    return f"rank-{rank:05d}.safetensors"


def part_name(rank: int) -> str:
    """The name of a rank's part of the manifest."""
    return f"rank-{rank:05d}.json"


@dataclass(frozen=True)
class FileRecord:
    """A rank's data file: its exact length and the checksum of each chunk, counted from the file's beginning."""

    name: str
    bytes: int
    checksums: tuple[str, ...]
    chunk_bytes: int = CHUNK_BYTES
    algorithm: str = ALGORITHM

    def as_json(self) -> dict[str, Any]:
        """Its place in the part; the checksums as one string, 16 hex digits each."""
        return {
            "name": self.name,
            "bytes": self.bytes,
            "algorithm": self.algorithm,
            "chunk_bytes": self.chunk_bytes,
            "checksums": "".join(self.checksums),
        }

    @classmethod
    def from_json(cls, f: Fields) -> FileRecord:
        """Reads `as_json`; raises CheckpointCorrupt, also for a checksum algorithm that is not known."""
        size, chunk, joined = f.natural("bytes"), f.natural("chunk_bytes"), f.text("checksums")
        if f.text("algorithm") != ALGORITHM or chunk < 1:
            raise CheckpointCorrupt("its checksums are of an unknown kind", where=f.where)
        if len(joined) != 16 * -(-size // chunk) or re.fullmatch("[0-9a-f]*", joined) is None:
            raise CheckpointCorrupt("its checksums do not fit its length", where=f.where)
        sums = tuple(joined[i : i + 16] for i in range(0, len(joined), 16))
        return cls(f.text("name"), size, sums, chunk)


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


@dataclass(frozen=True)
class TensorPart:
    """One rank's share of one tensor; `dtype` is torch's name ("bfloat16"), `shape` the global one."""

    dtype: str
    shape: tuple[int, ...]
    placements: tuple[str, ...]
    mesh: tuple[int, ...]
    mesh_names: tuple[str, ...]
    shards: tuple[Shard, ...]

    def bytes_of(self, shard: Shard) -> int:
        """The length of this shard in the file."""
        return shard.elements * item_bytes(self.dtype)


def item_bytes(torch_dtype: str) -> int:
    """Bytes of one element of this torch type as it is stored."""
    how = carrier(torch_dtype)
    return ITEM_BYTES[how.dtype] * (how.split or 1)


def tensor_part(rank: int, layout: Layout, name: str, torch_dtype: str, sharding: Sharding) -> TensorPart:
    """The record of tensor `name`, whose boxes lie in `layout` as `stored_name(name, i)`, in this order."""
    shards = tuple(
        Shard(rank, offsets, sizes, layout.span(stored_name(name, i))[0], stored_name(name, i))
        for i, (offsets, sizes) in enumerate(sharding.boxes)
    )
    dtype = torch_dtype.removeprefix("torch.")
    return TensorPart(dtype, sharding.shape, sharding.placements, sharding.mesh, sharding.mesh_names, shards)


def stored_name(name: str, i: int) -> str:
    """The name in the file of a tensor's i-th piece on one rank."""
    return name if i == 0 else f"{name}#{i}"


@dataclass(frozen=True)
class PartManifest:
    """What one rank saved. `values` and `rng` are plain JSON (values.py encodes what JSON does not know)."""

    run_id: str
    attempt: int
    step: int
    rank: int
    world_size: int
    tensors: Mapping[str, TensorPart]
    file: FileRecord
    position: Position = field(default_factory=Position)
    aliases: Mapping[str, str] = field(default_factory=dict)
    values: Any = None
    rng: Any = None
    versions: Mapping[str, str] = field(default_factory=dict)
    time: float = 0.0
    check: str = field(default="", compare=False)  # checksum of the bytes that it was decoded from

    @cached_property
    def encoded(self) -> bytes:
        """The content of `part_name(rank)`; the same bytes after decoding and encoding again."""
        return seal(
            "unbroken.checkpoint.part",
            {
                "run_id": self.run_id,
                "attempt": self.attempt,
                "step": self.step,
                "rank": self.rank,
                "world_size": self.world_size,
                "tensors": {n: _part_json(t, n) for n, t in self.tensors.items()},
                "aliases": dict(self.aliases),
                "file": self.file.as_json(),
                "position": self.position.as_json(),
                "values": self.values,
                "rng": self.rng,
                "versions": dict(self.versions),
                "time": self.time,
            },
        )

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> PartManifest:
        """Reads a part; raises CheckpointCorrupt or CheckpointTooNew."""
        f = unseal(data, "unbroken.checkpoint.part", where=where)
        rank, world = f.natural("rank"), f.natural("world_size")
        if not rank < world <= MAX_WORLD:
            raise CheckpointCorrupt(f"rank {rank} of {world} cannot be", where=where)
        file = FileRecord.from_json(f.fields("file"))
        if file.name != data_name(rank):
            raise CheckpointCorrupt(f"rank {rank} names the file '{file.name}'"[:300], where=where)
        records = f.table("tensors")
        tensors = {n: _part_from_json(n, v, rank, world, file.bytes, where) for n, v in records.items()}
        aliases = f.text_map("aliases")
        if wrong := [a for a, n in aliases.items() if n not in tensors or a in tensors]:
            raise CheckpointCorrupt(f"alias '{wrong[0]}' does not fit the tensors"[:300], where=where)
        return cls(
            f.text("run_id"), f.natural("attempt"), f.natural("step"), rank, world, tensors, file,
            Position.from_json(f.value.get("position"), where), aliases, f.value.get("values"),
            f.value.get("rng"), f.text_map("versions"), f.number("time"), digest(data),
        )  # fmt: skip


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
    runs: tuple[Run, ...]

    def shards(self) -> list[Shard]:
        """Every rank's pieces, by rank."""
        return [s for r in self.runs for s in r.shards()]

    @property
    def total_bytes(self) -> int:
        """Of the whole tensor, once."""
        return math.prod(self.shape) * item_bytes(self.dtype)


@dataclass(frozen=True)
class PartRecord:
    """What the manifest says of rank i (its place in the list): its part's checksum and its data's length."""

    check: str
    data_bytes: int


@dataclass(frozen=True)
class Manifest:
    """A whole checkpoint, merged. `values` are rank 0's; every rank's own are in its part."""

    run_id: str
    attempt: int
    step: int
    world_size: int
    tensors: Mapping[str, TensorRecord]
    aliases: Mapping[str, str]
    parts: tuple[PartRecord, ...]
    position: Position
    values: Any
    versions: Mapping[str, str]
    time: float

    @property
    def name(self) -> str:
        return folder_name(self.step, self.attempt)

    @property
    def data_bytes(self) -> int:
        """Of all data files."""
        return sum(p.data_bytes for p in self.parts)

    @cached_property
    def encoded(self) -> bytes:
        """The content of `MANIFEST`; the same bytes after decoding and encoding again."""
        return seal(
            "unbroken.checkpoint",
            {
                "run_id": self.run_id,
                "attempt": self.attempt,
                "step": self.step,
                "world_size": self.world_size,
                "tensors": {n: _record_json(t) for n, t in self.tensors.items()},
                "aliases": dict(self.aliases),
                "parts": [[p.check, p.data_bytes] for p in self.parts],
                "position": self.position.as_json(),
                "values": self.values,
                "versions": dict(self.versions),
                "time": self.time,
            },
        )

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> Manifest:
        """Reads a manifest; raises CheckpointCorrupt (also if shards do not tile) or CheckpointTooNew."""
        f = unseal(data, "unbroken.checkpoint", where=where)
        world = f.natural("world_size")
        parts = tuple(_part_record(p, where) for p in f.items("parts"))
        if not 1 <= world <= MAX_WORLD or len(parts) != world:
            raise CheckpointCorrupt(f"it lists {len(parts)} of {world} ranks", where=where)
        tensors = {n: _record_from_json(n, v, parts, where) for n, v in f.table("tensors").items()}
        return cls(
            f.text("run_id"), f.natural("attempt"), f.natural("step"), world, tensors, f.text_map("aliases"),
            parts, Position.from_json(f.value.get("position"), where), f.value.get("values"),
            f.text_map("versions"), f.number("time"),
        )  # fmt: skip

    def check_part(self, part: PartManifest, data: bytes) -> None:
        """Raises CheckpointCorrupt unless these bytes are the very part that was merged."""
        where = part_name(part.rank)
        if (part.step, part.attempt, part.world_size) != (self.step, self.attempt, self.world_size):
            raise CheckpointCorrupt("the part is of another save", where=where)
        if self.parts[part.rank] != PartRecord(digest(data), part.file.bytes):
            raise CheckpointCorrupt("the part differs from the one that was committed", where=where)


def merge(parts: Iterable[PartManifest]) -> Manifest:
    """The manifest of a checkpoint from the parts of ranks 0, 1, .. in this order (a generator will do).

    Raises CheckpointCorrupt if a rank is missing or doubled, if the parts are of different saves, or if the
    shards of a tensor do not tile it.
    """
    first: PartManifest | None = None
    heads: dict[str, TensorPart] = {}
    local: set[str] = set()
    runs: dict[str, RunBuilder] = {}
    aliases: dict[str, str] = {}
    untied: set[str] = set()
    records, positions, newest = [], [], 0.0
    for rank, part in enumerate(parts):
        first = first or part
        where = part_name(part.rank)
        if part.rank != rank:
            raise CheckpointCorrupt(f"rank {rank} is missing or doubled", where=where)
        for key in ("run_id", "attempt", "step", "world_size"):
            mine, theirs = getattr(part, key), getattr(first, key)
            if mine != theirs:
                raise CheckpointCorrupt(f"{key} is {mine}, rank 0 has {theirs}", where=where)
        # An alias has the shards of the tensor that it stands for, so that readers need no rule of their own.
        for name, target in [*((n, n) for n in part.tensors), *part.aliases.items()]:
            tensor = part.tensors[target]
            head = heads.setdefault(name, tensor)
            if tensor.dtype != head.dtype or tensor.placements != head.placements:
                raise CheckpointCorrupt(f"the ranks disagree on the type of tensor '{name}'", where=where)
            if tensor.shape != head.shape:
                if tensor.placements:
                    raise CheckpointCorrupt(
                        f"the ranks disagree on the shape of tensor '{name}'", where=where
                    )
                local.add(name)
            builder = runs.setdefault(name, RunBuilder())
            for shard in tensor.shards:
                builder.add(shard)
            if name == target or aliases.setdefault(name, target) != target:
                untied.add(name)
        records.append(PartRecord(part.check or digest(part.encoded), part.file.bytes))
        positions.append(part.position)
        newest = max(newest, part.time)
    if first is None:
        raise CheckpointCorrupt("there is no part at all")
    if len(records) != first.world_size:
        raise CheckpointCorrupt(
            f"{len(records)} of {first.world_size} ranks are there", where=part_name(len(records))
        )
    tensors = {}
    for name, head in heads.items():
        kind = "local" if name in local else "sharded" if head.placements else "replicated"
        record = TensorRecord(
            head.dtype, head.shape, kind, head.placements, head.mesh, head.mesh_names, runs[name].finish()
        )
        _check_tiles(name, record, MANIFEST)
        tensors[name] = record
    ties = {a: n for a, n in aliases.items() if a not in untied}
    where = folder_name(first.step, first.attempt)
    return Manifest(
        first.run_id, first.attempt, first.step, first.world_size, tensors, ties, tuple(records),
        merged_position(positions, where=where), first.values, first.versions, newest,
    )  # fmt: skip


@dataclass(frozen=True)
class Committed:
    """The marker: that this very manifest counts. `node` and `time` (Unix seconds) say who committed and when."""

    attempt: int
    step: int
    manifest_bytes: int
    manifest_check: str
    node: str = ""
    time: float = 0.0

    @classmethod
    def of(cls, manifest: Manifest, *, node: str = "", time: float = 0.0) -> Committed:
        """The marker for this manifest, written as `manifest.encoded`."""
        data = manifest.encoded
        return cls(manifest.attempt, manifest.step, len(data), digest(data), node, time)

    @property
    def encoded(self) -> bytes:
        """The content of `COMMITTED`."""
        return seal(
            "unbroken.checkpoint.committed",
            {
                "attempt": self.attempt,
                "step": self.step,
                "manifest": {"bytes": self.manifest_bytes, "check": self.manifest_check},
                "node": self.node,
                "time": self.time,
            },
        )

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> Committed:
        """Reads a marker; raises CheckpointCorrupt or CheckpointTooNew."""
        f = unseal(data, "unbroken.checkpoint.committed", where=where)
        m = f.fields("manifest")
        return cls(
            f.natural("attempt"), f.natural("step"), m.natural("bytes"), m.text("check"), f.text("node"),
            f.number("time"),
        )  # fmt: skip

    def admit(self, manifest_data: bytes, *, where: str) -> Manifest:
        """The manifest in these bytes; raises CheckpointCorrupt unless they are the ones that were committed."""
        if len(manifest_data) != self.manifest_bytes or digest(manifest_data) != self.manifest_check:
            raise CheckpointCorrupt("the manifest is not the one that was committed", where=where)
        manifest = Manifest.decode(manifest_data, where=where)
        if (manifest.step, manifest.attempt) != (self.step, self.attempt):
            raise CheckpointCorrupt("the marker is of another save", where=where)
        return manifest


def _part_json(t: TensorPart, name: str) -> list[object]:
    shards = [[s.offsets, s.sizes, s.start, "" if s.stored == name else s.stored] for s in t.shards]
    return [t.dtype, t.shape, t.placements, t.mesh, t.mesh_names, shards]


def _part_from_json(name: str, value: Any, rank: int, world: int, size: int, where: str) -> TensorPart:
    # Plain unpacking, not Fields: a large run has millions of these.
    try:
        dtype, shape_, placements, mesh, mesh_names, shards_ = value
        shape = _naturals(shape_)
        head = _head(dtype, shape, placements, mesh, mesh_names)
        item = item_bytes(dtype)
        shards = []
        for offsets_, sizes_, start, stored in shards_:
            offsets, sizes = _naturals(offsets_), _naturals(sizes_)
            if len(offsets) != len(shape) or len(sizes) != len(shape):
                raise ValueError("a shard has another number of dimensions than its tensor")
            if any(map(lambda o, n, full: o + n > full, offsets, sizes, shape)):
                raise ValueError("a shard lies outside of its tensor")
            if type(start) is not int or not 0 <= start <= start + math.prod(sizes) * item <= size:
                raise ValueError("a shard lies outside of its file")
            if type(stored) is not str:
                raise ValueError("a shard's name is not text")
            shards.append(Shard(rank, offsets, sizes, start, stored or name))
    except (ValueError, TypeError) as e:
        raise CheckpointCorrupt(
            f"the entry of tensor '{name}' is malformed: {e}"[:300], where=where
        ) from None
    return TensorPart(*head, tuple(shards))


def _head(
    dtype: object, shape: tuple[int, ...], placements: object, mesh: object, mesh_names: object
) -> tuple[str, tuple[int, ...], tuple[str, ...], tuple[int, ...], tuple[str, ...]]:
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


def _record_json(t: TensorRecord) -> list[object]:
    runs = [r.as_json() for r in t.runs]
    return [t.dtype, t.shape, t.placements, t.mesh, t.mesh_names, t.kind, runs]


def _record_from_json(name: str, value: Any, parts: tuple[PartRecord, ...], where: str) -> TensorRecord:
    where = f"{where}, tensor '{name}'"[:300]
    try:
        dtype, shape, placements, mesh, mesh_names, kind, runs_ = value
        head = _head(dtype, _naturals(shape), placements, mesh, mesh_names)
    except (ValueError, TypeError) as e:
        raise CheckpointCorrupt(f"its entry is malformed: {e}"[:300], where=where) from None
    if kind not in ("sharded", "replicated", "local") or not isinstance(runs_, list):
        raise CheckpointCorrupt("its entry is malformed", where=where)
    ndim = None if kind == "local" else len(head[1])
    runs = tuple(Run.from_json(r, ndim, len(parts), where) for r in runs_)
    record = TensorRecord(head[0], head[1], kind, *head[2:], runs)
    _check_tiles(name, record, where)
    for r in runs:
        longest = r.start + math.prod(r.sizes) * item_bytes(record.dtype)
        if any(parts[rank].data_bytes < longest for rank in range(r.rank, r.rank + r.count)):
            raise CheckpointCorrupt("a shard lies outside of its file", where=where)
    return record


def _check_tiles(name: str, record: TensorRecord, where: str) -> None:
    if not record.runs:
        raise CheckpointCorrupt(f"no rank holds tensor '{name}'"[:300], where=where)
    if record.kind == "local":
        return
    if why := gap_in_runs(record.shape, record.runs):
        raise CheckpointCorrupt(f"tensor '{name}': {why}"[:400], where=where)


def _part_record(value: object, where: str) -> PartRecord:
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not isinstance(value[0], str)
        or type(value[1]) is not int
        or not 0 <= value[1] < 2**63
    ):
        raise CheckpointCorrupt("a part's entry is malformed", where=where)
    return PartRecord(value[0], value[1])
