"""What a checkpoint says of itself: each rank's part, the merged manifest, and the marker that makes it count.

    COMMITTED ──checksum──> manifest.json ──checksum──> rank-00000.json ──checksums──> rank-00000.safetensors

So one small file, created exclusively and last, vouches for every byte, and nothing torn, flipped or mixed from
two saves ever passes. All of them are checksummed JSON (journal/checksummed.py). What differs from rank to rank (RNG, chunk
checksums, values) stays in the parts, so that the manifest stays small at thousands of ranks. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...errors import CheckpointCorrupt
from ...journal.checksummed import Fields, decode_checked, digest, encode_checked
from ...progress.records.candidate import folder_name
from .position import Position, read_position
from .position import merged as merged_position
from .replicas import joined_json, read_joined
from .shards import RunBuilder
from .tensors import (
    Heads,
    Sharding,
    TensorPart,
    TensorRecord,
    check_tiles,
    item_bytes,
    part_from_json,
    part_json,
    record_from_json,
    record_json,
    stored_name,
    tensor_part,
)

__all__ = [
    "ALGORITHM", "CHUNK_BYTES", "COMMITTED", "MANIFEST", "Committed", "FileRecord", "Manifest", "PartManifest",
    "PartRecord", "Sharding", "TensorPart", "TensorRecord", "data_name", "item_bytes", "merge",
    "part_name", "stored_name", "tensor_part",
]  # fmt: skip

MANIFEST = "manifest.json"
COMMITTED = "COMMITTED"
CHUNK_BYTES = 16 * 2**20
ALGORITHM = "xxh3_64"
MAX_WORLD = 2**20


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
    replicas: str = ""
    """Digests of what other ranks hold too, 16 characters a tensor in the order of `tensors` (replicas.py); "" for none."""
    went_on: tuple[int, int] | None = None
    """(attempt, step) of what its attempt had restored; None where that was nothing, or is not known."""
    check: str = field(default="", compare=False)  # checksum of the bytes that it was decoded from

    @cached_property
    def encoded(self) -> bytes:
        """The content of `part_name(rank)`; the same bytes after decoding and encoding again."""
        return encode_checked(
            "unbroken.checkpoint.part",
            {
                "run_id": self.run_id,
                "attempt": self.attempt,
                "step": self.step,
                "rank": self.rank,
                "world_size": self.world_size,
                "tensors": {n: part_json(t, n) for n, t in self.tensors.items()},
                "aliases": dict(self.aliases),
                "file": self.file.as_json(),
                "position": self.position.as_json(),
                "values": self.values,
                "rng": self.rng,
                "versions": dict(self.versions),
                "time": self.time,
                **({"replicas": joined_json(self.replicas)} if self.replicas else {}),
                **({"went_on": list(self.went_on)} if self.went_on else {}),
            },
        )

    @classmethod
    def decode(cls, data: bytes, *, where: str, heads: Heads | None = None) -> PartManifest:
        """Reads a part; raises CheckpointCorrupt or CheckpointTooNew.

        Who reads the parts of many ranks passes one `heads`: what all ranks say alike is then checked once.
        """
        heads = {} if heads is None else heads
        f = decode_checked(data, "unbroken.checkpoint.part", where=where)
        rank, world = f.natural("rank"), f.natural("world_size")
        if not rank < world <= MAX_WORLD:
            raise CheckpointCorrupt(f"rank {rank} of {world} cannot be", where=where)
        file = FileRecord.from_json(f.fields("file"))
        if file.name != data_name(rank):
            raise CheckpointCorrupt(f"rank {rank} names the file '{file.name}'"[:300], where=where)
        records = f.table("tensors")
        tensors = {n: part_from_json(n, v, rank, file.bytes, where, heads) for n, v in records.items()}
        aliases = f.text_map("aliases")
        if wrong := [a for a, n in aliases.items() if n not in tensors or a in tensors]:
            raise CheckpointCorrupt(f"alias '{wrong[0]}' does not fit the tensors"[:300], where=where)
        return cls(
            f.text("run_id"), f.natural("attempt"), f.natural("step"), rank, world, tensors, file,
            read_position(f.value.get("position"), where), aliases, f.value.get("values"),
            f.value.get("rng"), f.text_map("versions"), f.number("time"),
            read_joined(f.value.get("replicas"), len(tensors)), _read_went_on(f), digest(data),
        )  # fmt: skip


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
    went_on: tuple[int, int] | None = None
    """(attempt, step) of what its attempt had restored; None where that was nothing, or is not known."""

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
        return encode_checked(
            "unbroken.checkpoint",
            {
                "run_id": self.run_id,
                "attempt": self.attempt,
                "step": self.step,
                "world_size": self.world_size,
                "tensors": {n: record_json(t) for n, t in self.tensors.items()},
                "aliases": dict(self.aliases),
                "parts": [[p.check, p.data_bytes] for p in self.parts],
                "position": self.position.as_json(),
                "values": self.values,
                "versions": dict(self.versions),
                "time": self.time,
                **({"went_on": list(self.went_on)} if self.went_on else {}),
            },
        )

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> Manifest:
        """Reads a manifest; raises CheckpointCorrupt (also if shards do not tile) or CheckpointTooNew."""
        f = decode_checked(data, "unbroken.checkpoint", where=where)
        world = f.natural("world_size")
        parts = tuple(_part_record(p, where) for p in f.items("parts"))
        if not 1 <= world <= MAX_WORLD or len(parts) != world:
            raise CheckpointCorrupt(f"it lists {len(parts)} of {world} ranks", where=where)
        lengths = [p.data_bytes for p in parts]
        tensors = {n: record_from_json(n, v, lengths, where) for n, v in f.table("tensors").items()}
        return cls(
            f.text("run_id"), f.natural("attempt"), f.natural("step"), world, tensors, f.text_map("aliases"),
            parts, read_position(f.value.get("position"), where), f.value.get("values"),
            f.text_map("versions"), f.number("time"), _read_went_on(f),
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
            head = heads.get(name)
            if head is None:
                head = heads[name] = tensor
                runs[name] = RunBuilder()
            if tensor.dtype != head.dtype or tensor.placements != head.placements:
                raise CheckpointCorrupt(f"the ranks disagree on the type of tensor '{name}'", where=where)
            if tensor.shape != head.shape:
                if tensor.placements:
                    raise CheckpointCorrupt(
                        f"the ranks disagree on the shape of tensor '{name}'", where=where
                    )
                local.add(name)
            builder = runs[name]
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
        check_tiles(name, record, MANIFEST)
        tensors[name] = record
    ties = {a: n for a, n in aliases.items() if a not in untied}
    where = folder_name(first.step, first.attempt)
    return Manifest(
        first.run_id, first.attempt, first.step, first.world_size, tensors, ties, tuple(records),
        merged_position(positions, where=where), first.values, first.versions, newest,
        first.went_on,
    )  # fmt: skip


def _read_went_on(f: Fields) -> tuple[int, int] | None:
    value = f.value.get("went_on")
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n >= 0 for n in value):
        raise CheckpointCorrupt("'went_on' is no [attempt, step]", where=f.where)
    return value[0], value[1]


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
        return encode_checked(
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
        f = decode_checked(data, "unbroken.checkpoint.committed", where=where)
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
