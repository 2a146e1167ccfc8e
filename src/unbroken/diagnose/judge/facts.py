"""What the supervisor knows beside the logs: how each process ended, which nodes were lost, what hung.

`diagnose()` takes these with the log files; without them (a directory of logs from anywhere) it works from
the logs alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...cluster.clocks import ClockOffset, Moment, find_first
from ...data.position import Position, Ranges
from ...detect.stacks import Culprit

_SIGNAL_CODES = range(129, 160)
"""Exit codes of a shell, or of a launcher, whose child was ended by signal code - 128."""


@dataclass(frozen=True)
class RankExit:
    """One process that ended. `code` is its exit code, or None with `signal` set; `time` in seconds since
    the epoch, on the clock of the supervisor's host as far as it could be related; `killed_by_agent` says that we sent
    the signal ourselves (tear-down), so that it explains nothing.

    It ended between `earliest` and `latest`, on that same clock: an agent looks now and then, by a clock of its own.
    None is `time` itself. `oom`: whether the kernel says that memory ran out; None where nothing tells. `oom_counted`: it
    counted such a kill in the rank's cgroup as the rank ended, and does not say whom it killed.
    """

    rank: int
    node: str
    code: int | None
    signal: int | None
    time: float
    killed_by_agent: bool = False
    earliest: float | None = None
    latest: float | None = None
    oom: bool | None = None
    oom_counted: bool = False

    @property
    def moment(self) -> Moment:
        """When it ended, as the interval that it lies in."""
        low = self.time if self.earliest is None else self.earliest
        high = self.time if self.latest is None else self.latest
        return Moment(min(low, high), max(low, high))

    @property
    def failed(self) -> bool:
        """Whether it ended by itself, with an error."""
        return not self.killed_by_agent and self.code != 0

    @property
    def died_of(self) -> int | None:
        """The signal that ended it, or the process that it stands for (exit code 137 is 128 + SIGKILL)."""
        if self.signal:
            return self.signal
        return self.code - 128 if self.code is not None and self.code in _SIGNAL_CODES else None


@dataclass(frozen=True)
class HangFact:
    """A run that stopped making progress. `late` are the ranks that had not entered the collective, or whose
    step lags, as far as that is known; `stacks` is the folder with the collected stacks, `where` says in short where the
    ranks stood, the same for the same hang ("" where no stack is known). `named` are those that hold the others up with what
    each was doing, and `why` how that is known."""

    step: int
    phase: str
    idle_s: float
    late: tuple[int, ...] = ()
    stacks: str | None = None
    where: str = ""
    named: tuple[Culprit, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class LossFact:
    """A loss that left its band at step `since` and was declared at `step` (`kind`: nan or divergence; `why` in words).
    `anchors` are checkpoints from before it, newest first, with the data position of each; `skips` is what is left out
    already."""

    kind: str
    step: int
    since: int
    why: str
    anchors: tuple[tuple[int, Position], ...] = ()
    skips: Ranges = ()


@dataclass(frozen=True)
class CorruptionFact:
    """Replicas that were equal and differ at `step` (`why` in words). `ranks` are suspect, `confidence` says how sure;
    `before` is the step of the newest checkpoint where all were equal."""

    step: int
    why: str
    ranks: tuple[int, ...]
    confidence: float
    before: int


@dataclass(frozen=True)
class RankPlace:
    """How far a rank came: its highest completed step (-1 for none), and its frames, innermost first, where known; `doing`
    is the state of its process, in words, where it was looked at."""

    step: int = -1
    frames: tuple[str, ...] = ()
    doing: str = ""


@dataclass(frozen=True)
class Facts:
    """Everything known beside the logs. `lost_nodes` did not answer within their lease; `nodes` maps each
    rank to its node; `oom_kills` are ranks that the kernel killed for memory; `completed` says that every
    rank ended with code 0; `step` is the last completed one, `run_step` the highest of the whole run (-1 for none), `total`
    how many steps the script said that it makes.

    `silent` says of lost nodes what their agent was found to do, and how they were fenced. What ended an attempt without
    the training's part: `agents_lost` (nodes whose agent ended; their keepers are there), `lease_expired` (the first rank that
    was ended because its node heard from no supervisor), `launch_error`, `preempted` (in words), `supervisor_lost`, and
    `taken_over` where that cost nothing. `noticed` is when, in seconds since the epoch. `wall_clocks` says how far the time of
    day of a node, which its logs carry, is from the supervisor's.
    """

    exits: tuple[RankExit, ...] = ()
    lost_nodes: tuple[str, ...] = ()
    hang: HangFact | None = None
    loss: LossFact | None = None
    corruption: CorruptionFact | None = None
    nodes: tuple[tuple[int, str], ...] = ()
    oom_kills: tuple[int, ...] = ()
    completed: bool = False
    step: int | None = None
    run_step: int = -1
    total: int | None = None
    silent: Mapping[str, str] = field(default_factory=dict)
    agents_lost: tuple[str, ...] = ()
    lease_expired: RankExit | None = None
    launch_error: str = ""
    preempted: str = ""
    supervisor_lost: bool = False
    taken_over: bool = False
    places: Mapping[int, RankPlace] = field(default_factory=dict)
    noticed: float | None = None
    wall_clocks: Mapping[str, ClockOffset] = field(default_factory=dict)

    def failures(self) -> tuple[RankExit, ...]:
        """Ranks that ended by themselves with an error, by their times."""
        return tuple(sorted((e for e in self.exits if e.failed), key=lambda e: (e.time, e.rank)))


def first_of(ends: Iterable[RankExit]) -> tuple[RankExit, ...]:
    """Those that may have been the first, the likeliest in front: one alone where it is certain."""
    by_rank = {e.rank: e for e in ends}
    return tuple(by_rank[r] for r in find_first({r: e.moment for r, e in by_rank.items()}))
