"""Processes that were ended from outside: by a signal that the supervisor did not send and no log explains."""

from __future__ import annotations

import signal
from dataclasses import replace

from ...progress.records.verdict import KILLED, UNKNOWN, Verdict
from ..judge.facts import Facts, RankExit, first_of

_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)


def killed_from_outside(facts: Facts, verdict: Verdict) -> bool:
    """Whether what ended first was ended by a SIGKILL or SIGTERM that we did not send and the logs do not explain."""
    first = first_end(facts, verdict)
    unexplained = verdict.reason in (None, UNKNOWN)
    return first is not None and unexplained and first.died_of in _FROM_OUTSIDE


def first_end(facts: Facts, verdict: Verdict) -> RankExit | None:
    """The exit that the verdict blames, else the earliest that was an error and not our doing.

    Agents see ends at moments of their own: an error that a kill caused elsewhere may carry the earlier time.
    """
    bad = facts.failures()
    blamed = verdict.faulty.rank if verdict.faulty is not None else None
    return next((e for e in bad if e.rank == blamed), None) or next(iter(bad), None)


def describe_end(end: RankExit) -> str:
    """How a rank ended, in words."""
    how = signal_name(end.signal) if end.signal else f"exit code {end.code}"
    if not end.signal and end.died_of:
        how += f" (128 + {signal_name(end.died_of)})"
    if end.oom:
        how += (
            f" (memory ran out{', by the count of its cgroup' if end.oom_counted else ', says the kernel'})"
        )
    return f"rank {end.rank} on {end.node} ended by {how}"


def with_kill(verdict: Verdict, facts: Facts) -> Verdict:
    """The verdict of a kill that nothing explains, with what is known of it: the signal, and what the kernel says."""
    first = first_end(facts, verdict)
    if first is None or not killed_from_outside(facts, verdict):
        return verdict
    if first.died_of != signal.SIGKILL:
        kernel, sure = "no part of unbroken sent it", 0.9
    elif first.oom is None and first.signal is None:
        kernel, sure = (
            "by its exit code, which stands for one of its own processes: it may have been killed for memory",
            0.5,
        )
    elif first.oom is None:
        kernel, sure = (
            "the kernel's log cannot be read, or not from within its container: it may have been killed for memory",
            0.5,
        )
    else:
        kernel, sure = "no out-of-memory kill in the kernel's log", 0.9
    if verdict.faulty is None or verdict.faulty.rank is None:
        sure = min(sure, 1 / len(first_of(facts.failures())))
    return replace(
        verdict,
        mitigation=f"Somebody or something killed it: {kernel}. Look at who may signal processes there (a scheduler, a "
        "container's memory limit, a person).",
        confidence=round(max(verdict.confidence, sure), 3),
        decided_by=KILLED,
        notes=(
            *(n for n in verdict.notes if "without a word" not in n),
            f"killed by signal {first.died_of}; {kernel}",
        ),
    )


def signal_name(number: int) -> str:
    """SIGKILL for 9; 'signal 40' for one of the real-time signals, which have no name of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
