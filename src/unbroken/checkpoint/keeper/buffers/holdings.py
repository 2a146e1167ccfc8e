"""The snapshots that a keeper holds in memory: which buffer has what, and which may be used again. No I/O here.

A buffer may be filled again only when a newer snapshot is known complete on all ranks and nobody reads it, so at
every moment there is one whole snapshot in memory that all ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ....link.runs import pack

FREE, CLAIMED, FINALIZED = "free", "claimed", "finalized"


class SnapshotId(NamedTuple):
    """Which snapshot. Ordered by attempt first: what a later attempt saved supersedes what it started from."""

    attempt: int
    step: int


_NONE = SnapshotId(0, 0)


@dataclass(frozen=True)
class Snapshot:
    """One rank's finalized snapshot. `part` is its part of the manifest but for the file's record."""

    snapshot_id: SnapshotId
    rank: int
    world_size: int
    file_bytes: int
    part: Mapping[str, Any]
    checksums: tuple[str, ...] | None = None


@dataclass(eq=False)
class Buffer:
    """A memfd for one rank. `pins` counts those that read it; `file_bytes` of it are the rank's file, byte for byte."""

    id: int
    rank: int
    bytes: int
    fd: int
    state: str = FREE
    snapshot: Snapshot | None = None
    pins: int = 0
    ready: bool = False
    replica: bool = False
    owner: object = None
    """Who claimed it."""


@dataclass
class Holdings:
    """All buffers of a node, within `budget` bytes."""

    budget: int
    free_memory: Callable[[Buffer], None]
    buffers: dict[int, Buffer] = field(default_factory=dict)
    newest: SnapshotId | None = None
    """The newest snapshot that is complete on all ranks of the run."""
    completed: set[SnapshotId] = field(default_factory=set)
    wanted: frozenset[SnapshotId] = frozenset()
    """Snapshots of earlier attempts that a restore may still ask for."""
    attempt: int = 0
    durable: set[SnapshotId] = field(default_factory=set)
    released: set[SnapshotId] = field(default_factory=set)
    """Durable, or given up: nobody writes these any more."""

    def used(self) -> int:
        return sum(b.bytes for b in self.buffers.values())

    def of_rank(self, rank: int) -> list[Buffer]:
        return [b for b in self.buffers.values() if b.rank == rank and not b.replica]

    def find(self, snapshot_id: SnapshotId, rank: int) -> Buffer | None:
        """The buffer that holds this rank's snapshot, its own node's copy first."""
        found = [
            b
            for b in self.buffers.values()
            if b.rank == rank
            and b.state == FINALIZED
            and b.snapshot
            and b.snapshot.snapshot_id == snapshot_id
        ]
        return min(found, key=lambda b: b.replica, default=None)

    def all_here(self, snapshot_id: SnapshotId) -> bool:
        """Whether this node's own ranks are all there are, and each has this snapshot here."""
        here = {
            b.rank: b.snapshot
            for b in self.buffers.values()
            if b.state == FINALIZED and not b.replica and b.snapshot and b.snapshot.snapshot_id == snapshot_id
        }
        return bool(here) and all(set(here) == set(range(s.world_size)) for s in here.values())

    def may_reuse(self, b: Buffer) -> bool:
        """Whether this buffer's content is needed no more."""
        if b.pins or b.state == CLAIMED:
            return False
        if b.state == FREE or b.snapshot is None:
            return True
        snapshot_id = b.snapshot.snapshot_id
        if b.replica:  # another node's copies have a rule of their own (Keeper.room_for)
            return (
                snapshot_id.attempt < self.attempt
                and snapshot_id not in self.wanted
                and snapshot_id != self.newest
            )
        if (
            snapshot_id.attempt < self.attempt
            and snapshot_id not in self.wanted
            and snapshot_id != self.newest
        ):
            return True
        if self.newest is not None and snapshot_id < self.newest:
            # The rank's own share of the newer one must be here, unless the rank lives elsewhere now.
            return self.find(self.newest, b.rank) is not None or snapshot_id.attempt < self.newest.attempt
        # With a single buffer there is nothing newer to wait for: the disk has it.
        alone = len([o for o in self.of_rank(b.rank) if o.bytes >= b.bytes]) < 2
        return alone and not b.replica and snapshot_id in self.released

    def claim(self, rank: int, size: int, *, only_free: bool = False) -> Buffer | None:
        """Takes a buffer of at least `size` bytes to be filled, a free one first, then the oldest that may go."""
        usable = [
            b
            for b in self.of_rank(rank)
            if b.bytes >= size and self.may_reuse(b) and (b.state == FREE or not only_free)
        ]
        if not usable:
            return None
        b = min(
            usable,
            key=lambda b: (b.state != FREE, not b.ready, b.snapshot.snapshot_id if b.snapshot else _NONE),
        )
        b.state, b.snapshot = CLAIMED, None
        return b

    def finalize(self, b: Buffer, snapshot: Snapshot) -> bool:
        """Takes the content of a claimed buffer as whole; says whether that completed the snapshot on all ranks."""
        b.state, b.snapshot = FINALIZED, snapshot
        here = [
            o
            for o in self.buffers.values()
            if not o.replica
            and o.state == FINALIZED
            and o.snapshot
            and o.snapshot.snapshot_id == snapshot.snapshot_id
        ]
        if {o.rank for o in here} == set(range(snapshot.world_size)):
            return self.complete(snapshot.snapshot_id)
        return False

    def complete(self, snapshot_id: SnapshotId) -> bool:
        """Notes that every rank has this snapshot; True if that is news."""
        if snapshot_id in self.completed:
            return False
        self.completed.add(snapshot_id)
        if self.newest is None or snapshot_id > self.newest:
            self.newest = snapshot_id
        return True

    def begin(self, attempt: int, ranks: Iterable[int], wanted: Iterable[SnapshotId]) -> None:
        """Starts an attempt: what no restore can ask for any more is freed, ranks that moved away lose theirs."""
        self.attempt = attempt
        self.wanted = frozenset(wanted)
        if self.newest is not None and self.newest not in self.wanted:
            self.newest = max(self.wanted, default=None)
        local = set(ranks)
        for b in list(self.buffers.values()):
            if b.state == CLAIMED:
                b.state = FREE
            if b.snapshot and b.snapshot.snapshot_id not in self.wanted and not b.pins:
                b.state, b.snapshot = FREE, None
            if b.state == FREE and not b.pins and (b.rank not in local or b.replica):
                self.drop(b)

    def shrink(self, rank: int, keep_bytes: int) -> None:
        """Frees this rank's buffers of another size and the peers' copies that are needed no more."""
        for b in list(self.buffers.values()):
            other_size = b.rank == rank and not b.replica and b.bytes != keep_bytes
            if (other_size or (b.replica and b.rank == rank)) and self.may_reuse(b):
                self.drop(b)

    def drop(self, b: Buffer) -> None:
        """Gives the buffer's memory back."""
        del self.buffers[b.id]
        self.free_memory(b)

    def inventory(self) -> list[dict[str, Any]]:
        """What is in memory, for the supervisor: `complete` of this rank (a buffer that is being filled is not in
        the list), `everywhere` if it is known of all ranks."""
        return [
            {
                "attempt": b.snapshot.snapshot_id.attempt,
                "step": b.snapshot.snapshot_id.step,
                "rank": b.rank,
                "world_size": b.snapshot.world_size,
                "bytes": b.snapshot.file_bytes,
                "complete": True,
                "everywhere": b.snapshot.snapshot_id in self.completed,
                "peer": b.replica,
            }
            for b in self.buffers.values()
            if b.state == FINALIZED and b.snapshot
        ]

    def inventory_in_runs(self) -> list[list[Any]]:
        """The same as rows `[attempt, step, world_size, everywhere, peer, bytes, runs of ranks]`: one for all ranks of a
        snapshot, with their bytes together."""
        rows: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        for h in self.inventory():
            key = (h["attempt"], h["step"], h["world_size"], h["everywhere"], h["peer"])
            rows.setdefault(key, []).append((h["rank"], h["bytes"]))
        return [[*key, sum(size for _, size in held), pack(r for r, _ in held)] for key, held in rows.items()]
