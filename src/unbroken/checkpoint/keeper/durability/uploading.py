"""From disk to the object store, after the commit: each keeper sends its own ranks' files, the marker goes last.

Whoever comes last finds all there and commits. The others look for the marker; each in its turn (pending.py) also lists what
is there, and commits where whoever came last is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ....errors import UnbrokenError
from ....progress.records.candidate import folder_name
from ...catalogue.mirror import mirror
from ...format.manifest import COMMITTED
from ...storage import open_storage
from ...storage.base import Storage
from ..buffers.holdings import SnapshotId
from ..wire import Message
from .pending import find_turn

TRIES = 6
_POLL_S = 0.5
COMMIT_TIMEOUT_S = 3600.0


@dataclass(eq=False)
class Uploading:
    """Mirrors committed checkpoints to `url`, one after the other. `gate` raises where writing is forbidden."""

    url: str
    source: Callable[[SnapshotId], Storage]
    changed: threading.Condition
    emit: Callable[[Message], None]
    gate: Callable[[SnapshotId], None]
    log: Callable[[str], None]
    waiting: list[tuple[SnapshotId, tuple[int, ...], float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        threading.Thread(target=self._loop, daemon=True).start()

    def submit(self, snapshot_id: SnapshotId, ranks: tuple[int, ...]) -> None:
        """Queues this node's share of a checkpoint; with `changed` held."""
        self.waiting.append((snapshot_id, ranks, time.monotonic()))
        self.changed.notify_all()

    def names(self) -> dict[str, str]:
        """What retention must not remove yet."""
        return {folder_name(m.step, m.attempt): f"being copied to {self.url}" for m, _, _ in self.waiting}

    def _loop(self) -> None:
        while True:
            with self.changed:
                while not self.waiting:
                    self.changed.wait()
                snapshot_id, ranks, since = self.waiting[0]
            why = self._upload(snapshot_id, ranks)
            with self.changed:
                self.waiting.pop(0)
                event: Message = {"attempt": snapshot_id.attempt, "step": snapshot_id.step}
                if why is None:
                    self.emit({"event": "remote", **event, "seconds": round(time.monotonic() - since, 4)})
                else:
                    self.log(f"step {snapshot_id.step} did not reach {self.url}: {why}")
                    self.emit({"event": "remote_failed", **event, "rank": min(ranks, default=-1), "why": why})
                self.changed.notify_all()

    def _upload(self, snapshot_id: SnapshotId, ranks: tuple[int, ...]) -> str | None:
        name, pause, why = folder_name(snapshot_id.step, snapshot_id.attempt), 0.5, ""
        for attempt in range(TRIES):
            try:
                target = open_storage(self.url)
                done = mirror(
                    self.source(snapshot_id), name, target, ranks=ranks, gate=lambda: self.gate(snapshot_id)
                )
                if done.committed or self._wait_for_others(snapshot_id, target, ranks, done.world_size):
                    return None
                return "other nodes did not send their share"
            except (UnbrokenError, OSError) as e:
                why = str(e)
                if attempt + 1 < TRIES:
                    time.sleep(pause)
                    pause *= 2
            except Exception as e:  # noqa: BLE001 - whatever it is fails this copy, and must not end the thread
                return str(e)
        return why

    def _wait_for_others(
        self, snapshot_id: SnapshotId, target: Storage, ranks: tuple[int, ...], world_size: int
    ) -> bool:
        """Whether all of it is there, and the marker, in the end. Raises StorageError."""
        source, name = self.source(snapshot_id), folder_name(snapshot_id.step, snapshot_id.attempt)
        marker, began = source.read(f"{name}/{COMMITTED}"), time.monotonic()
        turn = find_turn(ranks, world_size, began, began)
        while (now := time.monotonic()) < began + COMMIT_TIMEOUT_S:
            time.sleep(_POLL_S)
            try:
                if target.read(f"{name}/{COMMITTED}") == marker:
                    return True
            except FileNotFoundError:
                pass
            if now >= turn:
                if mirror(source, name, target, ranks=(), gate=lambda: self.gate(snapshot_id)).committed:
                    return True
                turn = find_turn(ranks, world_size, began, time.monotonic())
        return False
