"""Choosing what to go on from, on all ranks alike, and landing its bytes: from memory, a peer, or the disk.

The candidates are tried newest first. Every rank verifies its own share and votes; the first one that verifies on
every rank is taken, by all. No byte of it reaches the live state before the vote. Needs torch.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import CheckpointCorrupt, CheckpointError, NoCheckpoint, UnbrokenError
from ...journal.checksummed import digest, encode_checked
from ...progress.records.candidate import Candidate, folder_name
from ...units import plural
from ..catalogue import contents as catalogue
from ..client.links import RankLink
from ..client.rank_buffer import RankBuffer
from ..client.rank_memory import RankMemory
from ..device.targets import typed_view
from ..format.manifest import CHUNK_BYTES, FileRecord, PartManifest, Sharding, TensorPart, data_name
from ..format.memory import memory_of
from ..format.position import Position
from ..keeper.buffers.holdings import SnapshotId
from ..ranks.agreement import VOTE_TIMEOUT_S, Agreement, vote
from ..storage.base import Storage
from .apply import Stored

logger = logging.getLogger("unbroken.checkpoint")

Beside = Callable[[RankBuffer | None], AbstractContextManager[object]]
"""What to do with a landing buffer while its bytes arrive."""


@dataclass(frozen=True)
class Restored:
    """What the state goes on from.

    `source` is where this rank's share came from: memory, peer, disk or remote; the ranks of a run may differ in it.
    `durable` tells whether it is a committed checkpoint, the same on every rank. `skipped` lists newer checkpoints
    that were passed over, each with the reason. `position` is the global data position.
    """

    step: int
    attempt: int
    name: str
    source: str
    position: Position
    skipped: tuple[tuple[str, str], ...] = ()
    resharded: bool = False
    seconds: float = 0.0
    durable: bool = False


@dataclass(eq=False)
class Loaded:
    """One rank's share, verified, in memory that lasts as long as this does."""

    part: PartManifest
    data: torch.Tensor
    source: str
    buffer: RankBuffer | None = None
    keep: Any = None

    def tensors(self) -> dict[str, Stored]:
        """Its tensors by name, aliases included."""
        found = {}
        for name, t in self.part.tensors.items():
            dtype = getattr(torch, t.dtype)
            pieces = tuple(
                typed_view(self.data[s.start : s.start + t.bytes_of(s)], dtype, s.sizes) for s in t.shards
            )
            found[name] = Stored(name, t.dtype, sharding_from(t), pieces)
        for alias, name in self.part.aliases.items():
            found[alias] = found[name]
        return found


def sharding_from(t: TensorPart) -> Sharding:
    """The sharding that a part records."""
    return Sharding(t.shape, t.placements, t.mesh, t.mesh_names, tuple(s.box for s in t.shards))


def candidates_without_supervisor(
    agreement: Agreement, link: RankLink, storage: Storage, node: str
) -> tuple[list[Candidate], list[tuple[str, str]]]:
    """What rank 0 makes of its listing of the folder and of every keeper's inventory; the same on all ranks.

    Also the folders that were passed over, with the reason.
    """
    mine = link.request({"op": "inventory"})[0]["inventory"]
    agreement.publish(f"inventory/{agreement.rank}", {"node": node, "holds": mine})
    if agreement.rank == 0:
        holders: dict[SnapshotId, dict[int, str]] = {}
        worlds: dict[SnapshotId, int] = {}
        for r in range(agreement.world_size):
            theirs = agreement.read(f"inventory/{r}", timeout_s=VOTE_TIMEOUT_S)
            for h in theirs["holds"]:
                snapshot_id = SnapshotId(h["attempt"], h["step"])
                holders.setdefault(snapshot_id, {}).setdefault(h["rank"], theirs["node"])
                worlds[snapshot_id] = h["world_size"]
        candidates: dict[SnapshotId, Candidate] = {}
        damaged = []
        for f in catalogue.listing(storage):
            if f.committed:
                snapshot_id = SnapshotId(f.attempt, f.step)
                candidates[snapshot_id] = Candidate(
                    f.attempt, f.step, f.name, holders.get(snapshot_id, {}), world_size=f.world_size
                )
            elif f.status != "incomplete":
                damaged.append(f)
        for snapshot_id, held in holders.items():
            if (
                snapshot_id not in candidates
                and set(held) == set(range(agreement.world_size))
                and worlds[snapshot_id] == len(held)
            ):
                name = folder_name(snapshot_id.step, snapshot_id.attempt)
                candidates[snapshot_id] = Candidate(
                    *snapshot_id, name, held, on_disk=False, world_size=worlds[snapshot_id]
                )
        ordered = [candidates[m] for m in sorted(candidates, reverse=True)]
        for f in damaged:
            if not ordered or SnapshotId(f.attempt, f.step) > (ordered[0].attempt, ordered[0].step):
                logger.warning("passing over %s: %s", f.name, f.why)
        agreement.publish(
            "offers",
            {
                "offers": [
                    [o.attempt, o.step, o.name, o.on_disk, o.world_size, sorted(o.memory.items())]
                    for o in ordered
                ],
                "skipped": [(f.name, f.why) for f in damaged],
            },
        )
    agreed = agreement.read("offers", timeout_s=VOTE_TIMEOUT_S)
    agreed_candidates = [
        Candidate(a, s, n, dict(map(tuple, m)), on_disk=d, world_size=w)
        for a, s, n, d, w, m in agreed["offers"]
    ]
    return agreed_candidates, [(n, why) for n, why in agreed["skipped"]]


def choose(
    agreement: Agreement,
    candidates: list[Candidate],
    obtain: Any,
    skipped: list[tuple[str, str]],
    round_name: str,
) -> tuple[Candidate, Any] | None:
    """The first candidate that `obtain(candidate)` gives on every rank, and what it gave here. `skipped` gets the others."""
    for i, candidate in enumerate(candidates):
        key = f"{round_name}/{i}"
        got, why = None, ""
        try:
            got = obtain(candidate)
        except (UnbrokenError, OSError) as e:
            why = e.message if isinstance(e, UnbrokenError) else str(e)
            logger.warning("%s does not verify on rank %d: %s", candidate.name, agreement.rank, e)
        reasons = vote(agreement, key, why)
        if not reasons:
            return candidate, got
        del got
        skipped.append((candidate.name, reasons[0]))
        if agreement.rank == 0:
            logger.warning("passing over %s: %s", candidate.name, reasons[0])
    return None


def load_from_memory(memory: RankMemory, candidate: Candidate, rank: int, beside: Beside) -> Loaded | None:
    """This rank's share out of the keeper's memory, None if it is not there.

    `beside` is called with the buffer and runs while the bytes are verified. Raises CheckpointCorrupt if they are
    not those that were finalized.
    """
    link = memory.alive()
    answer, fds = link.request(
        {"op": "fetch", "attempt": candidate.attempt, "step": candidate.step, "rank": rank}
    )
    if not answer["found"]:
        return None
    (fd,) = fds
    size = int(answer["file_bytes"])
    part = part_in_memory(answer["part"], rank, size)
    keep: Any = None
    if answer["peer"]:
        try:
            keep = mmap.mmap(fd, int(answer["bytes"]))
        finally:
            os.close(fd)
        data, buffer = torch.frombuffer(keep, dtype=torch.uint8), None
    else:
        content = {
            "attempt": candidate.attempt, "step": candidate.step, "file_bytes": size, "world_size": answer["world_size"],
            "part": answer["part"], "persist": False, "complete": True,
        }  # fmt: skip
        buffer = memory.map_buffer(int(answer["buffer"]), fd, int(answer["bytes"]), content)
        data = buffer.tensor
    with beside(buffer):
        if answer["checksums"] is not None:
            check_chunks(memory_of(data)[:size], tuple(answer["checksums"]), where=f"memory, rank {rank}")
    source = "peer" if answer["peer"] or answer.get("ahead") else "memory"
    return Loaded(part, data[:size], source, buffer, keep)


def load_from_peer(
    memory: RankMemory, candidate: Candidate, rank: int, beside: Beside, address: str
) -> Loaded | None:
    """As `load_from_memory`, after the keeper has fetched the snapshot from another node's. Raises KeeperRefused."""
    memory.alive().request(
        {"op": "pull", "attempt": candidate.attempt, "step": candidate.step, "address": address},
        timeout_s=VOTE_TIMEOUT_S,
    )
    loaded = load_from_memory(memory, candidate, rank, beside)
    if loaded is not None:
        loaded.source = "peer"
    return loaded


def part_in_memory(body: Mapping[str, Any], rank: int, size: int) -> PartManifest:
    """A part as it is before its file is written: without checksums."""
    record = FileRecord(data_name(rank), size, ("0" * 16,) * -(-size // CHUNK_BYTES))
    data = encode_checked("unbroken.checkpoint.part", {**body, "file": record.as_json()})
    return PartManifest.decode(data, where=f"memory, rank {rank}")


def check_chunks(view: memoryview, sums: tuple[str, ...], *, where: str, workers: int = 4) -> None:
    """Raises CheckpointCorrupt unless every chunk has its checksum."""
    if len(sums) != -(-len(view) // CHUNK_BYTES):
        raise CheckpointCorrupt("the checksums do not fit the length", where=where)

    def good(i: int) -> bool:
        return digest(view[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES]) == sums[i]

    with ThreadPoolExecutor(workers) as pool:
        bad = [i for i, ok in enumerate(pool.map(good, range(len(sums)))) if not ok]
    if bad:
        raise CheckpointCorrupt(
            f"bytes {bad[0] * CHUNK_BYTES} and on differ from their checksum", where=where
        )


def load_from_disk(
    storage: Storage,
    name: str,
    rank: int,
    *,
    buffer_for: Callable[[int], RankBuffer | None] = lambda size: None,
    beside: Beside = lambda buffer: nullcontext(),
    verify: bool = True,
    workers: int = 4,
) -> Loaded:
    """This rank's share of a committed checkpoint, each chunk verified as it arrives.

    `buffer_for` may give a buffer for it. Raises CheckpointCorrupt, NoCheckpoint, StorageError.
    """
    manifest = catalogue.read_committed(storage, name)
    if rank >= manifest.world_size:
        raise NoCheckpoint(f"it has {plural(manifest.world_size, 'rank')}", where=name)
    part = catalogue.read_part(storage, manifest, rank)
    path = f"{name}/{data_name(rank)}"
    try:
        size = storage.size(path)
    except FileNotFoundError:
        raise CheckpointCorrupt("the file is missing", where=path) from None
    if size != part.file.bytes:
        raise CheckpointCorrupt(f"it has {size} bytes, {part.file.bytes} were committed", where=path)
    catalogue.check_against_header(part, catalogue.read_header(storage, path, size), where=path)
    buffer = buffer_for(size)
    loaded = Loaded(part, buffer.tensor[:size] if buffer else _whole_pages(size), storage.level, buffer)
    whole = memory_of(loaded.data)

    def fetch(i: int) -> bool:
        start = i * part.file.chunk_bytes
        view = whole[start : min(start + part.file.chunk_bytes, size)]
        storage.read_into(path, start, view, once=True)
        return not verify or digest(view) == part.file.checksums[i]

    with beside(buffer), ThreadPoolExecutor(workers) as pool:
        bad = [i for i, ok in enumerate(pool.map(fetch, range(len(part.file.checksums)))) if not ok]
    if bad:
        raise CheckpointCorrupt(
            f"bytes {bad[0] * part.file.chunk_bytes} and on differ from their checksum", where=path
        )
    return loaded


def _whole_pages(size: int) -> torch.Tensor:
    """Memory that begins at a page, as reading past the page cache wants it, and that a fork does not copy meanwhile."""
    return torch.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=torch.uint8)[:size]


def nothing_good(skipped: list[tuple[str, str]], where: str) -> CheckpointError:
    """There are checkpoints, and none of them verifies: starting afresh in silence would lose the run."""
    why = "; ".join(f"{n}: {w}" for n, w in skipped[:5])
    return NoCheckpoint(
        f"checkpoints are there, but none of them verifies: {why}",
        where=where,
        hint="Look at them with `unbroken checkpoint verify`; to start afresh, use another folder",
    )
