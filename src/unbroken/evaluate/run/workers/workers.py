"""The workers that an evaluation starts: begun once the model is here, replaced when they end, ended when they hang."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from dataclasses import dataclass, replace

from ....errors import EvaluationError
from ...engines import Slot
from ...engines.live import WorkerLink
from ...model.cache import ModelReference, take_reference
from ...plan.dispatch import Dispatcher
from ..state import EvaluationRun

RESTARTS = 3
"""A worker's place is filled again so often without one answered block in between."""


@dataclass
class StartedWorker:
    """One worker that was started here."""

    slot: Slot
    started: float
    tries: int = 0
    """How often it was filled again since a worker in it answered a block."""
    ended: bool = False
    """It ended, or was ended because it had not connected."""


class Workers:
    """The engine's workers. `links` holds those that are connected, joined ones too."""

    def __init__(
        self,
        run: EvaluationRun,
        dispatcher: Dispatcher,
        links: dict[str, WorkerLink],
        standing_by: asyncio.Task[None],
    ) -> None:
        """`standing_by`: starts processes that import ahead; ended once the workers themselves are started."""
        self.run = run
        self.engine = run.launchers.engine
        self.dispatcher = dispatcher
        self.links = links
        self.standing_by = standing_by
        self.places: dict[str, StartedWorker] = {}
        self.staffed = False
        """Every worker of the settings was started."""
        self._why_ended = "all ended"
        self._alone_since: float | None = None

    async def begin(self, stack: contextlib.AsyncExitStack) -> None:
        """Starts them, once this node has its copy of the model; others may have joined and begun by then."""
        await self._hold_copy(stack)
        if self.run.located.held is not None:
            self.run.located.held.release()
        observed = self.run.observed
        if not observed.gpu_end:
            self.standing_by.cancel()
            observed.started = observed.started or time.time()
            for slot in self.run.settings.slots:
                self._start(slot)
        self.staffed = True

    def watch(self) -> None:
        """Fills the places of workers that ended; ends those that hang; ends the run when nobody is left."""
        self._replace_ended()
        now = time.monotonic()
        for link in list(self.links.values()):
            self._end_hanging(link, now)
        self._end_silent()
        self._end_without_workers(now)

    def has_answered(self, name: str) -> None:
        """This worker is in order: should it end, its place is filled again as often as the first time."""
        if name in self.places:
            self.places[name].tries = 0

    def give_up(self, name: str) -> None:
        """This worker's place is not filled again."""
        if name in self.places:
            self.places[name].tries = RESTARTS

    def end_unconnected(self) -> None:
        """Ends those that have not connected yet, and would find nobody."""
        for name in self.places:
            if name not in self.links:
                self.engine.end(name)

    def _start(self, slot: Slot, tries: int = 0) -> None:
        self.places[slot.name] = StartedWorker(slot, time.time(), tries)
        self.engine.start(slot, self.run.job.folder.cluster)

    async def _hold_copy(self, stack: contextlib.AsyncExitStack) -> None:
        """Keeps this node's copy while workers come and go; fetches it if it is not there."""
        found, settings = self.run.located, self.run.settings
        if not found.cached or self.engine.remote or not settings.slots:
            return
        if found.source is None or found.manifest is None:
            return
        halt = self.run.control.fetches_end
        take = functools.partial(take_reference, found.source, found.manifest, settings.places, halt=halt)
        taking = asyncio.get_running_loop().run_in_executor(None, take)
        stack.push_async_callback(_give_back, taking)
        await asyncio.shield(taking)

    def _replace_ended(self) -> None:
        going_on = self.run.control.problem is None and not self.run.control.stopping
        for gone in self.engine.ended():
            place = self.places.get(gone.name)
            slot, tries = (place.slot, place.tries) if place else (Slot(gone.name), 0)
            self.run.log.note("ended", worker=gone.name, why=gone.why)
            if going_on and tries < RESTARTS:
                if place:
                    place.ended = True
                base, _, count = slot.name.partition(".")
                self._start(replace(slot, name=f"{base}.{int(count or 1) + 1}"), tries + 1)
            else:
                self._why_ended = gone.why
                self.places.pop(gone.name, None)

    def _end_hanging(self, link: WorkerLink, now: float) -> None:
        settings = self.run.settings
        if link.at[1] >= 0 and self.dispatcher.is_open(link.at):
            expected_s = self.dispatcher.expected([link.at])
            if now - link.since > max(settings.stall_s, settings.stall_factor * expected_s):
                self._hang(link, f"it has been at one block for {now - link.since:.0f} s")
        if now - link.heard > max(60.0, 20 * settings.beat_s):
            self._hang(link, f"it has reported nothing for {now - link.heard:.0f} s")

    def _hang(self, link: WorkerLink, why: str) -> None:
        self.run.log.note("hang", worker=link.name, why=why, task=link.at[0], block=link.at[1])
        self.engine.end(link.name)
        link.writer.close()

    def _end_silent(self) -> None:
        """Ends workers of this machine that have not connected (elsewhere they may wait for a place)."""
        if self.engine.remote:
            return
        for name, place in self.places.items():
            silent_s = time.time() - place.started
            if name not in self.links and not place.ended and silent_s > self.run.settings.stall_s:
                self.run.log.note("hang", worker=name, why=f"it has not connected for {silent_s:.0f} s")
                place.ended = True
                self.engine.end(name)

    def _end_without_workers(self, now: float) -> None:
        settings, root = self.run.settings, self.run.job.folder.root
        if settings.slots:
            if not self.links and self.engine.running() == 0 and self.staffed:
                self.run.control.abort(
                    EvaluationError(f"no worker is left: {self._why_ended}", where=f"{root}/logs",
                                    hint="See the workers' logs; the same command goes on where it was"))  # fmt: skip
            return
        if self.links or not settings.wait_for_workers_s:
            self._alone_since = None
            return
        self._alone_since = self._alone_since or now
        if now - self._alone_since > settings.wait_for_workers_s:
            hint = "Start `unbroken eval join` where GPUs are free"
            self.run.control.abort(EvaluationError("no worker joined", where=str(root), hint=hint))


async def _give_back(taking: asyncio.Future[ModelReference]) -> None:
    """Releases what was taken; where it is being fetched still, as soon as that has stopped."""
    try:
        held = await taking
    except Exception:  # noqa: BLE001  then nothing was taken, which is reported where it was awaited
        return
    held.release()
