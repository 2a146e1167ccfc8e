"""Decides from step progress alone whether a run hangs.

Liveness means that the step advances within its phase's deadline, never that a thread beats. Time is counted
only while somebody watches: a pause of the watcher itself (a stopped supervisor, a laptop asleep) adds nothing,
so that it can never kill a healthy run on waking.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from ..progress import Phase, Timeouts

_WATCHED_GAP = 1.0
"""Seconds between two looks that count in full; a longer gap counts as this much."""
_SLOWEST_OF = 100
_FACTOR = 4.0
_PHASE_FACTOR = 2.0
_HOLD_NOBODY_UP = (Phase.TRAINING, Phase.STOPPING, Phase.EXITING)


class Level(IntEnum):
    """How sure the detector is. Suspect collects stacks, nothing else; declared kills."""

    OK = 0
    SUSPECT = 1
    DECLARED = 2


@dataclass(frozen=True)
class RankView:
    """What is known of one rank. `count` grows with each step or other sign of progress; `finished` ranks
    (exit code 0) are not expected to advance."""

    count: int
    phase: Phase
    step: int | None = None
    finished: bool = False


@dataclass(frozen=True)
class Hang:
    """The detector's answer: the level, how long the most idle rank has been idle, its deadlines, and the
    ranks whose step lags behind the furthest one."""

    level: Level
    idle_s: float
    suspect_s: float
    declare_s: float
    phase: Phase
    behind: tuple[int, ...] = ()


_NOTHING = Hang(Level.OK, 0.0, 0.0, 0.0, Phase.STARTING)


class HangDetector:
    """Watches one attempt; a new one for each, so that nothing of an earlier incarnation can leak in."""

    def __init__(self, timeouts: Timeouts, *, steps_known: bool = True) -> None:
        """`steps_known` is False for a script whose steps are not known: then only idleness counts, for long."""
        self._timeouts = timeouts
        self.steps_known = steps_known
        self._watched = 0.0
        """Seconds for which somebody has watched."""
        self._since: dict[int, float] = {}
        """How much of that was over at each rank's last sign."""
        self._seen: dict[int, tuple[int, Phase]] = {}
        self._durations: deque[float] = deque(maxlen=_SLOWEST_OF)
        self._last_poll: float | None = None
        self._entered: dict[int, float] = {}
        self._longest: dict[Phase, float] = {}
        """Of evaluations and checkpoints that ended, the longest."""

    def step_took(self, seconds: float) -> None:
        """Tells the duration of a completed training step (the first of an attempt is not one)."""
        self._durations.append(seconds)

    def deadlines(self, phase: Phase) -> tuple[float, float]:
        """(suspect, declare) in seconds for a phase."""
        t = self._timeouts
        if not self.steps_known:
            return t.idle, t.idle
        learned = _FACTOR * max(self._durations, default=0.0)
        if phase in (Phase.STARTING, Phase.COMPILING):
            limit = float(t.first_step)
        elif phase is Phase.EVALUATING:
            return self._may_take(phase, float(t.evaluating), learned)
        elif phase is Phase.CHECKPOINTING:
            return self._may_take(phase, float(t.checkpointing), learned)
        elif phase is Phase.EXITING:
            return self._may_take(phase, max(float(t.stop), float(t.hang)), learned)
        elif phase is Phase.STOPPING:
            limit = max(float(t.stop), float(t.checkpointing))
        else:
            suspect = max(float(t.suspect), learned)
            return suspect, max(float(t.hang), learned, suspect)
        return limit / 2, limit

    def _may_take(self, phase: Phase, limit: float, learned: float) -> tuple[float, float]:
        """(suspect, declare) of a phase that has no steps: to suspect only collects stacks, so it is done early."""
        usual = _PHASE_FACTOR * self._longest.get(phase, 0.0)
        return min(max(float(self._timeouts.suspect), learned, usual), limit / 2), limit

    def _note_phase(self, rank: int, now: float, before: Phase | None, phase: Phase) -> None:
        if before is phase:
            return
        if before in (Phase.EVALUATING, Phase.CHECKPOINTING):
            took = now - self._entered.get(rank, now)
            self._longest[before] = max(self._longest.get(before, 0.0), took)
        self._entered[rank] = now

    def poll(self, now: float, ranks: Mapping[int, RankView]) -> Hang:
        """Judges the ranks at `now` (seconds on one monotonic clock)."""
        gap = 0.0 if self._last_poll is None else max(0.0, min(now - self._last_poll, _WATCHED_GAP))
        self._last_poll, self._watched = now, self._watched + gap
        # Tens of thousands of ranks are polled once a second: what is the same for all ranks of a phase is found once.
        least: dict[Phase, float] = {}
        most: dict[Phase, float] = {}
        furthest: int | None = None
        seen, since, watched = self._seen, self._since, self._watched
        for rank, view in ranks.items():
            phase, step = view.phase, view.step
            before = seen.get(rank)
            if view.finished or before is None or before[0] != view.count or before[1] is not phase:
                self._note_phase(rank, now, before[1] if before else None, phase)
                seen[rank] = (view.count, phase)
                since[rank] = watched
            if step is not None and (furthest is None or step > furthest):
                furthest = step
            if view.finished:
                continue
            at = since[rank]
            if phase not in least:
                least[phase] = most[phase] = at
            elif at < least[phase]:
                least[phase] = at
            elif at > most[phase]:
                most[phase] = at
        # A rank that evaluates or saves within its deadline holds the others up rightfully.
        if (
            any(
                phase not in _HOLD_NOBODY_UP and watched - newest <= self.deadlines(phase)[1]
                for phase, newest in most.items()
            )
            and least.pop(Phase.TRAINING, None) is not None
        ):
            # Those that wait for it get their whole deadline when it is done, not what is left of it.
            since.update(
                {r: watched for r, v in ranks.items() if v.phase is Phase.TRAINING and not v.finished}
            )
        judged = [self._judge(phase, watched - oldest) for phase, oldest in least.items()]
        worst = max(judged, key=lambda h: (h.level, h.idle_s), default=_NOTHING)
        if worst.level is Level.OK:
            return worst
        behind = tuple(
            r
            for r, v in sorted(ranks.items())
            if not v.finished and furthest is not None and (v.step is None or v.step < furthest)
        )
        return Hang(worst.level, worst.idle_s, worst.suspect_s, worst.declare_s, worst.phase, behind)

    def _judge(self, phase: Phase, idle: float) -> Hang:
        """What it means that a rank is idle for so long in this phase."""
        suspect, declare = self.deadlines(phase)
        level = Level.DECLARED if idle > declare else Level.SUSPECT if idle > suspect else Level.OK
        return Hang(level, idle, suspect, declare, phase)
