"""One attempt as the supervisor sees it: where its ranks run, how far they are, how they ended."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....cluster.clocks import Moment
from ....detect import HangDetector, RankView
from ....diagnose.judge.facts import RankExit
from ....errors import NotDurable
from ....link.runs import unpack
from ....progress import Phase, RunDir
from ....progress.records.steps import Step, step_record
from ...wire import Message
from ..record.clock import Clock
from .ledger import SnapshotTracker
from .loss import LossFollower
from .slow import WorkFollower

_UNKEPT_MAX = 100_000


@dataclass
class RankState:
    """`count` grows with every sign of progress; `step` is the newest completed one, -1 for none."""

    rank: int
    node: str
    pid: int = 0
    count: int = 0
    phase: Phase = Phase.STARTING
    step: int = -1
    source: str = "page"
    exit: RankExit | None = None

    @property
    def finished(self) -> bool:
        return self.exit is not None and self.exit.code == 0


@dataclass
class Attempt:
    """`started` is seconds since the epoch at launch; `floor` the highest step completed before this attempt."""

    number: int
    slots: tuple[str, ...]
    nproc: int
    detector: HangDetector
    started: float
    clock: Clock
    tracker: SnapshotTracker
    floor: int = -1
    ranks: dict[int, RankState] = field(default_factory=dict)
    first_step: Step | None = None
    caught_up: Step | None = None
    last: Step | None = None
    attached_at: float | None = None
    loss: LossFollower = field(default_factory=LossFollower)
    replicas: list[Message] = field(default_factory=list)
    """Comparisons of replicas that were not judged yet."""
    total: int | None = None
    step_time: float | None = None
    steps_file: Path | None = None
    unkept: list[str] = field(default_factory=list)
    restored: tuple[int | None, int | None] | None = None
    """(attempt, step) that its ranks went on from, once somebody has told it."""
    step: int = -1
    """The highest completed step of any rank, -1 before the first."""
    ended: int = 0
    """How many ranks have ended."""
    warm: int | None = None
    """How many of its ranks started from warm processes; None where it was not tried."""
    cold_why: str = ""
    """Why the others did not, in most cases."""
    taken_over: bool = False
    """Whether a supervisor before this one started it."""
    _finished: int = 0
    _bad: list[RankExit] = field(default_factory=list)
    """The ends that were errors, or our doing."""
    _interlude: bool = False
    _before: tuple[int, float] | None = None
    _leader: int | None = None

    @classmethod
    def make(
        cls,
        number: int,
        slots: tuple[str, ...],
        nproc: int,
        detector: HangDetector,
        floor: int,
        run_dir: RunDir,
        clock: Clock | None = None,
    ) -> Attempt:
        clock = clock or Clock()
        tracker = SnapshotTracker(number, len(slots) * nproc)
        attempt = cls(number, slots, nproc, detector, clock.wall(), clock, tracker, floor)
        for slot, node in enumerate(slots):
            for local in range(nproc):
                rank = slot * nproc + local
                attempt.ranks[rank] = RankState(rank, node)
        attempt.steps_file = run_dir.steps(number)
        with contextlib.suppress(OSError):  # a disk that refuses: what comes is kept until there is a folder
            attempt.steps_file.parent.mkdir(parents=True, exist_ok=True)
        return attempt

    @functools.cached_property
    def _slots_of(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for slot, node in enumerate(self.slots):
            found.setdefault(node, []).append(slot)
        return found

    @property
    def nodes(self) -> list[str]:
        """The nodes that it runs on, each once."""
        return list(self._slots_of)

    def node_ranks(self, node: str) -> dict[int, int]:
        """rank -> local rank on a node."""
        slots = self._slots_of.get(node, ())
        return {slot * self.nproc + i: i for slot in slots for i in range(self.nproc)}

    @property
    def all_finished(self) -> bool:
        return self._finished == len(self.ranks)

    @property
    def all_ended(self) -> bool:
        return self.ended == len(self.ranks)

    @property
    def has_failed(self) -> bool:
        """Whether a rank ended by itself with an error."""
        return any(not e.killed_by_agent for e in self._bad)

    def note_exit(self, rank: int, message: Message, moment: Moment | None = None) -> None:
        """Takes an agent's report of a rank's end; of several of the same rank the first one counts. `moment` is when it
        ended, on the supervisor's monotonic clock, where the agent tells it."""
        state = self.ranks.get(rank)
        if state is None or state.exit is not None:
            return
        when, earliest, latest = self._date(message["time"], moment)
        state.exit = RankExit(
            rank=rank, node=state.node, code=message.get("code"), signal=message.get("signal"), time=when,
            killed_by_agent=message["ours"], earliest=earliest, latest=latest, oom=message.get("oom"), oom_counted=message.get("oom_counted", False),
        )  # fmt: skip
        self.ended += 1
        self._finished += state.finished
        if state.exit.killed_by_agent or state.exit.code != 0:
            self._bad.append(state.exit)

    def _date(self, told: float, moment: Moment | None) -> tuple[float, float | None, float | None]:
        """(about when, not before, not after) in seconds since the epoch, by the supervisor's clock: `told` is by the node's.

        It ended after it was launched, and before it was heard of: that much is known where the node's clock is not.
        """
        if moment is None:
            return told, None, None
        now = self.clock.wall()
        epoch = now - self.clock.monotonic()
        latest = min(moment.latest + epoch, now)
        earliest = min(max(moment.earliest + epoch, self.started), latest)
        known = not math.isinf(moment.latest)
        return (latest if known else min(max(told, earliest), latest)), earliest, latest

    def failures(self) -> list[RankExit]:
        """Ranks that ended by themselves with an error, earliest first."""
        return sorted((e for e in self._bad if e.failed), key=lambda e: e.time)

    @property
    def done_but_for_saving(self) -> bool:
        """Whether all that failed is that the last checkpoint was not saved when the ranks had done their steps."""
        failed = [e for e in self._bad if not e.killed_by_agent]
        steps_done = self.total is None or self.step >= self.total
        return bool(failed) and steps_done and all(e.code == NotDurable.exit_code for e in failed)

    def stopped_by_us(self) -> RankExit | None:
        """The first rank whose end was our doing (its lease had expired, say), where none had failed before it for certain:
        what fails at the same moment follows from it."""
        first = min((e for e in self._bad if e.killed_by_agent), key=lambda e: e.time, default=None)
        if first is None or any(e.moment.is_before(first.moment) for e in self._bad if e.failed):
            return None
        return first

    def exits(self) -> tuple[RankExit, ...]:
        return tuple(sorted((s.exit for s in self.ranks.values() if s.exit), key=lambda e: e.time))

    def views(self) -> dict[int, RankView]:
        """How far each rank is; ranks that are equally far share one view, because there are tens of thousands of them."""
        made: dict[tuple[int, Phase, int, bool], RankView] = {}
        found: dict[int, RankView] = {}
        for rank, s in self.ranks.items():
            key = (s.count, s.phase, s.step, s.exit is not None)
            view = made.get(key)
            if view is None:
                view = made[key] = RankView(s.count, s.phase, s.step if s.step >= 0 else None, key[3])
            found[rank] = view
        return found

    @property
    def steps_known(self) -> bool:
        """Whether the ranks' steps are known (by page or log)."""
        return any(s.source in ("page", "log") and s.step >= 0 for s in self.ranks.values())

    def take_restored(self, event: Message, known: tuple[int, int | None, int | None] | None) -> bool:
        """Takes what its ranks went on from, as a node tells it; whether it is news. `known` is what the journal has, with its attempt.

        Each node tells it, since any of them may be lost with what it knows; of two different tales rank 0's counts, which may go
        on from something else a second time.
        """
        if self.restored is None and known is not None and known[0] == self.number:
            self.restored = known[1:]
        told = (event.get("of"), event.get("step"))
        if told == self.restored or (event.get("rank", 0) and self.restored is not None):
            return False
        self.restored = told
        return True

    def take(self, sent: float, ranks: Message) -> list[Step]:
        """Takes an agent's news; returns the leading rank's new steps. `sent` is the node's monotonic clock when
        the message left, which relates its times to ours without trusting its wall clock."""
        for key, news in ranks.items():
            last = news["steps"][-1][0] if news["steps"] else -1
            source = news.get("source", "page")
            self._note(int(key), news["count"], Phase(news["phase"]), source, news.get("total"), last)
        return self._take_steps(sent, {key: news["steps"] for key, news in ranks.items() if news["steps"]})

    def take_groups(self, sent: float, groups: list[list[Any]], steps: Message) -> list[Step]:
        """The same, of ranks in groups: `[runs, count, phase, source, total, newest step]` each, and the steps of the rank
        that leads on its node."""
        for runs, count, phase, source, total, step in groups:
            how = Phase(phase)
            for rank in unpack(runs, "ranks", len(self.ranks)):
                self._note(rank, count, how, source, total, step)
        return self._take_steps(sent, steps)

    @functools.cached_property
    def work(self) -> WorkFollower:
        """What its ranks report of their work."""
        return WorkFollower({r: s.node for r, s in self.ranks.items()})

    def _note(self, rank: int, count: int, phase: Phase, source: str, total: int | None, step: int) -> None:
        state = self.ranks.get(rank)
        if state is None:
            return
        state.count, state.phase, state.source = count, phase, source
        if total:
            self.total = total
        if self.attached_at is None and source == "page":
            self.attached_at = self.clock.wall()
        if step > state.step:
            state.step = step
            self.step = max(self.step, step)

    def _take_steps(self, sent: float, ranks: Message) -> list[Step]:
        now = self.clock.wall()
        offset = now - sent
        told: dict[int, list[tuple[Step, float]]] = {}
        for key, steps in ranks.items():
            if steps and (rank := int(key)) in self.ranks:
                told[rank] = [
                    (Step(s, float.fromhex(x), t, at + offset, float.fromhex(n[0]) if n else None), at)
                    for s, t, x, at, *n in steps
                ]
        leader = self._leading(told)
        fresh = told.get(leader, [])
        for step, at in fresh:
            # Durations by the node's own clock: they need no relation to ours, and a wall clock may jump.
            if self._before is not None and step.step > self._before[0] and not self._interlude:
                took = (at - self._before[1]) / (step.step - self._before[0])
                self.detector.step_took(max(took, 0.0))
                self.step_time = took if self.step_time is None else 0.9 * self.step_time + 0.1 * took
            self._before, self._interlude = (step.step, at), False
            self.first_step = self.first_step or step
            if self.caught_up is None and step.step > self.floor:
                self.caught_up = step
            self.last = step
            self.loss.take(step)
        # The time from here to the next step is not a step's: it holds an evaluation or a checkpoint.
        self._interlude |= self.ranks[leader].phase is not Phase.TRAINING
        self._keep(s for s, _ in fresh)
        return [s for s, _ in fresh]

    def _leading(self, told: Mapping[int, object]) -> int:
        """The rank whose steps are shown: the lowest; where only logs tell steps, the first that told one."""
        if self._leader is None and told:
            by_log = all(self.ranks[r].source != "page" for r in told)
            self._leader = min(told) if by_log else self._lowest
        return self._lowest if self._leader is None else self._leader

    @functools.cached_property
    def _lowest(self) -> int:
        return min(self.ranks)

    def _keep(self, steps: Iterable[Step]) -> None:
        """Appends to steps.jsonl; not fsynced, and kept for later where the disk refuses."""
        self.unkept += [json.dumps(step_record(s)) + "\n" for s in steps]
        if not self.unkept or self.steps_file is None:
            return
        data = "".join(self.unkept).encode()
        try:
            with open(self.steps_file, "ab", buffering=0) as f:
                start = f.tell()
                try:
                    if f.write(data) != len(data):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                except OSError:
                    # What was half written comes again whole: else it would stand there twice.
                    f.truncate(start)
                    raise
            self.unkept = []
        except OSError:
            del self.unkept[:-_UNKEPT_MAX]
