"""Loads a checkpoint into another world size, mesh or placement.

`CheckpointReader` serves `torch.distributed.checkpoint.load`, whose planner does the resharding. `load(storage,
name, state)` does the same without any collective, and for placements that torch's planner cannot express. Every
piece comes from bytes whose checksum was verified, and each 16 MiB chunk is read once per worker. Needs torch.
"""

from __future__ import annotations

import io
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ...errors import CheckpointCorrupt, LayoutMismatch
from ...journal.checksummed import digest
from ..catalogue import contents as catalogue
from ..format.manifest import Manifest, PartManifest, Sharding, data_name, item_bytes
from ..format.memory import memory_of
from ..format.sharding import describe
from ..format.shards import Box, TensorShard
from ..format.values import tensor_names, unflatten
from ..storage import open_storage
from ..storage.base import Storage


class VerifiedFile:
    """Reads of one rank's file, by whole chunks, each checked before any of its bytes is used.

    Keeps the last few chunks, so that neighbouring tensors do not read theirs again. For one thread.
    """

    def __init__(
        self, storage: Storage, name: str, part: PartManifest, *, verify: bool, keep: int = 2
    ) -> None:
        self.storage = storage
        self.name = name
        self.file = part.file
        self.verify = verify
        self.keep = keep
        self._chunks: OrderedDict[int, memoryview] = OrderedDict()

    def read_into(self, start: int, into: memoryview) -> None:
        """Fills `into` from byte `start` of the file. Raises CheckpointCorrupt, StorageError."""
        if not self.verify:
            self.storage.read_into(self.name, start, into)
            return
        size = self.file.chunk_bytes
        at = 0
        while at < len(into):
            number, within = divmod(start + at, size)
            room = min(size - within, len(into) - at)
            whole = min(size, self.file.bytes - number * size)
            if within == 0 and room == whole and number not in self._chunks:
                # All of a chunk is wanted: straight to where it belongs, then checked there.
                self.storage.read_into(self.name, number * size, into[at : at + room])
                self._check(number, into[at : at + room])
            else:
                into[at : at + room] = self._chunk(number, whole)[within : within + room]
            at += room

    def _chunk(self, number: int, length: int) -> memoryview:
        if number in self._chunks:
            self._chunks.move_to_end(number)
            return self._chunks[number]
        data = memoryview(bytearray(length))
        self.storage.read_into(self.name, number * self.file.chunk_bytes, data)
        self._check(number, data)
        self._chunks[number] = data
        if len(self._chunks) > self.keep:
            self._chunks.popitem(last=False)
        return data

    def _check(self, number: int, data: memoryview) -> None:
        if digest(data) != self.file.checksums[number]:
            at = number * self.file.chunk_bytes
            raise CheckpointCorrupt(f"bytes {at} and on differ from their checksum", where=self.name)


Wanted = tuple[str, TensorShard, Box, torch.Tensor | Callable[[torch.Tensor], object]]
"""A tensor's name, one of its shards, a box within that shard, and where the box's values go: a tensor of that shape,
or something that takes them."""
_SPLIT = 128 * 2**20
"""Bytes above which one piece is read by several workers."""


class Pieces:
    """The stored pieces of a checkpoint's tensors, read with verification by several threads."""

    def __init__(
        self, storage: Storage, manifest: Manifest, *, verify: bool = True, workers: int = 4
    ) -> None:
        self.storage = storage
        self.manifest = manifest
        self.verify = verify
        self.workers = workers
        self._parts: dict[int, PartManifest] = {}
        self._boxes: dict[str, dict[Box, list[TensorShard]]] = {}
        self._lock = threading.Lock()

    def boxes(self, name: str) -> dict[Box, list[TensorShard]]:
        """Every piece of a tensor, with the shards that hold a copy of it; empty pieces only of empty tensors."""
        if name not in self._boxes:
            record = self.manifest.tensors[name]
            shards = record.shards()
            if record.kind == "local":
                shards = shards[:1]
            found: dict[Box, list[TensorShard]] = {}
            for s in shards:
                if s.elements or not math.prod(record.shape):
                    found.setdefault(s.box, []).append(s)
            self._boxes[name] = found
        return self._boxes[name]

    def fitting(self, name: str, shape: tuple[int, ...]) -> dict[Box, list[TensorShard]]:
        """`boxes` of a tensor that has this global shape here. Raises LayoutMismatch if it has another one.

        Of a tensor that each rank has in a shape of its own, one of this shape: this rank's, else the lowest's.
        """
        record = self.manifest.tensors[name]
        if record.kind == "local":
            same = [s for s in record.shards() if s.sizes == shape]
            if same:
                mine = next((s for s in same if s.rank == _my_rank()), same[0])
                return {mine.box: [mine]}
        elif record.shape == shape:
            return self.boxes(name)
        raise LayoutMismatch(
            f"tensor '{name}' has shape {list(record.shape)} in the checkpoint, {list(shape)} here",
            where=self.manifest.name,
        )

    def read(self, wanted: Iterable[Wanted]) -> None:
        """Reads what is wanted and hands it over, in the order of the files, so that each chunk is read once.

        Raises CheckpointCorrupt, StorageError.
        """
        small = (part for w in wanted for part in self._split(w))
        items = sorted(small, key=lambda w: (w[1].rank, w[1].start, w[2]))
        share = max(1, -(-len(items) // self.workers))
        groups = [items[i : i + share] for i in range(0, len(items), share)]
        if groups:
            with ThreadPoolExecutor(max_workers=len(groups)) as pool:
                for done in [pool.submit(self._read_group, g) for g in groups]:
                    done.result()

    def _split(self, wanted: Wanted) -> Iterator[Wanted]:
        """The same in pieces of whole rows, where it is large and goes straight into a tensor."""
        name, shard, (offsets, sizes), into = wanted
        total = math.prod(sizes) * item_bytes(self.manifest.tensors[name].dtype)
        if not isinstance(into, torch.Tensor) or total <= _SPLIT or not sizes or sizes[0] < 2:
            yield wanted
            return
        step = max(1, sizes[0] * _SPLIT // total)
        for at in range(0, sizes[0], step):
            n = min(step, sizes[0] - at)
            yield name, shard, ((offsets[0] + at, *offsets[1:]), (n, *sizes[1:])), into.narrow(0, at, n)

    def _read_group(self, group: list[Wanted]) -> None:
        file: VerifiedFile | None = None
        rank = -1
        for tensor, shard, box, into in group:
            if file is None or shard.rank != rank:
                rank = shard.rank
                name = f"{self.manifest.name}/{data_name(rank)}"
                file = VerifiedFile(self.storage, name, self._part(rank), verify=self.verify)
            dtype = self.manifest.tensors[tensor].dtype
            if not isinstance(into, torch.Tensor):
                into(read_box(file, shard, dtype, box))
            elif (room := _own_bytes(into, shard, dtype, box)) is not None:
                file.read_into(shard.start + _row_bytes(shard, dtype) * (box[0][0] if box[0] else 0), room)
            else:
                into.copy_(read_box(file, shard, dtype, box))

    def _part(self, rank: int) -> PartManifest:
        with self._lock:
            if rank not in self._parts:
                self._parts[rank] = catalogue.read_part(self.storage, self.manifest, rank)
            return self._parts[rank]


class CheckpointReader(StorageReader):
    """Serves one of our checkpoints to `torch.distributed.checkpoint.load(state, storage_reader=...)`.

    Without `name`, the newest that is whole. `verify` checks the bytes that are read. Tensors that every rank has
    whole come from one of the copies; values (lr, betas, step) from rank 0.
    """

    def __init__(
        self, storage: Storage | str | Path, name: str | None = None, *, verify: bool = True, workers: int = 4
    ) -> None:
        super().__init__()
        place = open_storage(storage) if isinstance(storage, str | Path) else storage
        self.manifest = catalogue.read_committed(place, name) if name else catalogue.newest(place, deep=False)
        self.pieces = Pieces(place, self.manifest, verify=verify, workers=workers)
        self.values = flat_values(self.manifest)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Part of torch's interface; the checkpoint was chosen when the reader was made."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What torch's planner needs: the pieces of every tensor, and the names of all other values."""
        known: dict[str, Any] = {name: BytesStorageMetadata() for name in self.values}
        for name, record in self.manifest.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in self.pieces.boxes(name)]
            properties = TensorProperties(dtype=getattr(torch, record.dtype))
            known[name] = TensorStorageMetadata(properties, torch.Size(record.shape), chunks)
        return Metadata(known)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Part of torch's interface; nothing is left to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Part of torch's interface; the plan is good as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Part of torch's interface; each rank reads what it needs by itself."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads every item of the plan. Raises CheckpointCorrupt, StorageError."""
        wanted: list[Wanted] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                buffer = io.BytesIO()
                torch.save(self.values[item.storage_index.fqn], buffer)
                buffer.seek(0)
                planner.load_bytes(item, buffer)
                continue
            index = item.storage_index
            at = tuple(index.offset or (0,) * len(self.manifest.tensors[index.fqn].shape))
            copies = next(c for (offsets, _), c in self.pieces.boxes(index.fqn).items() if offsets == at)
            box = tuple(item.storage_offsets), tuple(item.lengths)
            wanted.append((index.fqn, _nearest(copies), box, partial(_hand_over, planner, item)))
        self.pieces.read(wanted)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Part of torch's interface: never chosen by an address alone."""
        return False


def load(
    storage: Storage, name: str, state: dict[str, Any], *, verify: bool = True, allow_partial: bool = False
) -> Manifest:
    """Fills `state` in place from checkpoint `name`, whatever world size, mesh and placement either has.

    Nothing is asked of other ranks: each reads what its own tensors need, also those whose local part is not one
    box (which torch's planner cannot express). Values (numbers, text, lists of them) are replaced by rank 0's.
    `manifest.position` says where the data goes on. Raises LayoutMismatch naming the tensors that the checkpoint
    lacks or has in another shape, CheckpointCorrupt, NoCheckpoint, StorageError.
    """
    manifest = catalogue.read_committed(storage, name)
    check_fits(manifest, state, allow_partial=allow_partial)
    pieces = Pieces(storage, manifest, verify=verify)
    flat, _ = flatten_state_dict(state)
    wanted: list[Wanted] = []
    for tensor_name, tensor in flat.items():
        if isinstance(tensor, torch.Tensor) and tensor_name in manifest.tensors:
            sharding, locals_ = describe(tensor, key=tensor_name)
            for box, local in zip(sharding.boxes, locals_, strict=True):
                wanted += _cut(tensor_name, pieces.fitting(tensor_name, sharding.shape), box, local)
    with torch.no_grad():
        pieces.read(wanted)
    holes = dict.fromkeys(tensor_names(manifest.values))
    _fill_values(state, unflatten(manifest.values, holes, where=manifest.name))
    return manifest


def gather(pieces: Pieces, wanted: Mapping[str, Sharding]) -> dict[str, tuple[torch.Tensor, ...]]:
    """New CPU tensors with the values of the checkpoint at the boxes that are wanted, in their order.

    What `restore` lands on another layout than the one that was saved: for each live tensor, its sharding as
    `sharding.describe` gives it. Names that the checkpoint has not are left out. Raises LayoutMismatch for another
    global shape, CheckpointCorrupt, StorageError.
    """
    made: dict[str, tuple[torch.Tensor, ...]] = {}
    jobs: list[Wanted] = []
    for name, sharding in wanted.items():
        record = pieces.manifest.tensors.get(name)
        if record is None:
            continue
        stored = pieces.fitting(name, sharding.shape)
        kind = getattr(torch, record.dtype)
        made[name] = tuple(torch.empty(sizes, dtype=kind) for _, sizes in sharding.boxes)
        for box, local in zip(sharding.boxes, made[name], strict=True):
            jobs += _cut(name, stored, box, local)
    pieces.read(jobs)
    return made


def _cut(
    name: str, stored: Mapping[Box, list[TensorShard]], box: Box, local: torch.Tensor
) -> Iterator[Wanted]:
    """What to read so that `local`, which lies at `box` of the global tensor, is filled."""
    for (offsets, sizes), copies in stored.items():
        low = tuple(map(max, offsets, box[0]))
        high = tuple(min(a + b, c + d) for a, b, c, d in zip(offsets, sizes, *box, strict=True))
        if any(a >= b for a, b in zip(low, high, strict=True)):
            continue
        into = local
        for d, (a, b) in enumerate(zip(low, high, strict=True)):
            into = into.narrow(d, a - box[0][d], b - a)
        within = tuple(a - o for a, o in zip(low, offsets, strict=True))
        yield (
            name,
            _nearest(copies),
            (within, tuple(b - a for a, b in zip(low, high, strict=True))),
            into,
        )


def _nearest(copies: list[TensorShard]) -> TensorShard:
    """One of several copies: another one for each reading process, so that no file is everyone's."""
    return copies[_my_rank() % len(copies)]


def _my_rank() -> int:
    dist = torch.distributed
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _hand_over(planner: LoadPlanner, item: ReadItem, source: torch.Tensor) -> None:
    target = planner.resolve_tensor(item).detach()
    target.copy_(source)
    planner.commit_tensor(item, target)


def _fill_values(state: Any, saved: Any) -> None:
    """Replaces in `state`, at every key that it has, what is no tensor."""
    keys = state.keys() if isinstance(state, dict) else range(len(state))
    for k in list(keys):
        if (isinstance(saved, dict) and k not in saved) or (isinstance(saved, list) and k >= len(saved)):
            continue
        mine, theirs = state[k], saved[k]
        if isinstance(mine, torch.Tensor):
            continue
        if type(mine) is type(theirs) and isinstance(mine, dict | list) and _holds_tensor(mine):
            _fill_values(mine, theirs)
        else:
            state[k] = theirs


def _holds_tensor(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(isinstance(v, torch.Tensor) or _holds_tensor(v) for v in inner)


def check_fits(manifest: Manifest, state: Mapping[str, Any], *, allow_partial: bool = False) -> None:
    """Raises LayoutMismatch unless the checkpoint has every tensor of `state`, in its global shape."""
    flat, _ = flatten_state_dict(dict(state))
    wanted = {k: v for k, v in flat.items() if isinstance(v, torch.Tensor)}
    lacks = sorted(set(wanted) - set(manifest.tensors))
    if lacks and not allow_partial:
        more = f" and {len(lacks) - 3} more" if len(lacks) > 3 else ""
        raise LayoutMismatch(
            f"the checkpoint has no tensor '{', '.join(lacks[:3])}'{more}",
            where=manifest.name,
            hint="Build the state as it was saved, or load a part of it (allow_partial)",
        )
    for name, tensor in wanted.items():
        record = manifest.tensors.get(name)
        if record is not None and record.kind != "local" and record.shape != tuple(tensor.shape):
            raise LayoutMismatch(
                f"tensor '{name}' has shape {list(record.shape)} in the checkpoint, {list(tensor.shape)} here",
                where=manifest.name,
            )


def flat_values(manifest: Manifest) -> dict[str, Any]:
    """The values that are no tensors, by torch's flattened names ("optimizer.param_groups.0.lr")."""
    holes = {name: torch.empty(0) for name in tensor_names(manifest.values)}
    state = unflatten(manifest.values, holes, where=manifest.name)
    if not isinstance(state, dict):
        return {}
    flat, _ = flatten_state_dict(state)
    return {k: v for k, v in flat.items() if not isinstance(v, torch.Tensor)}


def _row_bytes(shard: TensorShard, dtype: str) -> int:
    return math.prod(shard.sizes[1:]) * item_bytes(dtype)


def _own_bytes(into: torch.Tensor, shard: TensorShard, dtype: str, box: Box) -> memoryview | None:
    """The tensor's memory, where the bytes of the file can go straight into it: on the CPU, whole rows, same type."""
    plain = into.device.type == "cpu" and into.is_contiguous() and into.dtype == getattr(torch, dtype)
    if not plain or not into.numel() or box[1][1:] != shard.sizes[1:]:
        return None
    return memory_of(into.detach())


def read_box(file: VerifiedFile, shard: TensorShard, dtype: str, box: Box) -> torch.Tensor:
    """A CPU tensor with the part `box` (offsets within the shard, sizes) of a stored shard.

    Of the file only the rows between the first and the last that are wanted are read.
    """
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    whole: tuple[int, ...]
    offsets, sizes = box
    kind = getattr(torch, dtype)
    if not math.prod(sizes):
        return torch.empty(sizes, dtype=kind)
    whole = shard.sizes
    if not sizes:
        offsets, sizes, whole = (0,), (1,), (1,)
    row = _row_bytes(shard, dtype)
    data = bytearray(sizes[0] * row)
    file.read_into(shard.start + offsets[0] * row, memoryview(data))
    rows = torch.frombuffer(data, dtype=torch.uint8).view(kind).reshape((sizes[0], *whole[1:]))
    for d in range(1, len(sizes)):
        rows = rows.narrow(d, offsets[d], sizes[d])
    return rows.reshape(box[1])
