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

This file is long because the order of things in `save`, `restore` and `close` is what makes them safe, and is read
in one place; what they are made of lies beside it: capture in state.py and recapture.py, copies in staging.py, buffers in
rank_memory.py, where to restore from in restore/selection.py.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import logging
import os
import platform
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, DoesNotFit, NotDurable, UnbrokenError, UsageError
from ..progress import holding_up
from ..units import Bytes, Duration
from ..version import __version__
from .capture.direct import Stamp, write_tensors
from .capture.generators import capture_rng, restore_rng
from .capture.recapture import Capturer
from .capture.state import Captured, cuda_device, optimizers_in
from .catalogue import contents as catalogue
from .catalogue.placement import CLAIMS, place_of, same_place
from .client.discovery import end_process, own_attempt, own_keeper, settle_place, supervised_keeper
from .client.links import KeeperGone
from .client.nodes import PATIENCE_S, Board, gather_nodes, join_ring, peer_addresses
from .client.pinning import Pinning
from .client.rank_memory import RankMemory, Slab
from .device.staging import Copying, CpuStager, CudaStager, Stager
from .device.targets import to_device
from .format import layout as arena
from .format.manifest import FileRecord, Manifest, PartManifest, data_name, tensor_part
from .format.position import Position
from .interval import Meter
from .keeper.holdings import Mark
from .keeper.wire import Encoded, Message
from .levels import RUNGS, Saved
from .ranks.agreement import Agreement, agreement
from .ranks.environment import Place, place
from .restore.apply import Applier, ShardedOtherwise, Taken
from .restore.selection import (
    VOTE_TIMEOUT_S,
    Landed,
    Offer,
    Restored,
    choose,
    land_from_disk,
    land_from_memory,
    land_from_peer,
    nothing_good,
    offers_of_supervisor,
    offers_without_supervisor,
    vote,
)
from .storage import open_storage
from .storage.base import Storage

logger = logging.getLogger("unbroken.checkpoint")

_instances = itertools.count()
CLOSE_TIMEOUT_S = 600.0
SHORT_WAIT_S = 2.0
"""A save that waits longer for a buffer tells the hang detector so. It is not told of an ordinary save: the phase
checkpointing has a deadline of minutes, and a rank that hangs inside a save must be found as fast as any other."""
FIRST_STEPS = 5
"""With automatic intervals: the first save comes after this many steps, before anything is measured."""


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
    the data position at each save, unless `save` is told. `fenced=True` promises that `fence()` is called before
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
        steps = {"snapshot_every": snapshot_every, "persist_every": persist_every}
        for name, value in {**steps, "keep": keep}.items():
            automatic = value == "auto" and name != "keep"
            if not automatic and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise UsageError(f"{name} must be a whole number from 1 up, not {value!r}")
        if when_busy not in ("wait", "skip"):
            raise UsageError(f"when_busy must be 'wait' or 'skip', not {when_busy!r}")
        self.place: Place = place()
        self.directory = place_of(directory, self.place.run_dir)
        self.snapshot_every = snapshot_every
        self.persist_every = persist_every
        self.keep = keep
        self._wishes = {"keep": keep, "keep_every": keep_every, "remote": remote, "peer": peer}
        self._meter: Meter | None = None
        self._next_snapshot = self._next_persist = 0
        self.when_busy = when_busy
        self.fenced = fenced
        self.verify = verify
        self.strict = strict
        self.skipped = 0
        """Saves left out because no buffer was free, or no keeper was there."""
        self.superseded = 0
        """Checkpoints that stayed in memory, because a newer one was whole before the storage had taken those before it."""
        self._superseded_said = 0
        self._budget = None if memory is None else int(Bytes(memory))
        self._room_s = float(Duration(wait_for_room))
        self._position = position
        self._buffers = buffers
        self._started = False
        self._closed = False
        self._guard = threading.RLock()
        self._saving = threading.RLock()
        """One save at a time: a buffer is asked for ahead, and two threads must not be given the same one."""
        self._saves: dict[Mark, list[Saved]] = {}
        """A step that is saved again has several; what happens to its snapshot happens to all of them."""
        self._keeper_of: dict[Mark, str] = {}
        """Which keeper was given each of them: what it had written and not committed when it died, nobody speaks of again."""
        self._fates: dict[Mark, list[Message]] = {}
        """How recent steps ended: another rank may be ahead with one, and fail, before this rank saves it."""
        self._last: Saved | None = None
        self._failed: list[tuple[int, str, str]] = []
        self._refused = False  # whether a storage refused one of them: only then trying again can help
        """(step, rung, why) of saves that nothing newer has made up for."""
        self._plan: _Plan | None = None
        self._capturer = Capturer()
        self._stager: Stager = CpuStager()
        self._pinning: Pinning | None = None
        self._device_copy = device_copy
        self._throttle = None if throttle is None else float(Bytes(throttle))
        self._number = next(_instances)
        self._peers = False
        self._addresses: dict[str, str] = {}
        self._board: Board | None = None
        self._told: Any = None
        atexit.register(self._at_exit)

    # --- what a training calls

    def due(self, step: int) -> bool:
        """Whether this step is to be saved: every `snapshot_every` or `persist_every` steps, the same on all ranks."""
        if self._meter is not None:
            self._meter.step(step, time.monotonic())
        return self._is_due(step, self.snapshot_every, self._next_snapshot) or self._persists(step)

    def _persists(self, step: int) -> bool:
        return self._is_due(step, self.persist_every, self._next_persist)

    def _is_due(self, step: int, every: int | str, following: int) -> bool:
        if isinstance(every, int):
            return step % every == 0
        self._open()
        return step >= following

    def save(
        self, step: int, state: Mapping[str, Any], *, position: Any = None, persist: bool | None = None
    ) -> Saved:
        """Takes the state as it is at this call; the result has a future for each rung that it climbs.

        `persist` tells whether it also goes to disk (default: every `persist_every` steps). Raises UnsaveableState,
        naming the key, for what cannot be saved exactly; trouble of keeper and disk never raises here: it fails
        the futures, is logged, and training goes on. May be called from any thread; saves come one after the other.
        A step is written once: saved again, it has the fate of the first.
        """
        with self._saving:
            return self._save(step, state, position, persist)

    def _save(self, step: int, state: Mapping[str, Any], position: Any, persist: bool | None) -> Saved:
        self._open()
        # Nobody asked for this very step, and no rule keeps it: a newer one makes up for it on a slow storage.
        every = int(self._wishes["keep_every"] or 0)
        periodic = persist is None and not (every and step % every == 0)
        persist = self._persists(step) if persist is None else persist
        where = _position(position if position is not None else self._position() if self._position else None)
        self._choose_device(state)
        captured = self._capturer.capture(state)
        rungs = ["staged", "host", *(["peer"] if self._peers else [])]
        if persist:
            rungs += [self.storage.rung, *(["remote"] if self._wishes["remote"] else [])]
        saved = Saved.climbing(step, self.attempt, rungs)
        try:
            plan = self._plan_of(captured)
            slab = self._claim(step, plan)
            if slab is not None and self._pinning is not None and not slab.pinned:
                with holding_up():
                    self._pinning.ensure(slab)
        except KeeperGone as e:
            return self._skip(saved, str(e))
        except DoesNotFit as e:
            with holding_up():
                return self._save_without_memory(saved, captured, where, persist, e)
        if slab is None:
            return self._skip(saved, "every buffer is still in use")
        waited = time.monotonic() - saved.began
        if waited > 1.0:
            logger.warning(
                "step %d waited %.1f s for a buffer: saves are asked for faster than written", step, waited
            )
        self._note(saved)
        slab.map[: plan.layout.data_start] = plan.header
        changing = {
            "step": step, "attempt": self.attempt, "position": where.as_json(), "values": captured.tree,
            "rng": self._generators(captured), "time": time.time(),
        }  # fmt: skip
        part = plan.body.with_more(changing)
        sealed = {
            "file_bytes": plan.layout.file_bytes, "world_size": self.place.world_size, "part": part,
            "persist": persist, "periodic": periodic,
        }  # fmt: skip

        def whole(copying: Copying) -> None:
            self._copied(copying, slab, saved, sealed)

        protected = frozenset(captured.pieces) if self.fenced else captured.protected
        try:
            self._stager.copy(captured.pieces, slab.tensor, plan.layout, protected, whole)
        except BaseException as e:  # an interrupt too: the buffer goes back, and nobody waits for this save
            self.memory.release(slab)
            self._tell_failure(saved, str(e)[:500] or type(e).__name__)
            if isinstance(e, torch.OutOfMemoryError):  # of copies on the GPU: no reason to end a training
                return saved
            raise
        self._measure(saved, persist)
        return saved

    def restore(self, state: dict[str, Any]) -> Restored | None:
        """Loads the newest checkpoint that verifies on every rank into `state`, in place; None if there is none.

        From the memory of this node's keeper if it is still there, else from disk. Raises NoCheckpoint if
        checkpoints are there and none is good, LayoutMismatch if the state has other names, shapes or types.
        """
        self._open()
        began = time.monotonic()
        self._choose_device(state)
        link = self.memory.alive()
        answer, _ = link.request({"op": "candidates"})
        skipped: list[tuple[str, str]] = []
        if answer["supervised"]:
            offers = offers_of_supervisor(answer["candidates"])
        else:
            offers, skipped = offers_without_supervisor(self.agreement, link, self.storage, self.place.node)
        chosen = choose(self.agreement, offers, self._obtain, skipped, f"restore/{next(self._rounds)}")
        if chosen is None:
            link.request({"op": "release", "restored": None, "skipped": skipped})
            if skipped:
                raise nothing_good(skipped, str(self.directory))
            self._prepare(state)
            return None
        offer, got = chosen
        resharded = isinstance(got, Manifest)
        if isinstance(got, Landed):
            source, position = got.source, got.part.position
            try:
                self._load(offer, got, state)
            except ShardedOtherwise:
                if not offer.on_disk:
                    raise
                resharded = True
        if resharded:
            # Imported here: torch.distributed.checkpoint takes a second, and most restores never need it.
            from .restore.relayout import load_elsewhere

            manifest, taken = load_elsewhere(self._storage_of(offer), offer.name, state, strict=self.strict)
            position, source = manifest.position, self.storage.rung
            _warn_of_rest(offer.name, taken)
        del got, chosen
        self.memory.alive().request(
            {"op": "release", "restored": {"attempt": offer.attempt, "step": offer.step}, "skipped": skipped}
        )
        self._prepare(state)
        restored = Restored(
            offer.step, offer.attempt, offer.name, source, position, tuple(skipped), resharded,
            time.monotonic() - began, durable=offer.on_disk,
        )  # fmt: skip
        if self.place.rank == 0:
            logger.info("restored step %d from %s in %.2f s", offer.step, source, restored.seconds)
        return restored

    def fence(self) -> None:
        """To be called before the state is changed in any way, and before each replay of a captured graph.

        Optimizers of torch call it by themselves. It waits on the processor for no copy, at most for room in the driver's
        queue where more than about a thousand are left.
        """
        self._stager.fence()

    def wait(self, rung: str = "disk", timeout_s: float | None = None) -> None:
        """Waits until every save that climbs to this rung has reached it. Raises StorageError, TimeoutError."""
        if rung not in RUNGS:
            raise UsageError(f"there is no rung '{rung}'", todo=f"Rungs are: {', '.join(RUNGS)}")
        if rung == "disk" and self._started:
            rung = self.storage.rung
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._guard:
            saves = list(itertools.chain(*self._saves.values()))
        with holding_up():
            for saved in saves:
                if rung in saved.rungs():
                    saved.wait(rung, None if deadline is None else max(0.0, deadline - time.monotonic()))

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Waits for everything that is to become durable, then lets go.

        Raises NotDurable if something did not, and nothing newer made up for it.
        """
        with self._saving:  # a save of another thread ends first
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self._at_exit)
        if not self._started:
            return
        with holding_up():
            trouble = self._settle(timeout_s)
        if self._last is not None and trouble:
            atexit.register(_exit_as_not_durable)
            raise NotDurable(
                "; ".join(dict.fromkeys(trouble))[:500],
                where=f"rank {self.place.rank}, {self.directory}",
                todo="See the keeper's log; the checkpoints before it are whole",
            )

    def _settle(self, timeout_s: float) -> list[str]:
        """Waits for what still climbs and lets go of everything; what did not arrive, in words."""
        self._stager.drain()
        deadline, late = time.monotonic() + timeout_s, []
        with self._guard:
            saves = [s for s in itertools.chain(*self._saves.values()) if not s.done]
        for saved in saves:
            for name, future in saved.rungs().items():
                try:
                    future.result(max(0.0, deadline - time.monotonic()))
                except TimeoutError:
                    late.append(f"step {saved.step} did not reach {name} within {timeout_s:.0f} s")
                except UnbrokenError:
                    continue  # it is in `_failed`, unless something newer has made up for it
        self._insist()
        # Looked at only now: what was waited for may make up for what had failed before.
        with self._guard:
            trouble = [*(why for _, _, why in self._failed), *late]
        self._stager.close()
        if self._board is not None:
            self._board.close()
        self.memory.close()
        return trouble

    def _insist(self) -> None:
        """Lets the keeper try on where the storage refused a save: the last one makes up for all before it, and this is the end."""
        with self._guard:
            waits = any(rung == "disk" for _, rung, _ in self._failed) and self._refused
        if not waits or self._last is None:
            return
        step = self._last.step
        try:
            link = self.memory.alive(5.0)
            room_s = float(link.info.get("room_s", 0.0))
            link.request({"op": "insist", "step": step}, timeout_s=room_s + 60.0)
        except UnbrokenError as e:
            logger.error("step %d is not on disk: %s", step, e)
            return
        with self._guard:
            self._failed = [f for f in self._failed if f[1] != "disk" or f[0] > step]

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        # After an exception the keeper makes the last whole snapshot durable by itself.

    # --- how it works

    def _open(self) -> None:
        """Finds or starts the keeper and the other ranks, at the first use."""
        if self._closed:
            raise UsageError("this Checkpointer is closed")
        if self._started:
            return
        p = self.place
        self._rounds = itertools.count()
        self.agreement: Agreement = agreement(p.rank, p.world_size, f"{self._number}")
        self._agree_on_place()
        self.storage: Storage = open_storage(self.directory)
        if p.supervised:
            connect = supervised_keeper(p, self._wishes)
            self.attempt = p.attempt or 0
        else:
            own = own_keeper(p, str(self.directory), budget=self._budget, keep=self.keep, room_s=self._room_s)
            self.attempt = own_attempt(own, self.agreement, self.storage)
            connect = own.connector(self.attempt, self._wishes)
        self.memory = RankMemory(connect, self._event, count=self._buffers, end_mute=end_process)
        if p.supervised:
            settle_place(self.memory, self.directory)
        self._started = True
        nodes = gather_nodes(self.agreement, p, self.memory) if p.world_size > 1 else [p.node]
        self._peers = bool(self._wishes["peer"]) and self._ring(nodes)
        if len(nodes) > 1:
            self._board = Board(
                self.agreement, self.memory, asks=p.local_rank == 0 or not p.supervised,
                patience_s=PATIENCE_S if p.supervised else 0.0,
            )  # fmt: skip
        if "auto" in (self.snapshot_every, self.persist_every):
            files = [e.modified for e in self.storage.files(CLAIMS)]
            self._meter = Meter(p.world_size, self.attempt - 1, min(files, default=time.time()))
            self._next_snapshot = self._next_persist = FIRST_STEPS

    def _agree_on_place(self) -> None:
        """Raises UsageError, on every rank, where one names another place than rank 0."""
        a = self.agreement
        if a.world_size == 1:
            return
        if a.rank == 0:
            a.publish("place", self.directory)
        first = str(a.read("place", timeout_s=VOTE_TIMEOUT_S))
        why = "" if same_place(first, self.directory) else f"it has {self.directory}, rank 0 has {first}"
        if reasons := vote(a, "place", why):
            raise UsageError(
                f"the ranks name different folders for checkpoints: {reasons[0]}",
                todo="Give Checkpointer the same folder on every rank (a relative one depends on the current folder)",
            )

    def _storage_of(self, offer: Offer) -> Storage:
        """Where this offer lies on disk."""
        if not offer.place or same_place(offer.place, self.directory):
            return self.storage
        return open_storage(offer.place)

    def _ring(self, nodes: list[str]) -> bool:
        """Tells this node's keeper which node holds its copies; False with a single node."""
        if len(nodes) < 2:
            logger.warning("peer=True, but all ranks are on one node: nothing is copied to another")
            return False
        join_ring(self.agreement, self.place, self.memory, nodes)
        self._addresses = peer_addresses(self.agreement, nodes)
        return True

    def _choose_device(self, state: Mapping[str, Any]) -> None:
        """Sets up copying for the device that the state lies on, once."""
        if self._pinning is not None or self._plan is not None:
            return
        device = cuda_device(state)
        if device is not None:
            self._pinning = Pinning(device)
            self._stager = CudaStager(device, throttle=self._throttle, device_copy=self._device_copy)

    def _prepare(self, state: dict[str, Any]) -> None:
        """Lets buffers be made and registered now, beside the start of the training, not at the first save.

        Optimizers make their state at their first step: where it is not there yet, after that.
        """
        lazy = [o for o in optimizers_in(state) if not o.state]
        if lazy:
            _after_first_step(lazy, weakref.WeakMethod(self._make_buffers), state)
        else:
            self._make_buffers(state)

    def _make_buffers(self, state: Mapping[str, Any]) -> None:
        try:
            self._plan_of(self._capturer.capture(state))
        except UnbrokenError as e:
            logger.warning("buffers for snapshots were not made ahead: %s", e)

    def _obtain(self, offer: Offer) -> Landed | Manifest:
        """This rank's share of an offer, verified; of a checkpoint of another world size its manifest."""
        landed = None
        if not offer.brought:
            landed = land_from_memory(self.memory, offer, self.place.rank, self._pin_beside)
        if landed is None and (address := self._addresses.get(offer.memory.get(self.place.rank, ""))):
            landed = land_from_peer(self.memory, offer, self.place.rank, self._pin_beside, address)
        if landed is None:
            if not offer.on_disk:
                raise CheckpointError("its share is in no memory that is left, and not on disk")
            if (
                catalogue.read_committed(self._storage_of(offer), offer.name).world_size
                != self.place.world_size
            ):
                from .restore.relayout import verify_share

                return verify_share(
                    self._storage_of(offer), offer.name, self.place.rank, self.place.world_size
                )
            landed = land_from_disk(
                self._storage_of(offer), offer.name, self.place.rank, lodge=self._lodge, beside=self._pin_beside,
                verify=self.verify,
            )  # fmt: skip
        if landed.part.world_size != self.place.world_size:
            if offer.on_disk:
                from .restore.relayout import verify_share

                return verify_share(
                    self._storage_of(offer), offer.name, self.place.rank, self.place.world_size
                )
            raise CheckpointError(
                f"it is of {landed.part.world_size} ranks, this run has {self.place.world_size}"
            )
        return landed

    def _load(self, offer: Offer, landed: Landed, state: dict[str, Any]) -> None:
        """Puts a landed share into the live state."""
        notes = landed.part.rng or {}
        base = landed.data.data_ptr()
        applier = Applier(
            landed.tensors(), landed.part.values, notes, offer.name, self.strict,
            weights_only=landed.part.run_id == "imported-weights", imported=landed.part.run_id.startswith("imported"),
            copy=lambda live, stored: to_device(live, stored, base),
        )  # fmt: skip
        taken = applier.into(state)
        _warn_of_rest(offer.name, taken)
        restore_rng(notes.get("generators") or {})
        if self._pinning is not None:
            self._pinning.wait()
        if landed.slab is not None and landed.slab.claimed:
            self.memory.release(landed.slab)

    def _lodge(self, size: int) -> Slab | None:
        """A buffer to read a checkpoint into, so that a GPU gets it from registered memory."""
        if self._pinning is None:
            return None
        try:
            rounded = -(-size // arena.ALIGN) * arena.ALIGN
            self.memory.provide(rounded, 1)  # the others would compete for the memory's bandwidth now
            return self.memory.claim(rounded, 10.0)
        except UnbrokenError as e:
            logger.info("reading without a registered buffer: %s", e)
            return None

    @contextlib.contextmanager
    def _pin_beside(self, slab: Slab | None) -> Iterator[None]:
        """Registers the buffer while its bytes are read or verified."""
        if slab is None or self._pinning is None:
            yield
            return
        with ThreadPoolExecutor(1) as pool:
            pinned = pool.submit(self._pinning.ensure, slab)
            yield
            try:
                pinned.result()
            except CheckpointError as e:
                logger.warning("%s", e)

    def _plan_of(self, captured: Captured) -> _Plan:
        """The layout of this state, and buffers for it; made anew when the state's shape has changed."""
        signature = captured.signature()
        if self._plan is None or self._plan.signature != signature:
            plan = _Plan(captured, signature, self.place, self.memory)
            with holding_up():
                slabs = self.memory.provide(plan.buffer_bytes)
            if self._pinning is not None:
                self._pinning.begin(slabs)
            else:
                self.memory.enter(slabs)
            self._plan = plan
        return self._plan

    def _claim(self, step: int, plan: _Plan) -> Slab | None:
        if self.when_busy == "wait":
            return self._buffer(plan)
        slab = self.memory.claim(plan.buffer_bytes, 0.02)
        # All ranks do as the first one could, so that no snapshot lacks a rank.
        if not self.agreement.decide(f"save/{step}", slab is not None):
            if slab is not None:
                self.memory.release(slab)
            return None
        return slab or self._buffer(plan)

    def _buffer(self, plan: _Plan) -> Slab | None:
        with contextlib.suppress(KeeperGone):  # its successor may need a while
            if slab := self.memory.claim(plan.buffer_bytes, SHORT_WAIT_S):
                return slab
        with holding_up():
            return self.memory.claim(plan.buffer_bytes, CLOSE_TIMEOUT_S)

    def _generators(self, captured: Captured) -> dict[str, Any]:
        return {"generators": capture_rng(), **captured.notes}

    def _note(self, saved: Saved) -> None:
        with self._guard:
            for m in [m for m, saves in self._saves.items() if _done(saves)][:-64]:
                del self._saves[m]
            mark = Mark(self.attempt, saved.step)
            self._saves.setdefault(mark, []).append(saved)
            self._keeper_of.setdefault(mark, self.memory.keeper_id)
            for m in [m for m in self._keeper_of if m not in self._saves]:
                del self._keeper_of[m]
            self._last = saved
            told = list(self._fates.get(mark, ()))
        for event in told:  # the keeper writes a step once and does not say it again
            self._befall([saved], event)

    def _measure(self, saved: Saved, persist: bool) -> None:
        """Where intervals are automatic: what this save cost, and when the next ones are due, the same on all ranks."""
        if self._meter is None:
            return
        self._meter.saved(time.monotonic() - saved.began + getattr(self._stager, "last_stall_s", 0.0))
        proposal = self._meter.decide()
        told = self.agreement.decide(f"interval/{saved.step}", None if proposal is None else asdict(proposal))
        snapshot, every = (told["snapshot"], told["persist"]) if told else (FIRST_STEPS, 2 * FIRST_STEPS)
        if told and told != self._told and self.place.rank == 0:
            logger.info("a snapshot every %d steps, a checkpoint every %d: %s", snapshot, every, told["why"])
        self._told = told
        self._next_snapshot = saved.step + snapshot
        if persist:
            self._next_persist = saved.step + every

    def _save_without_memory(
        self, saved: Saved, captured: Captured, where: Position, persist: bool, why: DoesNotFit
    ) -> Saved:
        """The slower path where the keeper has no room for a snapshot: this process writes its share itself."""
        if not persist:
            return self._skip(saved, f"{why.what}; only what goes to disk is saved")
        logger.warning(
            "%s; step %d is written by the training process, which waits for it", why.what, saved.step
        )
        self._note(saved)
        p = self.place
        run_id = str(self.memory.link.info["run_id"])
        stamp = Stamp(run_id, self.attempt, saved.step, p.rank, p.world_size, where)
        try:
            write_tensors(self.storage, captured.live, captured.tree, stamp, rng=self._generators(captured))
            self.memory.alive().request({"op": "wrote", "step": saved.step, "world_size": p.world_size})
        except (UnbrokenError, OSError) as e:
            self._tell_failure(saved, str(e))
            return saved
        saved.reach("staged")
        saved.fail("the keeper has no room for a snapshot", rungs=("host", "peer"))
        return saved

    def _tell_failure(self, saved: Saved, why: str) -> None:
        """This rank will not have this step: the others hear it from their keepers."""
        logger.error("step %d is not saved: %s", saved.step, why)
        with self._guard:
            self._failed.append((saved.step, "disk", f"step {saved.step}: {why}"))
        saved.fail(why)
        with contextlib.suppress(UnbrokenError):
            self.memory.link.post(
                {"op": "give_up", "step": saved.step, "why": why, "world_size": self.place.world_size}
            )

    def _skip(self, saved: Saved, why: str) -> Saved:
        self.skipped += 1
        logger.warning("step %d is not saved: %s", saved.step, why)
        saved.skipped = why
        saved.staged = saved.host = saved.peer = saved.disk = saved.remote = None
        return saved

    def _copied(self, copying: Copying, slab: Slab, saved: Saved, sealed: dict[str, Any]) -> None:
        """The copy has ended: the buffer is whole, or will never be."""
        if copying.error is not None:
            self.memory.release(slab)
            self._tell_failure(saved, copying.error.what)
            return
        saved.reach("staged")
        self.memory.seal(slab, saved.step, saved.attempt, sealed, time.monotonic() - saved.began)
        saved.reach("host")
        if self._board is not None:
            self._board.on_host(saved.step)

    def _event(self, event: Message) -> None:
        kind, step = event.get("event"), event.get("step")
        if step is None:
            return
        mark = Mark(event["attempt"] if event.get("attempt") is not None else self.attempt, step)
        if kind == "complete" and mark.attempt == self.attempt and self._board is not None:
            self._board.known(step)
        with self._guard:
            saves = list(self._saves.get(mark, ()))
            # Without an attempt it is a refused buffer: of that save alone, not of the step.
            if (
                kind in ("durable", "failed", "superseded", "remote", "remote_failed")
                and event.get("attempt") is not None
            ):
                self._fates.setdefault(mark, []).append(event)
                for m in sorted(self._fates)[:-64]:
                    del self._fates[m]
            if kind == "durable":
                # What is older and still open was superseded or has failed; what is done is forgotten.
                for m in [m for m, older in self._saves.items() if m < mark and _done(older)]:
                    del self._saves[m]
            if kind in ("durable", "remote"):
                # A newer checkpoint that is whole makes up for an older one that failed.
                rung = "disk" if kind == "durable" else "remote"
                self._failed = [f for f in self._failed if f[1] != rung or f[0] >= step]
        if kind == "durable" and event.get("attempt") == self.attempt:
            for orphans in self._orphans_before(mark):
                self._note_superseded(orphans, step, "its keeper died before it was committed")
        if saves:
            if kind == "durable" and self._meter is not None:
                self._meter.durable(time.monotonic() - saves[-1].began)
            self._befall(saves, event)

    def _befall(self, saves: list[Saved], event: Message) -> None:
        """Lets what the keeper tells of a step happen to the saves of it."""
        kind, step = event.get("event"), saves[-1].step
        if kind == "durable":
            _reach(saves, self.storage.rung)
        elif kind == "peer" and event.get("rank") == self.place.rank:
            _reach(saves, "peer")
        elif kind == "remote":
            _reach(saves, "remote")
        elif kind == "remote_failed":
            logger.error("step %d did not reach %s: %s", step, self._wishes["remote"], event["why"])
            with self._guard:
                self._failed.append((step, "remote", f"step {step}, remote: {event['why']}"))
            for saved in saves:
                saved.fail(str(event["why"]), rungs=("remote",))
        elif kind == "superseded":
            self._note_superseded(saves, int(event["by"]))
        elif kind == "waiting":
            logger.warning(
                "step %d is in memory and waits for the storage, for up to %.0f s: %s", step, event["seconds"],
                event["why"],
            )  # fmt: skip
        elif kind == "failed":
            why = f"rank {event['rank']}: {event['why']}" if event.get("rank", -1) >= 0 else str(event["why"])
            logger.error("the checkpoint of step %d failed, training goes on: %s", step, why)
            with self._guard:
                self._failed.append((step, "disk", f"step {step}: {why}"))
                self._refused |= bool(event.get("refused"))
            for saved in saves:
                saved.fail(why, rungs=("disk", "remote"))

    def _orphans_before(self, mark: Mark) -> list[list[Saved]]:
        """Older saves that are open, of a keeper that is gone: `mark`, which is durable, makes up for them."""
        with self._guard:
            now = self.memory.keeper_id
            return [
                list(saves)
                for m, saves in self._saves.items()
                if m < mark and not _done(saves) and self._keeper_of.get(m, now) != now
            ]

    def _note_superseded(
        self,
        saves: list[Saved],
        by: int,
        why: str = "checkpoints are asked for faster than the storage takes them",
    ) -> None:
        """A checkpoint was never begun, because the storage is slower than saves are asked for: it says so, seldom."""
        step = saves[-1].step
        self.memory.note(saves[-1].attempt, step, persist=False)
        for saved in saves:
            saved.fail(f"superseded by step {by}: {why}",
                       rungs=("disk", "remote"))  # fmt: skip
        self.superseded += 1
        if self.superseded >= 2 * self._superseded_said:
            self._superseded_said = self.superseded
            logger.warning(
                "%s: step %d is left out for step %d (%d so far)",
                why, step, by, self.superseded,
            )  # fmt: skip

    def _at_exit(self) -> None:
        """A process that ends with a checkpoint pending waits for it, and its exit code says if it failed.

        One that ends by an exception does not: its supervisor has to know at once, and the keeper goes on by itself.
        """
        if getattr(sys, "last_value", None) is not None:
            self._closed = True
            if self._started:
                self.memory.closing = True
                self.memory.link.disconnect()
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


def _warn_of_rest(name: str, taken: Taken) -> None:
    """Says what a restore that is not strict did not load."""
    if taken.left or taken.unused:
        logger.warning(
            "of %s %d names were loaded; not in it, and left as they were: %s; only in it, and not loaded: %s",
            name, len(taken.names), _some(taken.left), _some(taken.unused),
        )  # fmt: skip


def _some(names: tuple[str, ...]) -> str:
    return (
        ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "none"
    )


def _done(saves: Iterable[Saved]) -> bool:
    return all(s.done for s in saves)


def _reach(saves: Iterable[Saved], rung: str) -> None:
    for saved in saves:
        saved.reach(rung)


class _Plan:
    """Where everything of a state of this shape lies; what of the part never changes from save to save."""

    def __init__(self, captured: Captured, signature: Any, p: Place, memory: RankMemory) -> None:
        self.signature = signature
        self.layout = arena.plan(captured.specs(), captured.aliases)
        self.header = self.layout.header({"rank": str(p.rank)})
        # A little more than needed: values of other lengths must not ask for new buffers.
        self.buffer_bytes = -(-self.layout.file_bytes // arena.ALIGN) * arena.ALIGN
        tensors = {
            name: tensor_part(p.rank, self.layout, name, dtype, sharding)
            for name, (dtype, sharding) in captured.tensors.items()
        }
        run_id = str(memory.link.info["run_id"])
        versions = {
            "unbroken": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        }
        record = FileRecord(data_name(p.rank), self.layout.file_bytes, ())
        part = PartManifest(
            run_id, 0, 0, p.rank, p.world_size, tensors, record, aliases=captured.aliases, versions=versions
        )
        body = json.loads(part.encoded)
        for key in (
            "check", "kind", "schema", "file", "step", "attempt", "position", "values", "rng", "time",
        ):  # fmt: skip
            body.pop(key, None)
        self.body = Encoded(body)


def _after_first_step(
    waiting: list[torch.optim.Optimizer],
    make: weakref.WeakMethod[Callable[[Any], None]],
    state: dict[str, Any],
) -> None:
    """Calls `make(state)` once, after every one of these optimizers has made its state."""

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        if all(o.state for o in waiting):
            handle.remove()
            target = make()
            if target is not None:
                target(state)

    from torch.optim.optimizer import register_optimizer_step_post_hook

    handle = register_optimizer_step_post_hook(torch._disable_dynamo(hook))  # type: ignore[attr-defined]


def _position(value: Any) -> Position:
    if value is None:
        return Position()
    if isinstance(value, Position):
        return value
    if not isinstance(value, Mapping):
        value = getattr(value, "as_json", lambda: value)()
    try:
        return Position.from_json(
            {"epoch": 0, "samples": [], "skips": [], "fingerprint": "", **value}, "position"
        )
    except (TypeError, CheckpointError) as e:
        raise UsageError(
            f"the data position cannot be saved: {e}",
            todo="Give {'epoch': 0, 'samples': [[start, stop]], 'skips': []} in absolute sample numbers",
        ) from None
