"""From a finalized snapshot in memory to a committed checkpoint: one rank's file, its part, and the marker.

Each keeper writes its own ranks' files. The one of rank 0 merges the manifest and creates the marker as soon as every part is
there, or another one where it does not; no keeper waits for another's answer, and no collective is involved. A rank that cannot be written
leaves `rank-00003.failed`, and its note again as `rank-00000.failed`: keepers that do not commit look for that name and for the marker
alone, so that every node knows at once and no folder is listed by all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ....errors import CheckpointCorrupt, StorageError
from ....journal.checksummed import digest, encode_checked
from ....progress.records.candidate import folder_name
from ...format.manifest import (
    CHUNK_BYTES,
    COMMITTED,
    MANIFEST,
    Committed,
    FileRecord,
    PartManifest,
    data_name,
    merge,
    part_name,
)
from ...format.replicas import ReplicaComparison, Replicas
from ...format.tensors import Heads
from ...storage.base import Storage
from ..buffers.holdings import Snapshot, SnapshotId

Gate = Callable[[], None]
"""Called before anything is written; waits while the lease has expired, raises Abandoned when it is over."""


class Abandoned(Exception):
    """Writing this snapshot is no longer allowed (sealed attempt, end of the keeper)."""


@dataclass(frozen=True)
class RankFailed(Exception):
    """A rank's share could not be written."""

    rank: int
    why: str
    hopeless: bool = True
    """Trying again cannot help: it was not the storage that refused."""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.why}"


def name_of_failure_mark(rank: int) -> str:
    """The name of the note that a rank's share could not be written."""
    return f"rank-{rank:05d}.failed"


def gated(view: memoryview, gate: Gate) -> Iterator[memoryview]:
    """The file in chunks, asking the gate before each."""
    for start in range(0, len(view), CHUNK_BYTES):
        gate()
        yield view[start : start + CHUNK_BYTES]


def write_part(
    storage: Storage, snapshot: Snapshot, view: memoryview, gate: Gate, pool: ThreadPoolExecutor
) -> FileRecord:
    """Makes one rank's file and part durable; the record of the file.

    The checksums are taken by another thread meanwhile. Raises StorageError as the storage does, Abandoned from
    the gate, CheckpointCorrupt if the snapshot in memory is no more what it was when it was finalized.
    """
    folder, rank = folder_name(snapshot.snapshot_id.step, snapshot.snapshot_id.attempt), snapshot.rank
    gate()
    summing = pool.submit(chunk_digests, view)
    storage.write(f"{folder}/{data_name(rank)}", gated(view, gate), len(view))
    sums = summing.result()
    if snapshot.checksums is not None and sums != snapshot.checksums:
        raise CheckpointCorrupt("the snapshot changed in memory after it was taken", where=f"rank {rank}")
    record = FileRecord(data_name(rank), len(view), sums)
    gate()
    part = encode_checked("unbroken.checkpoint.part", {**snapshot.part, "file": record.as_json()})
    storage.put(f"{folder}/{part_name(rank)}", part)
    return record


def chunk_digests(view: memoryview, gate: Gate = lambda: None) -> tuple[str, ...]:
    """The checksum of each chunk of a file that lies in memory. Raises Abandoned from the gate."""
    return tuple(digest(chunk) for chunk in gated(view, gate))


def note_failure(storage: Storage, snapshot: Snapshot, why: str, *, hopeless: bool = True) -> None:
    """Leaves a note for the other nodes; the storage that failed may well refuse this too."""
    failed = RankFailed(snapshot.rank, why[:500], hopeless)
    _put_note(storage, snapshot.snapshot_id, snapshot.rank, failed)
    relay_failure(storage, snapshot.snapshot_id, failed)


def relay_failure(storage: Storage, snapshot_id: SnapshotId, failed: RankFailed) -> None:
    """Repeats another rank's note where every keeper looks. Best effort, as the note itself."""
    if failed.rank != 0:
        _put_note(storage, snapshot_id, 0, failed)


def _put_note(storage: Storage, snapshot_id: SnapshotId, of: int, failed: RankFailed) -> None:
    folder = folder_name(snapshot_id.step, snapshot_id.attempt)
    note = {"why": failed.why, "hopeless": failed.hopeless, "rank": failed.rank}
    try:
        storage.put(f"{folder}/{name_of_failure_mark(of)}", json.dumps(note).encode())
    except StorageError:
        return


@dataclass(frozen=True)
class CommitState:
    """What one poll of a checkpoint's folder found: the ranks that are `missing` (none: it is committed), and
    whether it was this poll that committed it."""

    missing: tuple[int, ...] = ()
    mine: bool = False
    whole: bool = False
    """Nothing is missing, and another keeper is to commit it."""
    comparison: ReplicaComparison | None = None
    """Of what several ranks hold, where it was this poll that merged the parts."""


def is_committed(storage: Storage, snapshot_id: SnapshotId) -> bool:
    """Whether the marker is there; the folder is not listed for that. Raises RankFailed where a failure is noted where
    all look, StorageError."""
    folder = folder_name(snapshot_id.step, snapshot_id.attempt)
    try:
        storage.size(f"{folder}/{COMMITTED}")
        return True
    except FileNotFoundError:
        pass
    try:
        note = storage.read(f"{folder}/{name_of_failure_mark(0)}")
    except FileNotFoundError:
        return False
    raise _as_failure(0, note)


def forget_failures(storage: Storage, snapshot_id: SnapshotId, ranks: Collection[int]) -> None:
    """Takes back the notes of these ranks, which are to be written again, and one that was repeated. Raises StorageError."""
    folder = folder_name(snapshot_id.step, snapshot_id.attempt)
    for rank in {0, *ranks}:
        name = f"{folder}/{name_of_failure_mark(rank)}"
        try:
            note = storage.read(name)
        except FileNotFoundError:
            continue
        if rank in ranks or _as_failure(rank, note).rank != rank:
            storage.delete(name)


def has_part(storage: Storage, snapshot_id: SnapshotId, rank: int) -> bool:
    """Whether a rank's share is there as a whole. Raises StorageError."""
    try:
        storage.size(f"{folder_name(snapshot_id.step, snapshot_id.attempt)}/{part_name(rank)}")
        return True
    except FileNotFoundError:
        return False


def commit(
    storage: Storage,
    snapshot_id: SnapshotId,
    world_size: int,
    node: str,
    gate: Gate,
    *,
    may_merge: bool = True,
) -> CommitState:
    """Commits the checkpoint if all of it is there; without `may_merge` that is left to another keeper.

    Raises RankFailed if a rank's keeper gave up, CheckpointCorrupt if the parts do not fit each other, StorageError.
    """
    folder = folder_name(snapshot_id.step, snapshot_id.attempt)
    names = {entry.name for entry in storage.files(folder)}
    if COMMITTED in names:
        return CommitState()
    for name in sorted(names):
        if name.endswith(".failed") and name.startswith("rank-"):
            try:
                note = storage.read(f"{folder}/{name}")
            except FileNotFoundError:
                continue  # that rank tries again
            raise _as_failure(int(name[5:-7]), note)
    if missing := tuple(r for r in range(world_size) if part_name(r) not in names):
        return CommitState(missing)
    if not may_merge:
        return CommitState(whole=True)
    replicas = Replicas()
    manifest = merge(_read_parts(storage, folder, world_size, replicas))
    gate()
    storage.put(f"{folder}/{MANIFEST}", manifest.encoded)
    gate()
    marker = Committed.of(manifest, node=node, time=time.time()).encoded
    return CommitState(mine=storage.create(f"{folder}/{COMMITTED}", marker), comparison=replicas.compare())


def _read_parts(storage: Storage, folder: str, world_size: int, replicas: Replicas) -> Iterator[PartManifest]:
    """The parts, by rank; each is given to `replicas` too."""
    heads: Heads = {}
    for rank in range(world_size):
        name = part_name(rank)
        part = PartManifest.decode(storage.read(f"{folder}/{name}"), where=name, heads=heads)
        replicas.add(rank, part.replicas, part.tensors)
        yield part


def _as_failure(rank: int, data: bytes) -> RankFailed:
    """What the note of a rank says; `hopeless` where trying again cannot help."""
    try:
        note = json.loads(data)
        return RankFailed(int(note.get("rank", rank)), str(note["why"]), bool(note.get("hopeless", True)))
    except (ValueError, KeyError, TypeError, AttributeError):
        return RankFailed(rank, "it left a note that cannot be read", False)
