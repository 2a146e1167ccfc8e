"""What happened, in a few words."""

from __future__ import annotations

import re

from ....diagnose.observed.kills import signal_name
from ....progress.records.verdict import KILLED, Verdict

_KILL = re.compile(r"killed by signal (\d+)(?:; (.*))?")


def headline(verdict: Verdict) -> str:
    """What happened, in a few words, for the terminal: the reason, or what is known where there is none."""
    rank = verdict.faulty.rank if verdict.faulty is not None else None
    kill = next((m for n in verdict.notes if (m := _KILL.match(n))), None)
    if verdict.decided_by == KILLED and kill is not None:
        who = f"rank {rank} was" if rank is not None else "ranks were"
        how = f"killed by signal {kill[1]} ({signal_name(int(kill[1]))})"
        return f"{who} {how}{f'; {kill[2]}' if kill[2] else ''}"
    if verdict.decided_by == "early-exit" and verdict.root is not None:
        return verdict.root.text
    return verdict.title
