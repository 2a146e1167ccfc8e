"""What happened, in a few words."""

from __future__ import annotations

from ....progress.records.verdict import Verdict


def headline(verdict: Verdict) -> str:
    """What happened, in a few words, for the terminal: the reason, or what is known where there is none."""
    rank = verdict.faulty.rank if verdict.faulty is not None else None
    if verdict.decided_by == "signal" and rank is not None:
        kernel = next((n.partition("; ")[2] for n in verdict.notes if n.startswith("killed by")), "")
        return f"rank {rank} was killed by signal 9 (SIGKILL){f'; {kernel}' if kernel else ''}"
    if verdict.decided_by == "early-exit" and verdict.root is not None:
        return verdict.root.text
    return verdict.reason or verdict.outcome
