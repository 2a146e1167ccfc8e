"""`Checkpointer`: saves a training's state without holding it up, and brings it back after anything that happens.

checkpoints = unbroken.Checkpointer("checkpoints", snapshot_every=5, persist_every=20)
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
restored = checkpoints.restore(state)
first = restored.step + 1 if restored else 1
for step in range(first, last + 1):
    ...
    if checkpoints.due(step):
        checkpoints.save(step, state, position=position)
checkpoints.close()

What a call does lies beside it: saving in save/, restoring in restore/restorer.py, the way to the keeper and to the
other ranks in client/session.py, buffers in client/buffers.py.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import NotDurable, UsageError
from ..progress import holding_up
from .capture.adapters import put_together, take_apart
from .capture.loaders import check_loaders
from .catalogue.placement import place_of
from .client.buffers import CLAIM_TIMEOUT_S, Buffers
from .client.rank_memory import RankMemory
from .client.session import Session, open_session
from .levels import LEVELS, Saved
from .options import (
    CopyOptions,
    IntervalOptions,
    KeeperOptions,
    MemoryOptions,
    Options,
    RestoreOptions,
    budget_of,
    rate_of,
    seconds_of,
)
from .ranks.environment import Place, place
from .restore.restorer import Restorer
from .restore.selection import Restored
from .save.outcomes import Outcomes
from .save.saver import Saver
from .save.schedule import Schedule, due_at
from .storage.base import Storage

CLOSE_TIMEOUT_S = CLAIM_TIMEOUT_S

_instances = itertools.count()
_begun: weakref.WeakSet[Checkpointer] = weakref.WeakSet()
"""Those of this process that have found their keeper."""


@dataclass(frozen=True, eq=False)
class _Opened:
    """What there is once the keeper was found: all of it, or nothing."""

    session: Session
    buffers: Buffers
    schedule: Schedule
    outcomes: Outcomes
    saver: Saver
    restorer: Restorer


class Checkpointer:
    """Saves and restores the state of one training; every rank makes one and calls it at the same steps.

    `directory` is a folder or an address (s3://bucket/prefix); under `unbroken run` the run's own. `snapshot_every`
    and `persist_every` are steps, or "auto" (from the measured cost and the failure rate): a snapshot lies in the
    memory of this node's keeper and survives the training process; a persisted one is a checkpoint on disk and
    survives everything. `keep` checkpoints stay on disk, and those whose step is a multiple of `keep_every`. `remote`
    is an address that each checkpoint is copied to once it is on disk. `peer=True` copies each snapshot to the memory
    of another node too.
    `wait_for_room` is how long the last save waits, when this is closed, for a storage that is full or refuses it
    (under `unbroken run` its option of that name counts).
    `memory` is what the keeper of a node may take (such as "64GiB"; default: 60 % of the machine). `position` gives
    the data position at each save, unless `save` is told; by default a loader of unbroken.data in the state does.
    `fenced=True` promises that `wait_for_copies()` is called before
    anything of the state is changed, not only before optimizer steps. On a GPU, `throttle` bounds its copies in bytes
    per second (such as "20GB"), and `device_copy` tells whether all is copied on the GPU first ("auto": where the
    time until the next optimizer step was measured to be too short for the bus by more than such a copy takes, and the
    GPU has room).
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        snapshot_every: int | str = "auto",
        persist_every: int | str = "auto",
        keep: int = 3,
        keep_every: int = 0,
        remote: str | None = None,
        peer: bool = False,
        memory: str | int | None = None,
        position: Callable[[], Any] | None = None,
        when_busy: str = "wait",
        buffers: int = 3,
        fenced: bool = False,
        throttle: str | int | None = None,
        device_copy: bool | str = "auto",
        verify: bool = True,
        strict: bool = True,
        wait_for_room: str | float = "10m",
    ) -> None:
        self.options = Options(
            IntervalOptions(snapshot_every, persist_every),
            KeeperOptions(keep, keep_every, remote, peer),
            MemoryOptions(budget_of(memory), buffers, when_busy, seconds_of(wait_for_room)),
            CopyOptions(fenced, rate_of(throttle), device_copy),
            RestoreOptions(verify, strict),
        )
        self.place: Place = place()
        self.directory = place_of(directory, self.place.run_dir)
        self._position = position
        self._name = str(next(_instances))
        self._parts: _Opened | None = None
        self._tries = 0
        self._closed = False
        self._loaders_checked = False
        self._one_save = threading.RLock()
        """One save at a time: a buffer is asked for ahead, and two threads must not be given the same one."""
        atexit.register(self._at_exit)

    # --- what a training calls

    def due(self, step: int) -> bool:
        """Whether this step is to be saved: every `snapshot_every` or `persist_every` steps, the same on all ranks."""
        every = self.options.intervals
        if isinstance(every.snapshot, int) and isinstance(every.persist, int):
            return due_at(step, every.snapshot) or due_at(step, every.persist)
        return self._open().schedule.due(step)

    def save(
        self, step: int, state: Mapping[str, Any], *, position: Any = None, persist: bool | None = None
    ) -> Saved:
        """Takes the state as it is at this call; the result has a future for each durability level that it is to reach.

        `persist` tells whether it also goes to disk (default: every `persist_every` steps). Raises UnsaveableState,
        naming the key, for what cannot be saved exactly; trouble of keeper and disk never raises here: it fails
        the futures, is logged, and training goes on. May be called from any thread; saves come one after the other.
        A step is written once: what becomes of the first save of it becomes of a second one too.
        """
        with self._one_save:
            self._check_loaders(state)
            return self._open().saver.save(step, take_apart(state), position, persist)

    def restore(self, state: dict[str, Any]) -> Restored | None:
        """Loads the newest checkpoint that verifies on every rank into `state`, in place; None if there is none.

        From the memory of this node's keeper if it is still there, else from disk. Raises NoCheckpoint if
        checkpoints are there and none is good, LayoutMismatch if the state has other names, shapes or types.
        """
        self._check_loaders(state)
        apart = take_apart(state)
        restored = self._open().restorer.restore(apart)
        put_together(state, apart)
        return restored

    def wait_for_copies(self) -> None:
        """To be called before the state is changed in any way, and before each replay of a captured graph.

        Optimizers of torch call it by themselves. It waits on the processor for no copy, at most for room in the driver's
        queue where more than about a thousand are left.
        """
        if self._parts is not None:
            self._parts.buffers.device.stager.wait_for_copies()

    fence = wait_for_copies  # its former name

    def wait(self, level: str = "disk", timeout_s: float | None = None) -> None:
        """Waits until every save that is to reach this durability level has reached it. Raises StorageError, TimeoutError."""
        if level not in LEVELS:
            raise UsageError(
                f"there is no durability level '{level}'", hint=f"The levels are: {', '.join(LEVELS)}"
            )
        if self._parts is None:
            return
        with holding_up():
            self._parts.outcomes.wait(
                self._parts.session.storage.level if level == "disk" else level, timeout_s
            )

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Waits for everything that is to become durable, then lets go.

        Raises NotDurable if something did not, and nothing newer made up for it.
        """
        with self._one_save:  # a save of another thread ends first
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self._at_exit)
        if self._parts is None:
            return
        stager, outcomes = self._parts.buffers.device.stager, self._parts.outcomes
        with holding_up():
            stager.drain()
            trouble = outcomes.settle(timeout_s)
            stager.close()
            self._parts.session.close()
        if outcomes.last is not None and trouble:
            atexit.register(_exit_as_not_durable)
            raise NotDurable(
                "; ".join(dict.fromkeys(trouble))[:500],
                where=f"rank {self.place.rank}, {self.directory}",
                hint="See the keeper's log; the checkpoints before it are whole",
            )

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        # After an exception the keeper makes the last whole snapshot durable by itself.

    # --- what it was told, and what it counts

    @property
    def snapshot_every(self) -> int | str:
        """Steps between two snapshots, or "auto"."""
        return self.options.intervals.snapshot

    @property
    def persist_every(self) -> int | str:
        """Steps between two checkpoints, or "auto"."""
        return self.options.intervals.persist

    @property
    def skipped(self) -> int:
        """Saves left out because no buffer was free, or no keeper was there."""
        return self._parts.outcomes.skipped if self._parts is not None else 0

    @property
    def superseded(self) -> int:
        """Checkpoints that stayed in memory, because a newer one was whole before the storage had taken those before it."""
        return self._parts.outcomes.superseded if self._parts is not None else 0

    @property
    def attempt(self) -> int:
        """The number of this attempt; finds the keeper if that was not done yet."""
        return self._opened().session.attempt

    @property
    def storage(self) -> Storage:
        """The way to the checkpoints' place."""
        return self._opened().session.storage

    @property
    def memory(self) -> RankMemory:
        """This rank's buffers in its keeper."""
        return self._opened().session.memory

    def others_at_work(self) -> list[Checkpointer]:
        """Those of this process that save into the same place: one would restore what another saved."""
        return [c for c in _begun if c is not self and not c._closed and c.directory == self.directory]

    # --- how it works

    def _open(self) -> _Opened:
        """Finds or starts the keeper and the other ranks, at the first use. Raises UsageError once it is closed."""
        if self._closed:
            raise UsageError("this Checkpointer is closed")
        return self._opened()

    def _opened(self) -> _Opened:
        if self._parts is None:
            with self._one_save:  # of two threads one finds the keeper
                if self._parts is None:
                    self._parts = self._connect()
                    _begun.add(self)
        return self._parts

    def _connect(self) -> _Opened:
        options, name = self.options, self._name
        if (
            self._tries and not self.place.supervised
        ):  # what the ranks agreed on then is not the number of this attempt
            name += f".{self._tries}"
        self._tries += 1
        session = open_session(options, self.place, self.directory, name)
        buffers = Buffers(session, options.copies, options.memory.when_busy)
        schedule = Schedule(options.intervals, session)
        outcomes = Outcomes(session, options.keeper.remote, schedule.durable)
        session.memory.subscribe(outcomes.event)
        saver = Saver(options, session, buffers, schedule, outcomes, self._position)
        return _Opened(
            session, buffers, schedule, outcomes, saver, Restorer(options.restore, session, buffers)
        )

    def _check_loaders(self, state: Mapping[str, Any]) -> None:
        """Refuses a loader without a position at the first call, before there is anything to lose."""
        if not self._loaders_checked:
            check_loaders(state)
            self._loaders_checked = True

    def _at_exit(self) -> None:
        """A process that ends with a checkpoint pending waits for it, and its exit code says if it failed.

        One that ends by an exception does not: its supervisor has to know at once, and the keeper goes on by itself.
        """
        if getattr(sys, "last_value", None) is not None:
            self._closed = True
            if self._parts is not None:
                self._parts.session.abandon()
            return
        try:
            self.close()
        except NotDurable as e:
            print(f"unbroken: {e}", file=sys.stderr, flush=True)
            os._exit(NotDurable.exit_code)


def _exit_as_not_durable() -> None:
    """A process that ends by this error has its exit code, so that whoever started it knows: all but the last save is done."""
    if isinstance(getattr(sys, "last_value", None), NotDurable):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(NotDurable.exit_code)
