"""Watches an attempt until it ends, in whatever way."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Mapping
from dataclasses import replace

from ....detect import Hang, HangPicture, Level, ProcessInfo
from ....link.runs import pack
from ....progress import RunDir
from ....progress.rundir import WAITING
from ....waiting import wait_within
from ..accept.placing import CheckpointPlace
from ..attempt.attempt import Attempt
from ..attempt.following import Following, ends_normally
from ..attempt.hang import explain, write_picture
from ..attempt.outcome import AttemptOutcome, name_loss
from ..fence.stopping import Stopping
from ..launch.amending import Amending
from ..launch.replacing import Replacing
from ..launch.resizing import Resizing
from ..nodes.fleet import Fleet
from ..nodes.keepers import Keepers
from ..record.background import Background
from ..record.clock import Clock
from ..record.recorder import Recorder
from ..record.stop_request import StopRequest
from ..record.term import TermWatch
from ..screen.view import View
from . import stacks
from .corruption import CorruptionJudge
from .loss import LossJudge
from .slow import SlowJudge

_TICK_S = 0.1
_POLLS = 20
"""So often hangs are looked for within the time after which one is suspected, between once and ten times a second."""
_SLOWEST_S = 1.0
_LOOK_S = 30.0
_OLD_S = 20.0
_MOST_NATIVE = 8
_NAMED = 4
_Looking = asyncio.Task[Mapping[int, ProcessInfo]]


class Watching:
    """Notices what ends an attempt; collects stacks where it may hang."""

    def __init__(
        self,
        run_dir: RunDir,
        fleet: Fleet,
        keepers: Keepers,
        place: CheckpointPlace,
        stopping: Stopping,
        following: Following,
        losses: LossJudge,
        slow: SlowJudge,
        corruption: CorruptionJudge,
        suspect_s: float,
        recorder: Recorder,
        background: Background,
        term: TermWatch,
        stop: StopRequest,
        view: View,
        clock: Clock,
        changed: asyncio.Event,
        amending: Amending,
        resizing: Resizing,
        replacing: Replacing,
    ) -> None:
        """`suspect_s`: after so long without a step a hang is suspected."""
        self._amending, self._resizing, self._replacing = amending, resizing, replacing
        self._run_dir, self._fleet, self._keepers, self._place = run_dir, fleet, keepers, place
        self._stopping, self._following, self._recorder = stopping, following, recorder
        self._slow, self._losses, self._corruption = slow, losses, corruption
        self._suspect_s = suspect_s
        self._background, self._term, self._stop = background, term, stop
        self._view, self._clock, self._changed = view, clock, changed

    async def watch(self, attempt: Attempt) -> AttemptOutcome:
        """How the attempt ended. Raises Superseded."""
        leaving = _Leaving()
        try:
            return await self._watch(attempt, leaving)
        finally:
            leaving.cancel()  # the ranks of an attempt that is over are asked for nothing
            self._replacing.rest()

    async def _watch(self, attempt: Attempt, leaving: _Leaving) -> AttemptOutcome:
        suspicion = _Suspicion()
        judging = _Every(max(_TICK_S, min(_SLOWEST_S, self._suspect_s / _POLLS)))
        ticking = _Every(_TICK_S)
        while True:
            self._changed.clear()
            now = self._clock.monotonic()
            self._term.check()
            if ticking.is_due(now):
                self._recorder.write_later()
                self._view.progress(attempt, attempt.tracker)
            if attempt.all_finished:
                if self._amending.is_due:
                    return AttemptOutcome("amended")
                # A script may end well where it was asked to stop, long before its last step.
                early = bool(leaving.why) and attempt.total is not None and attempt.step < attempt.total
                return (
                    AttemptOutcome(leaving.kind, error=leaving.why) if early else AttemptOutcome("completed")
                )
            if lost := self._fleet.find_lost(attempt.nodes):
                return AttemptOutcome(name_loss(lost), nodes=lost)
            if self._place.refusal is not None:
                return AttemptOutcome("refused")
            if self._place.collided:
                return AttemptOutcome("renumbered")
            if not self._stop and not leaving.why:
                if self._amending.is_due:
                    leaving.kind, leaving.why = "amended", self._amending.why()
                else:
                    leaving.why = self._find_preemption(attempt)
                    if not leaving.why and (why := self._resizing.find_growth(attempt)):
                        leaving.kind, leaving.why = "resized", why
                if not leaving.why and (why := await self._slow.judge(attempt)):
                    leaving.kind, leaving.why = "slow", why
            if self._stop or leaving.why:
                leaving.task = leaving.task or asyncio.create_task(
                    self._stopping.stop_ranks(attempt, leaving.why)
                )
                if attempt.all_ended or leaving.task.done():
                    await leaving.task
                    if self._stop:
                        return AttemptOutcome("interrupted")
                    return AttemptOutcome(leaving.kind, error=leaving.why)
            elif kind := _judge_exits(attempt):
                return AttemptOutcome(kind)
            elif loss := await self._losses.judge(attempt):
                return AttemptOutcome("loss_spike", loss=loss)
            elif corruption := await self._corruption.judge(attempt):
                return AttemptOutcome("corrupted", corruption=corruption)
            if judging.is_due(now):
                if words := self._following.news(attempt, self._clock.wall()):
                    self._view.say(words)
                hang = self._poll_hang(attempt)
                looking = await self._suspect(attempt, hang, suspicion)
                if looking is not None and hang.level is Level.DECLARED:
                    return AttemptOutcome("hung", hang=hang, processes=await looking)
            try:
                await wait_within(self._changed.wait(), _TICK_S)
            except TimeoutError:
                continue

    def _find_preemption(self, attempt: Attempt) -> str:
        """Which node is taken away, in words, where it is time to leave it: at once if there is another one for it, else as
        late as saving allows."""
        for name, deadline in self._fleet.find_preempted(attempt.nodes).items():
            state = self._recorder.state
            left = deadline - self._clock.monotonic()
            if (
                self._fleet.find_free(attempt.nodes, {*state.lost, *state.cordoned})
                or left < self._stopping.needs_s
            ):
                why = self._fleet.nodes[name].preempted_for
                when = f" in {left:.0f} s" if math.isfinite(left) else ""
                return f"{name} is taken away{when}{f' ({why})' if why else ''}"
        return ""

    def _poll_hang(self, attempt: Attempt) -> Hang:
        sources = {s.source for s in attempt.ranks.values()}
        heard = attempt.steps_known or any(s.source == "page" and s.count for s in attempt.ranks.values())
        # Nothing was heard yet: the deadlines of the first step hold.
        attempt.detector.steps_known = heard or sources == {"page"}
        return attempt.detector.poll(self._clock.monotonic(), attempt.views())

    async def _suspect(self, attempt: Attempt, hang: Hang, suspicion: _Suspicion) -> _Looking | None:
        """Collects stacks where a hang is suspected, and says where it was none. Returns them where it is suspected now."""
        # What ends well may take its time: nothing is suspected of it before half of the deadline.
        ends_soon = hang.idle_s < hang.declare_s / 2 and ends_normally(attempt)
        if hang.level is not Level.OK and not self._stop and not ends_soon:
            if suspicion.looking is None:
                self._view.suspect(hang)
                await self._recorder.record_soft(
                    "suspected", attempt=attempt.number, idle_s=round(hang.idle_s, 2)
                )
                suspicion.begin(self._collect_stacks(attempt), self._clock.monotonic())
                self._background.start(self._keepers.reconcile(attempt))
            if hang.level is Level.DECLARED and suspicion.is_old(self._clock.monotonic()):
                # Where they stood when it was suspected may be long ago: an evaluation has an hour.
                suspicion.begin(self._collect_stacks(attempt), self._clock.monotonic())
            return suspicion.looking
        if hang.level is Level.OK and suspicion.looking is not None and suspicion.looking.done():
            suspicion.looking = None
            self._view.say("it goes on: no hang")
        return None

    async def _collect_stacks(self, attempt: Attempt) -> Mapping[int, ProcessInfo]:
        """Where all ranks stand, from all nodes at once; their stacks are written to the incident's evidence folder, of many
        ranks those of a few in each place."""
        answering = set(self._fleet.up())
        ranks = {
            n: [r for r in attempt.node_ranks(n) if attempt.ranks[r].exit is None]
            for n in attempt.nodes
            if n in answering
        }
        # Of an earlier version's agents: plain numbers, and all that they collected comes at once.
        lean = {n: self._fleet.nodes[n].hello.get("protocol", 1) > 1 for n in ranks}
        asked = {n: {"ranks": pack(r) if lean[n] else r} for n, r in ranks.items()}
        answers = await self._fleet.ask_each(asked, "look", timeout=_LOOK_S)
        found: dict[int, ProcessInfo] = {}
        for n, answer in answers.items():
            found |= stacks.read_processes(answer, ranks[n])
        picture = await asyncio.to_thread(explain, attempt, found)
        odd = [c.rank for c in picture.culprits][: stacks.MOST_TEXTS]
        chosen = stacks.choose(found) | {*odd}
        wanted = {
            n: {"ranks": pack(mine), "native": pack(mine & {*odd[:_MOST_NATIVE]})}
            for n in answers
            if lean[n] and (mine := chosen & {*ranks[n]})
        }
        for answer in (await self._fleet.ask_each(wanted, "stacks", timeout=_LOOK_S)).values():
            for rank, text in answer.get("texts", {}).items():
                found[int(rank)] = replace(found[int(rank)], text=str(text))
        folder = self._run_dir.evidence(self._recorder.state.incident + 1)
        await asyncio.to_thread(stacks.write, found, folder)
        await asyncio.to_thread(write_picture, picture, folder / WAITING)
        self._view.say(_describe(picture))
        return found


class _Suspicion:
    """The stacks that are being collected, while a hang is suspected."""

    def __init__(self) -> None:
        self.looking: _Looking | None = None
        self._since = 0.0

    def begin(self, looking: Coroutine[None, None, Mapping[int, ProcessInfo]], now: float) -> None:
        self.looking, self._since = asyncio.create_task(looking), now

    def is_old(self, now: float) -> bool:
        return self.looking is not None and self.looking.done() and now - self._since > _OLD_S


class _Leaving:
    """The ranks are asked to save and exit, once for whatever reasons there are; `why` where nobody asked for it."""

    def __init__(self) -> None:
        self.kind, self.why = "preempted", ""
        self.task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


class _Every:
    """Says when something is due that is done every so often, and at first."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = float("-inf")

    def is_due(self, now: float) -> bool:
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True


def _describe(picture: HangPicture) -> str:
    """What the stacks say, in a line or a few."""
    if not picture.culprits:
        return f"stacks collected: {picture.why}"
    more = len(picture.culprits) - _NAMED
    named = [c.describe() for c in picture.culprits[:_NAMED]]
    return "stacks collected: " + "; ".join([*named, *([f"and {more} more ranks"] if more > 0 else [])])


def _judge_exits(attempt: Attempt) -> str:
    """The kind of outcome that the ranks' ends come to by now; "" where they go on."""
    if attempt.stopped_by_us() is not None:
        return "lease"
    if attempt.done_but_for_saving:
        return "completed" if attempt.all_ended else ""  # the keepers hold what was not saved, and try on
    return "failed" if attempt.has_failed else ""
