"""The progress page: a small memory-mapped file per rank, written by the trainer, read by the node's agent.

The trainer's write is one `struct.pack_into` and one store: no system call, no lock, no allocation that
matters. The page holds the last steps in a ring, so that an agent that looks ten times a second misses none.
It lies in the node's own memory (`/dev/shm` or the node's scratch folder), never in the run directory.

Layout, little-endian, frozen (a change raises VERSION):

    0    header   8s magic, u32 version, u32 rank, u64 attempt, u64 pid, i64 total steps (-1 unknown), u64 peers (0 all),
                  f64 seconds that it waited for data so far (0 unknown; older writers leave both so)
    64   state    u64 count of ring records, u64 phase, f64 time of the phase's start,
                  f64 time of the step at which the rank found its lease expired (0 never)
    128  control  f64 lease until, i64 stop at step (-1 none), u64 epoch           written by the agent
    4096 ring     512 records: u64 n, i64 step, i64 tokens, f64 loss, f64 norm, f64 busy, f64 time, u64 n

Times are CLOCK_MONOTONIC of the node, in seconds. A record is valid where both of its n are the one asked for.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from ..errors import ContractError
from ..private import private_folder

MAGIC = b"UNBROKEN"
VERSION = 2
RING = 512
RING_AT = 4096
HEADER = struct.Struct("<8sIIQQq")
STATE = struct.Struct("<QQdd")
CONTROL = struct.Struct("<dqQ")
RECORD = struct.Struct("<QqqddddQ")
SHARED = struct.Struct("<Qd")
PEERS_AT, DATA_AT, STATE_AT, CONTROL_AT = 40, 48, 64, 128
SIZE = RING_AT + RING * RECORD.size
NO_STOP = -1
_UNKNOWN_TOTAL = -1


class Phase(IntEnum):
    """What a rank is doing; each phase has a deadline of its own."""

    STARTING = 0
    COMPILING = 1
    TRAINING = 2
    EVALUATING = 3
    CHECKPOINTING = 4
    STOPPING = 5
    EXITING = 6
    """The script is done and its interpreter ends; readers older than this phase take it for training."""


@dataclass(frozen=True)
class StepRecord:
    """One completed step. `time` is CLOCK_MONOTONIC of the node, in seconds; `loss` may be NaN; the
    `norm` of the gradient and the seconds at work (`busy`) are None where they were not given."""

    step: int
    tokens: int
    loss: float
    time: float
    norm: float | None = None
    busy: float | None = None


@dataclass(frozen=True)
class Progress:
    """What a page says at one moment. `last` is the newest completed step, None before the first; ranks with the same `peers` do the same
    work; `data_s` are the seconds that it waited for data so far, None where it does not say."""

    rank: int
    attempt: int
    pid: int
    total_steps: int | None
    phase: Phase
    phase_since: float
    count: int
    last: StepRecord | None
    peers: int = 0
    data_s: float | None = None


def create(path: Path, *, rank: int, attempt: int) -> None:
    """Makes an empty page for one rank of one attempt, in a folder of its owner alone. Raises OSError, UnsafeFile."""
    private_folder(path.parent)
    data = bytearray(SIZE)
    HEADER.pack_into(data, 0, MAGIC, VERSION, rank, attempt, 0, _UNKNOWN_TOTAL)
    CONTROL.pack_into(data, CONTROL_AT, 0.0, NO_STOP, 0)
    aside = path.with_suffix(".aside")
    aside.write_bytes(data)
    os.replace(aside, path)


def open_map(path: Path) -> mmap.mmap:
    """Maps a page for reading and writing. Raises ContractError if it is none, or of another version."""
    with open(path, "r+b") as f:
        if os.fstat(f.fileno()).st_size != SIZE:
            raise ContractError("not a progress page of this version", where=str(path))
        page = mmap.mmap(f.fileno(), SIZE)
    magic, version, *_ = HEADER.unpack_from(page, 0)
    if magic != MAGIC or version != VERSION:
        raise ContractError(
            f"not a progress page of version {VERSION}",
            where=str(path),
            hint="Use the same version of unbroken in the trainer and in `unbroken run`",
        )
    return page


class PageReader:
    """The agent's side of one page: reads progress, sets lease and stop."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._page = open_map(path)
        self._taken = 0

    def close(self) -> None:
        self._page.close()

    def read(self) -> Progress:
        """What the page says now."""
        _, _, rank, attempt, pid, total = HEADER.unpack_from(self._page, 0)
        count, phase, since, _ = STATE.unpack_from(self._page, STATE_AT)
        last = self._record(count) if count else None
        peers, data_s = SHARED.unpack_from(self._page, PEERS_AT)
        return Progress(
            rank=rank,
            attempt=attempt,
            pid=pid,
            total_steps=None if total == _UNKNOWN_TOTAL else total,
            phase=Phase(phase) if phase <= max(Phase) else Phase.TRAINING,
            phase_since=since,
            count=count,
            last=last,
            peers=peers,
            data_s=data_s or None,
        )

    def take(self) -> list[StepRecord]:
        """The steps completed since the last call, oldest first; those overwritten meanwhile are missing."""
        count: int = STATE.unpack_from(self._page, STATE_AT)[0]
        first = max(self._taken + 1, count - RING + 1)
        records = [r for n in range(first, count + 1) if (r := self._record(n)) is not None]
        self._taken = count
        return records

    def _record(self, n: int) -> StepRecord | None:
        # The writer may be inside this very record: then its two numbers differ, and it is read again.
        for _ in range(3):
            a, step, tokens, loss, norm, busy, time, b = RECORD.unpack_from(
                self._page, RING_AT + (n % RING) * RECORD.size
            )
            if a == b == n:
                return StepRecord(step, tokens, loss, time, _given(norm), _given(busy))
        return None

    def expired_at(self) -> float | None:
        """When the rank stopped because its lease had expired; None where it did not, or went on all the same."""
        count, _, _, at = STATE.unpack_from(self._page, STATE_AT)
        last = self._record(count) if at and count else None
        return last.time if last is not None and last.time == at else None

    def set_lease(self, until: float, term: int) -> None:
        """Lets the trainer go on until `until` (CLOCK_MONOTONIC, seconds)."""
        struct.pack_into("<d", self._page, CONTROL_AT, until)
        struct.pack_into("<Q", self._page, CONTROL_AT + 16, term)

    def set_stop(self, step: int) -> None:
        """Asks the trainer to stop after completing `step`."""
        struct.pack_into("<q", self._page, CONTROL_AT + 8, step)


def _given(value: float) -> float | None:
    return None if math.isnan(value) else value
