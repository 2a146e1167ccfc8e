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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, NotDurable, UnbrokenError, UsageError
from ..units import Bytes
from ..version import __version__
from . import layout as arena
from .agreement import Agreement, agreement
from .environment import Place, place
from .holdings import Mark
from .keeper_client import KeeperGone
from .ladder import RUNGS, Saved
from .lodging import end_process, own_attempt, own_keeper, supervised_keeper
from .manifest import FileRecord, PartManifest, data_name, tensor_part
from .pinning import Pinning
from .position import Position
from .rank_memory import RankMemory, Slab
from .restore import (
    Landed,
    Offer,
    Restored,
    choose,
    land_from_disk,
    land_from_memory,
    nothing_good,
    offers_of_supervisor,
    offers_without_supervisor,
)
from .rng import capture_rng, restore_rng
from .staging import Copying, CpuStager, CudaStager, Stager, to_device
from .state import Applier, Captured, capture, cuda_device, optimizers_in
from .storage import Storage, open_storage
from .wire import Message

logger = logging.getLogger("unbroken.checkpoint")

_instances = itertools.count()
CLOSE_TIMEOUT_S = 600.0


class Checkpointer:
    """Saves and restores the state of one training; every rank makes one and calls it at the same steps.

    `directory` is a folder or an address (s3://bucket/prefix); under `unbroken run` the run's own. `snapshot_every`
    and `persist_every` are steps: a snapshot lies in the memory of this node's keeper and survives the training
    process; a persisted one is a checkpoint on disk and survives everything. `keep` checkpoints stay on disk.
    `memory` is what the keeper of a node may take (such as "64GiB"; default: 60 % of the machine). `position` gives
    the data position at each save, unless `save` is told. `fenced=True` promises that `fence()` is called before
    anything of the state is changed, not only before optimizer steps. On a GPU, `throttle` bounds its copies in bytes
    per second (such as "20GB"), and `device_copy` tells whether all is copied on the GPU first ("auto": where the
    time until the next optimizer step was measured to be too short for the bus, and the GPU has room).
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        snapshot_every: int = 10,
        persist_every: int = 100,
        keep: int = 3,
        memory: str | int | None = None,
        position: Callable[[], Any] | None = None,
        when_busy: str = "wait",
        buffers: int = 3,
        fenced: bool = False,
        throttle: str | int | None = None,
        device_copy: bool | str = "auto",
        verify: bool = True,
        strict: bool = True,
    ) -> None:
        for name, value in (
            ("snapshot_every", snapshot_every),
            ("persist_every", persist_every),
            ("keep", keep),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} must be a whole number from 1 up, not {value!r}")
        if when_busy not in ("wait", "skip"):
            raise UsageError(f"when_busy must be 'wait' or 'skip', not {when_busy!r}")
        self.place: Place = place()
        self.directory = _directory(directory, self.place)
        self.snapshot_every = snapshot_every
        self.persist_every = persist_every
        self.keep = keep
        self.when_busy = when_busy
        self.fenced = fenced
        self.verify = verify
        self.strict = strict
        self.skipped = 0
        """Saves left out because no buffer was free, or no keeper was there."""
        self._budget = None if memory is None else int(Bytes(memory))
        self._position = position
        self._buffers = buffers
        self._started = False
        self._closed = False
        self._guard = threading.RLock()
        self._saves: dict[Mark, Saved] = {}
        self._last: Saved | None = None
        self._failed: list[str] = []
        self._plan: _Plan | None = None
        self._stager: Stager = CpuStager()
        self._pinning: Pinning | None = None
        self._device_copy = device_copy
        self._throttle = None if throttle is None else float(Bytes(throttle))
        self._number = next(_instances)
        atexit.register(self._at_exit)

    # --- what a training calls

    def due(self, step: int) -> bool:
        """Whether this step is to be saved: every `snapshot_every` or `persist_every` steps."""
        return step % self.snapshot_every == 0 or step % self.persist_every == 0

    def save(
        self, step: int, state: Mapping[str, Any], *, position: Any = None, persist: bool | None = None
    ) -> Saved:
        """Takes the state as it is at this call; the result has a future for each rung that it climbs.

        `persist` tells whether it also goes to disk (default: every `persist_every` steps). Raises UnsaveableState,
        naming the key, for what cannot be saved exactly; trouble of keeper and disk never raises here: it fails
        the futures, is logged, and training goes on.
        """
        self._open()
        persist = step % self.persist_every == 0 if persist is None else persist
        where = _position(position if position is not None else self._position() if self._position else None)
        self._choose_device(state)
        captured = capture(state)
        saved = Saved.climbing(
            step, self.attempt, ["staged", "host", *([self.storage.rung] if persist else [])]
        )
        began = time.monotonic()
        try:
            plan = self._plan_of(captured)
            slab = self._claim(step, plan)
            if slab is not None and self._pinning is not None:
                self._pinning.ensure(slab)
        except KeeperGone as e:
            return self._skip(saved, str(e))
        if slab is None:
            return self._skip(saved, "every buffer is still in use")
        waited = time.monotonic() - began
        if waited > 1.0:
            logger.warning(
                "step %d waited %.1f s for a buffer: checkpoints are asked for faster than written",
                step,
                waited,
            )
        part = {
            **plan.body, "step": step, "attempt": self.attempt, "position": where.as_json(), "values": captured.tree,
            "rng": {"generators": capture_rng(), **captured.notes}, "time": time.time(),
        }  # fmt: skip
        with self._guard:
            self._saves[Mark(self.attempt, step)] = saved
            self._last = saved
        slab.map[: plan.layout.data_start] = plan.layout.header(
            {"step": str(step), "attempt": str(self.attempt), "rank": str(self.place.rank)}
        )
        sealed = {
            "file_bytes": plan.layout.file_bytes, "world_size": self.place.world_size, "part": part,
            "persist": persist,
        }  # fmt: skip

        def whole(copying: Copying) -> None:
            self._copied(copying, slab, saved, sealed)

        protected = frozenset(captured.pieces) if self.fenced else captured.protected
        self._stager.copy(captured.pieces, slab.tensor, plan.layout, protected, whole)
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
            link.request({"op": "release", "restored": None})
            if skipped:
                raise nothing_good(skipped, str(self.directory))
            self._prepare(state)
            return None
        offer, landed = chosen
        notes = landed.part.rng or {}
        base = landed.data.data_ptr()
        applier = Applier(
            landed.tensors(), landed.part.values, notes, offer.name, self.strict,
            copy=lambda live, stored: to_device(live, stored, base),
        )  # fmt: skip
        applier.into(state)
        restore_rng(notes.get("generators") or {})
        source, part = landed.source, landed.part
        if self._pinning is not None:
            torch.cuda.synchronize(self._pinning.device)
        if landed.slab is not None and landed.slab.claimed:
            self.memory.release(landed.slab)
        del applier, landed, chosen
        self.memory.alive().request(
            {"op": "release", "restored": {"attempt": offer.attempt, "step": offer.step}}
        )
        self._prepare(state)
        restored = Restored(
            offer.step, offer.attempt, offer.name, source, part.position, tuple(skipped),
            seconds=time.monotonic() - began,
        )  # fmt: skip
        if self.place.rank == 0:
            logger.info("restored step %d from %s in %.2f s", offer.step, source, restored.seconds)
        return restored

    def fence(self) -> None:
        """To be called before the state is changed in any way, and before each replay of a captured graph.

        Optimizers of torch call it by themselves. It never waits on the processor for a GPU.
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
            saves = list(self._saves.values())
        for saved in saves:
            if rung in saved.rungs():
                saved.wait(rung, None if deadline is None else max(0.0, deadline - time.monotonic()))

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Waits for everything that is to become durable, then lets go. Raises NotDurable if something did not."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        if not self._started:
            return
        self._stager.drain()
        deadline, trouble = time.monotonic() + timeout_s, list(self._failed)
        with self._guard:
            saves = [s for s in self._saves.values() if not s.done]
        for saved in saves:
            for name, future in saved.rungs().items():
                try:
                    future.result(max(0.0, deadline - time.monotonic()))
                except TimeoutError:
                    trouble.append(f"step {saved.step} did not reach {name} within {timeout_s:.0f} s")
                except UnbrokenError as e:
                    trouble.append(e.what)
        self._stager.close()
        self.memory.close()
        if self._last is not None and trouble:
            raise NotDurable(
                "; ".join(dict.fromkeys(trouble))[:500],
                where=f"rank {self.place.rank}, {self.directory}",
                todo="See the keeper's log; the checkpoints before it are whole",
            )

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
        self.storage: Storage = open_storage(self.directory)
        if p.supervised:
            connect, end_mute = supervised_keeper(p), None
            self.attempt = p.attempt or 0
        else:
            own = own_keeper(p, str(self.directory), budget=self._budget, keep=self.keep)
            self.attempt = own_attempt(own, self.agreement, self.storage)
            connect, end_mute = own.connector(self.attempt), end_process
        self.memory = RankMemory(connect, self._event, count=self._buffers, end_mute=end_mute)
        self._started = True

    def _choose_device(self, state: Mapping[str, Any]) -> None:
        """Sets up copying for the device that the state lies on, once."""
        if self._pinning is not None:
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
            self._plan_of(capture(state))
        except UnbrokenError as e:
            logger.warning("buffers for snapshots were not made ahead: %s", e)

    def _obtain(self, offer: Offer) -> Landed:
        landed = land_from_memory(self.memory, offer, self.place.rank, self._pin_beside)
        if landed is None:
            if not offer.on_disk:
                raise CheckpointError("its share is in no memory that is left, and not on disk")
            landed = land_from_disk(
                self.storage, offer.name, self.place.rank, lodge=self._lodge, beside=self._pin_beside,
                verify=self.verify,
            )  # fmt: skip
        if landed.part.world_size != self.place.world_size:
            raise CheckpointError(
                f"it is of {landed.part.world_size} ranks, this run has {self.place.world_size}"
            )
        return landed

    def _lodge(self, size: int) -> Slab | None:
        """A buffer to read a checkpoint into, so that a GPU gets it from registered memory."""
        if self._pinning is None:
            return None
        try:
            rounded = -(-size // arena.ALIGN) * arena.ALIGN
            self.memory.provide(rounded)
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
            pinning, device = self._pinning, self._pinning.device

            def work() -> None:
                torch.cuda.set_device(device)
                pinning.ensure(slab)

            pinned = pool.submit(work)
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
            slabs = self.memory.provide(plan.buffer_bytes)
            if self._pinning is not None:
                self._pinning.begin(slabs)
            self._plan = plan
        return self._plan

    def _claim(self, step: int, plan: _Plan) -> Slab | None:
        if self.when_busy == "wait":
            return self.memory.claim(plan.buffer_bytes, CLOSE_TIMEOUT_S)
        slab = self.memory.claim(plan.buffer_bytes, 0.02)
        # All ranks do as the first one could, so that no snapshot lacks a rank.
        if not self.agreement.decide(f"save/{step}", slab is not None):
            if slab is not None:
                self.memory.release(slab)
            return None
        return slab or self.memory.claim(plan.buffer_bytes, CLOSE_TIMEOUT_S)

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
            logger.error("step %d is not saved: %s", saved.step, copying.error)
            with self._guard:
                self._failed.append(f"step {saved.step}: {copying.error.what}")
            saved.fail(str(copying.error))
            return
        saved.reach("staged")
        self.memory.seal(slab, saved.step, saved.attempt, sealed, time.monotonic() - saved.began)
        saved.reach("host")

    def _event(self, event: Message) -> None:
        kind, step = event.get("event"), event.get("step")
        if step is None:
            return
        mark = Mark(event["attempt"] if event.get("attempt") is not None else self.attempt, step)
        with self._guard:
            saved = self._saves.get(mark)
            if kind == "durable":
                # What is older and still open was superseded or has failed; what is done is forgotten.
                for m in [m for m, s in self._saves.items() if m < mark and s.done]:
                    del self._saves[m]
        if saved is None:
            return
        if kind == "durable":
            saved.reach(self.storage.rung)
        elif kind == "failed":
            why = f"rank {event['rank']}: {event['why']}" if event.get("rank", -1) >= 0 else str(event["why"])
            logger.error("the checkpoint of step %d failed, training goes on: %s", step, why)
            with self._guard:
                self._failed.append(f"step {step}: {why}")
            saved.fail(why, rungs=("disk", "remote"))

    def _at_exit(self) -> None:
        """A process that ends with a checkpoint pending waits for it, and its exit code says if it failed."""
        try:
            self.close()
        except NotDurable as e:
            print(f"unbroken: {e}", file=sys.stderr, flush=True)
            os._exit(NotDurable.exit_code)


class _Plan:
    """Where everything of a state of this shape lies; what of the part never changes from save to save."""

    def __init__(self, captured: Captured, signature: Any, p: Place, memory: RankMemory) -> None:
        self.signature = signature
        self.layout = arena.plan(captured.specs(), captured.aliases)
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
        for key in ("check", "kind", "schema", "file"):
            body.pop(key)
        self.body: dict[str, Any] = body


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


def _directory(directory: str | Path | None, p: Place) -> str:
    if directory is None:
        if p.run_dir is None:
            raise UsageError(
                "there is no folder for checkpoints",
                todo="Give Checkpointer a directory, or start with `unbroken run`",
            )
        return str(p.run_dir / "checkpoints")
    text = str(directory)
    return text if "://" in text else str(Path(text).absolute())
