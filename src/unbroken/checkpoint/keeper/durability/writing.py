"""The keeper's writers: finalized snapshots go in, durable checkpoints come out, each step of it announced.

Two kinds of threads: writers, one rank's file at a time, and a committer that watches the folders for the parts
of other nodes. All of them ask the gate before every chunk, so an attempt that is closed, or a keeper whose lease
has expired, writes nothing more.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from ....errors import StorageError, UnbrokenError
from ....progress.records.candidate import folder_name
from ...storage.base import Storage
from ..buffers.holdings import Buffer, Holdings, Snapshot, SnapshotId
from .commit import (
    Abandoned,
    CommitState,
    RankFailed,
    commit,
    is_committed,
    note_failure,
    relay_failure,
    write_part,
)
from .pending import COMMIT_TIMEOUT_S, PendingCheckpoint

COMMITS_PENDING_MAX = 3
"""Checkpoints whose commit is waited for while the next one is written: each of them asks the storage again and again."""

Emit = Callable[[dict[str, Any]], None]


@dataclass(eq=False)
class WriteJob:
    """One rank's snapshot on its way to the disk."""

    buffer: Buffer
    snapshot: Snapshot
    since: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)
    running: bool = False
    periodic: bool = False
    """Nobody asked for this very step: a newer one makes up for it."""


class Writing:
    """Writes and commits what `submit` gives it. `changed` guards this, the holdings and the keeper alike."""

    def __init__(
        self,
        open_storage: Callable[[str], Storage],
        holdings: Holdings,
        changed: threading.Condition,
        emit: Emit,
        view: Callable[[Buffer, int], memoryview],
        *,
        node: str,
        writers: int,
        after_commit: Callable[[Storage, SnapshotId, bool], None] = lambda storage, snapshot_id, mine: None,
        freed: Callable[[], None] = lambda: None,
    ) -> None:
        self.open_storage = open_storage
        self.place = ""
        """Where the checkpoints of attempts go that `places` does not name."""
        self.places: dict[int, str] = {}
        """Where those of an attempt lie: what was whole in memory before the place changed belongs to the old one."""
        self.holdings = holdings
        self.changed = changed
        self.emit = emit
        self.view = view
        self.node = node
        self.after_commit = after_commit
        self.freed = freed
        self.jobs: list[WriteJob] = []
        self.watches: dict[SnapshotId, PendingCheckpoint] = {}
        self.failed: dict[SnapshotId, str] = {}
        self.hopeless: set[SnapshotId] = set()
        """Of the failed ones: no storage is to blame, so trying again cannot help."""
        self.insisted: set[SnapshotId] = set()
        """Somebody tries these again and again (flushing.py): a refusal of the storage is not the end of them."""
        self.closed = 0
        """Attempts up to this number write nothing more, but for `whole_at_seal` where somebody insists."""
        self.whole_at_seal: set[SnapshotId] = set()
        self.lease_until: float | None = None
        self.ended = False
        self.pool = ThreadPoolExecutor(writers, thread_name_prefix="checksum")
        self.moved: dict[SnapshotId, str] = {}
        """Checkpoints that go elsewhere, because their own place refused them to the end."""
        self.superseded: set[SnapshotId] = set()
        """Never begun here, because a newer one was whole before the storage had taken those before it."""
        self._storages: dict[str, Storage] = {}
        self._threads = [threading.Thread(target=self._write_loop, daemon=True) for _ in range(writers)]
        self._threads.append(threading.Thread(target=self._commit_loop, daemon=True))
        for t in self._threads:
            t.start()

    # What follows until the next comment is called with `changed` held.

    def submit(self, buffer: Buffer, *, periodic: bool = False) -> bool:
        """Queues the snapshot in this buffer; False if it is under way, done, failed or forbidden already.

        A `periodic` one may be left out again where a newer one comes before it is begun.
        """
        snapshot = buffer.snapshot
        if (
            snapshot is None
            or snapshot.snapshot_id in self.failed
            or snapshot.snapshot_id in self.holdings.released
        ):
            return False
        snapshot_id, rank = snapshot.snapshot_id, snapshot.rank
        if (snapshot_id.attempt <= self.closed and snapshot_id not in self.insisted) or any(
            j.snapshot.snapshot_id == snapshot_id and j.snapshot.rank == rank for j in self.jobs
        ):
            return False
        watch = self.watches.get(snapshot_id)
        if watch is not None and rank in watch.shares:
            return False  # written: a second part could come after the manifest that vouches for the first
        buffer.pins += 1
        self.jobs.append(WriteJob(buffer, snapshot, periodic=periodic))
        self._supersede()
        self.changed.notify_all()
        return True

    def _supersede(self) -> None:
        """Leaves out what is not begun and has a newer one behind it, so that a slow storage gets the newest.

        Only where all ranks are here: another node may have begun what this one has not, and a checkpoint that each
        node leaves out in its own way would never be whole. There the ranks wait for their buffers instead.
        """
        waiting = {
            j.snapshot.snapshot_id for j in self.jobs if j.snapshot.snapshot_id in self.holdings.completed
        }
        newest = max(waiting, default=None)
        if newest is None or not self.holdings.all_here(newest):
            return
        for snapshot_id in sorted({j.snapshot.snapshot_id for j in self.jobs}):
            jobs = [j for j in self.jobs if j.snapshot.snapshot_id == snapshot_id]
            begun = snapshot_id in self.watches or any(j.running for j in jobs)
            if (
                snapshot_id.attempt != newest.attempt
                or snapshot_id >= newest
                or begun
                or snapshot_id in self.insisted
            ):
                continue
            if all(j.periodic for j in jobs):
                self.superseded.add(snapshot_id)
                self.holdings.released.add(snapshot_id)
                for job in jobs:
                    self._finish(job)
                self.emit(
                    {
                        "event": "superseded",
                        "attempt": snapshot_id.attempt,
                        "step": snapshot_id.step,
                        "by": newest.step,
                    }
                )

    def take_up(self, snapshot_id: SnapshotId) -> None:
        """Lets this one be written after all, though a newer one had superseded it."""
        if snapshot_id in self.superseded:
            self.superseded.discard(snapshot_id)
            self.holdings.released.discard(snapshot_id)

    def _next(self) -> WriteJob | None:
        """What is written next: what somebody insists on, then what is begun, then the oldest where there is room."""
        idle = [j for j in self.jobs if not j.running]
        begun = {j.snapshot.snapshot_id for j in self.jobs if j.running}
        committing = any(
            len(w.shares) >= w.world_size for w in self.watches.values()
        )  # nobody else is waited for
        full = bool(begun) or committing or len(self.watches) >= COMMITS_PENDING_MAX
        for job in sorted(idle, key=lambda j: j.snapshot.snapshot_id not in self.insisted):
            snapshot_id = job.snapshot.snapshot_id
            if (
                snapshot_id in self.insisted
                or snapshot_id in begun
                or snapshot_id in self.watches
                or not full
            ):
                return job
        return None

    def watch(self, snapshot_id: SnapshotId, world_size: int, rank: int) -> None:
        """A rank wrote its share by itself: wait for the rest."""
        self.watches.setdefault(
            snapshot_id, PendingCheckpoint(snapshot_id, world_size, time.monotonic())
        ).next_poll = 0.0
        self.emit(
            {"event": "written", "attempt": snapshot_id.attempt, "step": snapshot_id.step, "rank": rank}
        )
        self.changed.notify_all()

    def expect(self, snapshot_id: SnapshotId, world_size: int) -> None:
        """Looks (again) whether all shares of this checkpoint are there."""
        self.watches.setdefault(
            snapshot_id, PendingCheckpoint(snapshot_id, world_size, time.monotonic())
        ).next_poll = 0.0
        self.changed.notify_all()

    def may_finish(self, snapshot_id: SnapshotId, offered: Collection[SnapshotId]) -> bool:
        """Whether this snapshot may still be made durable: its attempt is open, or it was whole when that was sealed,
        or the supervisor offered it to a later attempt."""
        return (
            snapshot_id.attempt > self.closed or snapshot_id in self.whole_at_seal or snapshot_id in offered
        )

    def busy_with(self, attempt: int) -> list[SnapshotId]:
        """The checkpoints of attempts up to this one that are being written or waited for."""
        marks = {j.snapshot.snapshot_id for j in self.jobs} | set(self.watches)
        return sorted(m for m in marks if m.attempt <= attempt)

    def give_up(self, snapshot_id: SnapshotId, rank: int, why: str, *, hopeless: bool = True) -> None:
        """Marks a checkpoint as failed and tells everyone; where somebody insists, only a hopeless one."""
        if hopeless and snapshot_id not in self.holdings.durable:
            self.hopeless.add(snapshot_id)
        if snapshot_id in self.failed or snapshot_id in self.holdings.durable:
            return
        self.failed[snapshot_id] = why
        self.holdings.released.add(snapshot_id)
        self.watches.pop(snapshot_id, None)
        for job in [j for j in self.jobs if j.snapshot.snapshot_id == snapshot_id and not j.running]:
            self._finish(job)
        if hopeless or snapshot_id not in self.insisted:
            self.emit(
                {
                    "event": "failed",
                    "attempt": snapshot_id.attempt,
                    "step": snapshot_id.step,
                    "rank": rank,
                    "why": why,
                    "refused": not hopeless,
                }
            )
        self.freed()
        self.changed.notify_all()

    def _finish(self, job: WriteJob) -> None:
        if job in self.jobs:
            self.jobs.remove(job)
            job.buffer.pins -= 1
            self.freed()
            self.changed.notify_all()

    def _forbidden(self, snapshot_id: SnapshotId) -> str | None:
        if self.ended:
            return "the keeper ends"
        if snapshot_id.attempt <= self.closed and snapshot_id not in self.insisted:
            return "the attempt is sealed"
        return self.failed.get(snapshot_id)

    # The rest runs in threads of its own.

    def gate(self, snapshot_id: SnapshotId, job: WriteJob | None = None) -> None:
        """Returns when writing for this checkpoint is allowed; raises Abandoned when it never will be again."""
        with self.changed:
            while True:
                if why := self._forbidden(snapshot_id):
                    raise Abandoned(why)
                if self.lease_until is None or time.monotonic() < self.lease_until:
                    break
                self.changed.wait(0.2)
            if job is not None:
                job.moved = time.monotonic()

    def storage(self, snapshot_id: SnapshotId | None = None) -> Storage:
        """The storage that this checkpoint belongs to (default: the present one), opened at the first use."""
        place = self.place_of(snapshot_id)
        if place not in self._storages:
            self._storages[place] = self.open_storage(place)
        return self._storages[place]

    def place_of(self, snapshot_id: SnapshotId | None) -> str:
        """Where this checkpoint goes."""
        if snapshot_id is None:
            return self.place
        return self.moved.get(snapshot_id) or self.places.get(snapshot_id.attempt, self.place)

    def move(self, snapshot_id: SnapshotId, place: str) -> bool:
        """Lets this checkpoint be written elsewhere, from its beginning; False where a write to its place still hangs."""
        if any(j.snapshot.snapshot_id == snapshot_id and j.running for j in self.jobs):
            return False
        for job in [j for j in self.jobs if j.snapshot.snapshot_id == snapshot_id]:
            self._finish(job)
        self.watches.pop(snapshot_id, None)
        self.failed.pop(snapshot_id, None)
        self.holdings.released.discard(snapshot_id)
        self.moved[snapshot_id] = place
        return True

    def settle(self, attempt: int, deadline_s: float, gone: Collection[int] = ()) -> list[SnapshotId]:
        """Finishes or abandons this attempt's writes and closes it; what could not be stopped (empty: none).

        `gone` are the ranks whose node is lost: what they have not written by now, nobody will.
        """
        began = time.monotonic()
        deadline = began + deadline_s
        with self.changed:
            for watch in self.watches.values():
                watch.next_poll = 0.0
                watch.urgent = watch.urgent or watch.snapshot_id.attempt <= attempt
            self.changed.notify_all()
            # What is not known complete on all ranks can never commit: its missing ranks are gone.
            for watch in list(self.watches.values()):
                if watch.snapshot_id.attempt <= attempt and watch.snapshot_id not in self.holdings.completed:
                    self.give_up(
                        watch.snapshot_id,
                        min(watch.missing, default=0),
                        "the attempt ended before every rank had it",
                    )
            for job in list(self.jobs):
                snapshot_id = job.snapshot.snapshot_id
                if snapshot_id.attempt <= attempt and snapshot_id not in self.holdings.completed:
                    self.give_up(snapshot_id, job.snapshot.rank, "the attempt ended before every rank had it")
            while self.busy_with(attempt) and time.monotonic() < deadline:
                for watch in list(self.watches.values()):
                    never = sorted(set(watch.missing) & set(gone)) if watch.polled > began else []
                    if watch.snapshot_id.attempt <= attempt and never:
                        self.give_up(
                            watch.snapshot_id, never[0], "its node was lost before it had written its share"
                        )
                self.changed.wait(min(0.2, max(0.0, deadline - time.monotonic())))
            if attempt > self.closed:
                self.closed = attempt
                self.whole_at_seal |= {m for m in self.holdings.completed if m.attempt <= attempt}
            for snapshot_id in self.busy_with(attempt):
                self.give_up(snapshot_id, 0, "the attempt was sealed before it was durable", hopeless=False)
            grace = time.monotonic() + 5.0
            while self.busy_with(attempt) and time.monotonic() < grace:
                self.changed.wait(0.1)
            return self.busy_with(attempt)

    def end(self) -> None:
        """Stops all threads after their current chunk."""
        with self.changed:
            self.ended = True
            self.changed.notify_all()
        self.pool.shutdown(wait=False)

    def _write_loop(self) -> None:
        while True:
            with self.changed:
                while (job := self._next()) is None:
                    if self.ended:
                        return
                    self.changed.wait()
                job.running = True
            self._write(job)

    def _write(self, job: WriteJob) -> None:
        snapshot, snapshot_id = job.snapshot, job.snapshot.snapshot_id
        why, hopeless = None, False
        began = time.monotonic()
        try:
            self.gate(snapshot_id, job)
            view = self.view(job.buffer, snapshot.file_bytes)
            record = write_part(
                self.storage(snapshot_id), snapshot, view, lambda: self.gate(snapshot_id, job), self.pool
            )
            with self.changed:
                if job.buffer.snapshot is snapshot:
                    job.buffer.snapshot = replace(snapshot, checksums=record.checksums)
        except Abandoned as e:
            why = str(e)
        except Exception as e:  # noqa: BLE001 - whatever it is fails this save, and must not end the writer
            why = str(e) if isinstance(e, UnbrokenError) else repr(e)
            hopeless = not isinstance(e, StorageError | OSError)
            if (storage := self._storages.get(self.place_of(snapshot_id))) is not None:
                note_failure(storage, snapshot, why, hopeless=hopeless)
        with self.changed:
            self._finish(job)
            if why is not None:
                self.give_up(snapshot_id, snapshot.rank, why, hopeless=hopeless)
                return
            now = time.monotonic()
            self.emit(
                {
                    "event": "written", "attempt": snapshot_id.attempt, "step": snapshot_id.step, "rank": snapshot.rank,
                    "seconds": round(now - began, 4), "bytes": snapshot.file_bytes,
                }
            )  # fmt: skip
            if snapshot_id not in self.failed:
                watch = self.watches.setdefault(
                    snapshot_id, PendingCheckpoint(snapshot_id, snapshot.world_size, job.since)
                )
                watch.next_poll = 0.0
                watch.shares.add(snapshot.rank)
            self.changed.notify_all()

    def _commit_loop(self) -> None:
        while True:
            with self.changed:
                now = time.monotonic()
                due = [w for w in self.watches.values() if w.next_poll <= now]
                if self.ended:
                    return
                if not due:
                    soonest = min((w.next_poll for w in self.watches.values()), default=now + 3600)
                    self.changed.wait(max(0.001, soonest - now))
                    continue
            for watch in due:
                self._poll(watch)

    def _poll(self, watch: PendingCheckpoint) -> None:
        snapshot_id = watch.snapshot_id
        why, rank, hopeless = None, 0, False
        began = time.monotonic()
        merge = watch.may_merge(began)
        lists = merge or watch.may_list(began)
        state = watch.last
        try:
            self.gate(snapshot_id)
            storage = self.storage(snapshot_id)
            if is_committed(storage, snapshot_id):
                state = CommitState()
            elif lists:
                state = commit(
                    storage,
                    snapshot_id,
                    watch.world_size,
                    self.node,
                    lambda: self.gate(snapshot_id),
                    may_merge=merge,
                )
        except Abandoned as e:
            why = str(e)
        except RankFailed as e:
            why, rank, hopeless = e.why, e.rank, e.hopeless
            if 0 in watch.shares:
                relay_failure(storage, snapshot_id, e)
        except Exception as e:  # noqa: BLE001 - as above
            why = str(e) if isinstance(e, UnbrokenError) else repr(e)
            hopeless = not isinstance(e, StorageError | OSError)
        missing = state.missing
        late = time.monotonic() - watch.written
        if why is None and missing and late > COMMIT_TIMEOUT_S:
            why, rank = f"ranks {missing[:8]} did not write their share within {late:.0f} s", missing[0]
        with self.changed:
            if lists:
                watch.missing, watch.polled, watch.last = missing, began, state
            if state.whole and watch.whole_since is None:
                watch.whole_since = began
            if why is not None:
                self.give_up(snapshot_id, rank, why, hopeless=hopeless)
            elif missing or state.whole:
                watch.pause = min(watch.pause * 1.5, 1.0)
                watch.next_poll = time.monotonic() + watch.pause
            else:
                self.watches.pop(snapshot_id, None)
                self.holdings.durable.add(snapshot_id)
                self.holdings.released.add(snapshot_id)
                self.freed()
                if state.mine and state.comparison is not None and watch.world_size > 1:
                    self.emit(
                        {
                            "event": "replicas", "attempt": snapshot_id.attempt, "step": snapshot_id.step,
                            "world_size": watch.world_size, **state.comparison.as_message(),
                        }
                    )  # fmt: skip
                self.emit(
                    {
                        "event": "durable", "attempt": snapshot_id.attempt, "step": snapshot_id.step,
                        "path": folder_name(snapshot_id.step, snapshot_id.attempt),
                        "seconds": round(time.monotonic() - watch.since, 4),
                    }
                )  # fmt: skip
                self.changed.notify_all()
        if why is None and not missing and not state.whole:
            self.after_commit(self.storage(snapshot_id), snapshot_id, state.mine)


def be_nice() -> None:
    """Lowers this process's claim on processor and disk, where the system lets it."""
    os.nice(10)
    try:
        import psutil

        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, 6)
    except (OSError, AttributeError):
        return
