"""Checksums of snapshots that stay in memory, so that a restore notices a flipped bit. They hold up no rank."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from functools import partial
from typing import Protocol

from ..buffers.holdings import FINALIZED, Buffer, Snapshot
from ..buffers.memory import NodeMemory
from ..clients import Wait
from .commit import Abandoned, chunk_digests
from .writing import Writing


class ChecksumHome(Protocol):
    """What taking checksums needs of a keeper."""

    changed: threading.Condition
    stop: threading.Event
    memory: NodeMemory
    writing: Writing
    waits: list[Wait]

    def serve_waits(self) -> None:
        """Gives buffers that have come free to those that wait; `changed` is held."""


def take_checksums(keeper: ChecksumHome) -> None:
    """Sums the newest snapshot of each rank until the keeper stops; those that are being written are summed there."""
    while not keeper.stop.is_set():
        with keeper.changed:
            chosen = _next(keeper)
            if chosen is None:
                keeper.changed.wait(1.0)
                continue
            b, snapshot = chosen
            b.pins += 1
        sums = None
        with contextlib.suppress(Abandoned), keeper.memory.view(b, snapshot.file_bytes) as view:
            sums = chunk_digests(view, partial(_unless_wanted, keeper, b, snapshot))
        with keeper.changed:
            b.pins -= 1
            if b.snapshot is snapshot and sums is not None:
                b.snapshot = replace(snapshot, checksums=sums)
            keeper.serve_waits()
            keeper.changed.notify_all()


def _next(keeper: ChecksumHome) -> tuple[Buffer, Snapshot] | None:
    """A buffer of the newest snapshot that has no checksums and is not being written; `changed` is held."""
    for b in keeper.memory.holdings.buffers.values():
        s = b.snapshot
        if (
            b.state != FINALIZED
            or s is None
            or s.snapshot_id != keeper.memory.holdings.newest
            or s.checksums is not None
        ):
            continue
        if not any(j.buffer is b for j in keeper.writing.jobs):
            return b, s
    return None


def _unless_wanted(keeper: ChecksumHome, b: Buffer, snapshot: Snapshot) -> None:
    """Raises Abandoned once a newer snapshot is complete and the rank waits for a buffer: sums may take seconds."""
    with keeper.changed:
        if keeper.memory.holdings.newest != snapshot.snapshot_id and any(
            w.client.rank == b.rank for w in keeper.waits
        ):
            raise Abandoned
