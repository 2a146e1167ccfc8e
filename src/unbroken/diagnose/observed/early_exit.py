"""A rank that ends with exit code 0 while others train: the root of what the others then fail or hang with.

It is judged only after the others have failed or hang: ranks of a run that ends well finish seconds apart, and a rank
may rightly have less to do than the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...detect.stacks import in_collective
from ...progress.records.verdict import HANG, UNKNOWN, Action, Cascade, Faulty, Outcome, Root, Verdict
from ..judge.facts import Facts, RankExit, RankPlace
from ..judge.peers import BROKEN_LINK
from .first_failure import NOT_OF_SEVERAL

_SEEN_TOGETHER_S = 1.0
"""A failure may be over so much sooner than the exit that caused it: ranks of one node are looked at one after the other, and an
agent may be late."""
_BY_OTHERS = ("NCCLRemoteError", "NCCLTimeoutError", "ConnectionError", "NetworkError", HANG, UNKNOWN, None)
"""Reasons that say that somebody else is gone or late, or nothing."""


def blame_early_exit(verdict: Verdict, facts: Facts) -> Verdict:
    """The verdict with the early exit as its root, where one explains it; else the verdict as it is.

    A failure of another kind stays: a rank that is done and another that then fails by its own are not one failure.
    """
    early = _find_early(facts)
    if early is None or facts.lost_nodes or not (_hung(verdict) or _by_others(verdict, facts)):
        return verdict
    if _hung(verdict) and not _is_waited_for(early, facts):
        return verdict
    text = f"rank {early.rank} ended with exit code 0 while others went on"
    step = facts.places.get(early.rank, RankPlace()).step
    at = f" after step {step}" if step >= 0 else " before its first step"
    said = verdict.root.text.strip() if verdict.root else ""
    return replace(
        verdict,
        outcome=Outcome.FAILED,
        category=None,
        reason=UNKNOWN,
        root=Root(text=text + at, rank=early.rank, node=early.node, time=early.time),
        evidence=(*((verdict.root,) if verdict.root and said else ()), *verdict.evidence),
        cascade=(*((Cascade(verdict.reason, 1),) if verdict.reason not in (None, UNKNOWN) else ()), *verdict.cascade),
        faulty=Faulty(early.node, early.rank),
        recoverable=True,
        cordon=(),
        action=Action.RESTART,
        mitigation=(
            f"Rank {early.rank} left its training loop by itself: look for an exit, a return, or a shorter data set on "
            "that rank. Every rank has to make the same steps."
        ),
        confidence=0.9,
        decided_by="early-exit",
        notes=tuple(n for n in verdict.notes if n not in NOT_OF_SEVERAL),
    )  # fmt: skip


def _find_early(facts: Facts) -> RankExit | None:
    """The first rank that ended with code 0, where no other had failed before and not all have ended well."""
    done = [e for e in facts.exits if e.code == 0 and not e.killed_by_agent]
    if not done or len(done) == max(len(facts.places), len(facts.nodes)):
        return None
    first = min(done, key=lambda e: (e.time, e.rank))
    # What certainly ended after a failure may have ended for it.
    over = min((e.moment.latest for e in facts.failures()), default=None)
    if over is not None and first.moment.earliest > over + _SEEN_TOGETHER_S:
        return None
    return first


def _hung(verdict: Verdict) -> bool:
    return verdict.outcome is Outcome.HUNG or verdict.reason == HANG


def _by_others(verdict: Verdict, facts: Facts) -> bool:
    """Whether the failure is of those that a rank's leaving causes: lost connections, collectives that time out."""
    bad = facts.failures()
    # NCCL's watchdog and a terminated store abort; other signals have causes of their own.
    if any(e.died_of not in (None, 6) for e in bad):
        return False
    if verdict.reason not in (*_BY_OTHERS, "RuntimeError"):
        return False
    texts = _texts(verdict)
    return verdict.reason in ("NCCLRemoteError", "NCCLTimeoutError") or any(
        BROKEN_LINK.search(t) for t in texts
    )


def _texts(verdict: Verdict) -> Sequence[str]:
    return [r.text for r in (verdict.root, *verdict.evidence) if r is not None and r.text]


def _is_waited_for(early: RankExit, facts: Facts) -> bool:
    """Whether a hang is of ranks that wait for the one that left: not of one that hangs at its own normal end."""
    mine = facts.places.get(early.rank, RankPlace())
    others = [p for r, p in facts.places.items() if r != early.rank]
    if facts.total is not None and mine.step < facts.total - 1:
        return True
    if any(p.step > mine.step for p in others):
        return True
    return any(in_collective(p.frames) for p in others)
