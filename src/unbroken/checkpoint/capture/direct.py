"""A checkpoint written straight from tensors, without a keeper: for imports, tools and tests. Needs torch."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError
from ...journal.checksummed import digest
from ...progress.records.candidate import folder_name
from ...version import __version__
from ..format import layout as arena
from ..format.manifest import (
    CHUNK_BYTES,
    COMMITTED,
    MANIFEST,
    Committed,
    FileRecord,
    Manifest,
    PartManifest,
    Sharding,
    data_name,
    merge,
    part_name,
    stored_name,
    tensor_part,
)
from ..format.memory import memory_of
from ..format.position import Position
from ..format.sharding import describe
from ..format.values import encode, flatten
from ..storage.base import Storage
from ..storage.pages import scratch_pages

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Stamp:
    """Which save this is."""

    run_id: str
    attempt: int
    step: int
    rank: int = 0
    world_size: int = 1
    position: Position = field(default_factory=Position)
    went_on: tuple[int, int] | None = None
    """(attempt, step) of what the attempt had restored."""

    @property
    def folder(self) -> str:
        return folder_name(self.step, self.attempt)


def write_rank(storage: Storage, state: object, stamp: Stamp, *, rng: object = None) -> PartManifest:
    """Writes one rank's file and part; durable when it returns, committed only by `commit`.

    Raises UnsaveableState for what cannot be saved exactly, StorageError.
    """
    import torch

    tensors, skeleton = flatten(state, lambda v: isinstance(v, torch.Tensor))
    return write_tensors(storage, tensors, skeleton, stamp, rng=encode(rng))


def write_tensors(
    storage: Storage, tensors: Mapping[str, torch.Tensor], values: Any, stamp: Stamp, *, rng: Any = None
) -> PartManifest:
    """As `write_rank`, for a state that is already flat."""
    own, aliases = find_tied(tensors)
    described = {name: describe(t, key=name) for name, t in own.items()}
    records = {n: (str(own[n].dtype), sharding) for n, (sharding, _) in described.items()}
    pieces = {stored_name(n, i): p for n, (_, ps) in described.items() for i, p in enumerate(ps)}
    return write_pieces(storage, records, pieces.__getitem__, values, stamp, aliases=aliases, rng=rng)


def write_pieces(
    storage: Storage,
    records: Mapping[str, tuple[str, Sharding]],
    piece: Callable[[str], torch.Tensor],
    values: Any,
    stamp: Stamp,
    *,
    aliases: Mapping[str, str] | None = None,
    rng: Any = None,
) -> PartManifest:
    """Writes one rank's file and part from pieces that are asked for one at a time, in the order of the file.

    `records` {name: (torch type, sharding)}; `piece(stored name)` gives the tensor, which is let go afterwards.
    """
    import torch

    specs = [
        arena.spec(stored_name(n, i), dtype, sizes)
        for n, (dtype, sharding) in records.items()
        for i, (_, sizes) in enumerate(sharding.boxes)
    ]
    plan = arena.plan(specs, aliases)
    tensors = {
        n: tensor_part(stamp.rank, plan, n, dtype, sharding) for n, (dtype, sharding) in records.items()
    }
    sums: list[str] = []
    where = f"{stamp.folder}/{data_name(stamp.rank)}"
    storage.write(where, _summed(_chunks(plan, piece, stamp), sums), plan.file_bytes)
    part = PartManifest(
        stamp.run_id, stamp.attempt, stamp.step, stamp.rank, stamp.world_size, tensors,
        FileRecord(data_name(stamp.rank), plan.file_bytes, tuple(sums)), stamp.position, dict(aliases or {}), values,
        rng,
        {"unbroken": __version__, "torch": str(torch.__version__), "python": platform.python_version()}, time.time(),
        went_on=stamp.went_on,
    )  # fmt: skip
    storage.put(f"{stamp.folder}/{part_name(stamp.rank)}", part.encoded)
    return part


def commit(storage: Storage, parts: list[PartManifest], *, node: str = "") -> Manifest:
    """Merges the parts of all ranks and commits. Raises CheckpointCorrupt if they do not fit, CheckpointError if
    this checkpoint is committed already."""
    manifest = merge(sorted(parts, key=lambda p: p.rank))
    storage.put(f"{manifest.name}/{MANIFEST}", manifest.encoded)
    marker = Committed.of(manifest, node=node, time=time.time()).encoded
    if not storage.create(f"{manifest.name}/{COMMITTED}", marker):
        raise CheckpointError("it is committed already", where=f"{storage.url}/{manifest.name}")
    return manifest


def find_tied(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors without doubles, and {other name: first name} of those that are the same memory."""
    own: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, t in tensors.items():
        local = t.to_local() if hasattr(t, "to_local") else t
        if hasattr(local, "local_shards") or not local.numel() or local.layout.__str__() != "torch.strided":
            own[name] = t
            continue
        placed = tuple(map(str, getattr(t, "placements", ())))
        same = (local.data_ptr(), local.dtype, tuple(local.shape), local.stride(), str(local.device), placed)
        if first.setdefault(same, name) == name:
            own[name] = t
        else:
            aliases[name] = first[same]
    return own, aliases


def plain_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in row-major order; without a copy where it lies so already on the CPU."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    return memory_of(flat)


def chunked(blocks: Iterable[bytes | memoryview], size: int = CHUNK_BYTES) -> Iterator[memoryview]:
    """The same bytes in pieces of `size`, each in memory of its own (a storage has several under way at once)."""
    out, filled = scratch_pages(size), 0
    for block in blocks:
        view, at = memoryview(block).cast("B"), 0
        while at < len(view):
            n = min(size - filled, len(view) - at)
            out[filled : filled + n] = view[at : at + n]
            filled, at = filled + n, at + n
            if filled == size:
                yield out
                out, filled = scratch_pages(size), 0
    if filled:
        yield out[:filled]


def _chunks(plan: arena.Layout, piece: Callable[[str], torch.Tensor], stamp: Stamp) -> Iterator[memoryview]:
    said = {"step": stamp.step, "attempt": stamp.attempt, "rank": stamp.rank, "world_size": stamp.world_size}

    def blocks() -> Iterator[bytes | memoryview]:
        yield plan.header({k: str(v) for k, v in said.items()})
        for slot in plan.slots:
            data = plain_bytes(piece(slot.name))
            if len(data) != slot.bytes:
                raise CheckpointError(
                    f"tensor '{slot.name}' has {len(data)} bytes, {slot.bytes} were expected"
                )
            yield data

    return chunked(blocks())


def _summed(chunks: Iterator[memoryview], sums: list[str]) -> Iterator[memoryview]:
    for chunk in chunks:
        sums.append(digest(chunk))
        yield chunk
