"""What the supervisor knows beside the logs: how each process ended, which nodes were lost, what hung.

`diagnose()` takes these with the log files; without them (a directory of logs from anywhere) it works from
the logs alone.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankExit:
    """One process that ended. `code` is its exit code, or None with `signal` set; `time` in seconds since
    the epoch, on the clock of the supervisor's host as far as it could be related; `killed_by_agent` says that we sent
    the signal ourselves (tear-down), so that it explains nothing."""

    rank: int
    node: str
    code: int | None
    signal: int | None
    time: float
    killed_by_agent: bool = False


@dataclass(frozen=True)
class HangFact:
    """A run that stopped making progress. `late` are the ranks that had not entered the collective, or whose
    step lags, as far as that is known; `stacks` is the folder with the collected stacks."""

    step: int
    phase: str
    idle_s: float
    late: tuple[int, ...] = ()
    stacks: str | None = None


@dataclass(frozen=True)
class Facts:
    """Everything known beside the logs. `lost_nodes` did not answer within their lease; `nodes` maps each
    rank to its node; `oom_kills` are ranks whose cgroup counted an OOM kill; `completed` says that every
    rank ended with code 0; `step` is the last completed one."""

    exits: tuple[RankExit, ...] = ()
    lost_nodes: tuple[str, ...] = ()
    hang: HangFact | None = None
    nodes: tuple[tuple[int, str], ...] = ()
    oom_kills: tuple[int, ...] = ()
    completed: bool = False
    stopped_by_user: bool = False
    step: int | None = None
