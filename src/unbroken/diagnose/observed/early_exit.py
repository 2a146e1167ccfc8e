"""A rank that ends with exit code 0 while others train: the root of what the others then fail or hang with.

It is judged only after the others have failed or hang: ranks of a run that ends well finish seconds apart, and a rank
may rightly have less to do than the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...detect.stacks import in_collective
from ...progress.records.verdict import HANG, UNKNOWN, Action, Cascade, Faulty, Outcome, Root, Verdict
from ..judge.facts import Facts, RankExit

_SEEN_TOGETHER_S = 1.0
"""Two ends within this much may be seen in either order: agents look twenty times a second, on clocks of their own."""
_BROKEN_LINK = re.compile(
    r"connect|network|\brecv\b|peer|remote|socket|store|broken pipe|unreachable|nccl|gloo|collective|barrier|all_?reduce|broadcast"
    r"|timed? ?out|distbackend|heartbeat",
    re.IGNORECASE,
)
_BY_OTHERS = ("NCCLRemoteError", "NCCLTimeoutError", "ConnectionError", "NetworkError", HANG, UNKNOWN, None)
"""Reasons that say that somebody else is gone or late, or nothing."""


@dataclass(frozen=True)
class RankPlace:
    """How far a rank came: its highest completed step (-1 for none), and its frames, innermost first, where known."""

    step: int = -1
    frames: tuple[str, ...] = ()

    @property
    def in_collective(self) -> bool:
        """Whether it waits for the others, as far as its stack tells."""
        return in_collective(self.frames)


def blame_early_exit(
    verdict: Verdict, facts: Facts, places: Mapping[int, RankPlace], total: int | None = None
) -> Verdict:
    """The verdict with the early exit as its root, where one explains it; else the verdict as it is.

    `total` is how many steps the script said that it makes. A failure of another kind stays: a rank that is done and
    another that then fails by its own are no story of the first.
    """
    early = _early(facts, places, total)
    if early is None or facts.lost_nodes or not (_hung(verdict) or _by_others(verdict, facts)):
        return verdict
    if _hung(verdict) and not _waited_for(early, places, total):
        return verdict
    text = f"rank {early.rank} ended with exit code 0 while others went on"
    step = places.get(early.rank, RankPlace()).step
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
    )  # fmt: skip


def _early(facts: Facts, places: Mapping[int, RankPlace], total: int | None) -> RankExit | None:
    """The first rank that ended with code 0, where no other had failed before and not all have ended well."""
    done = sorted((e for e in facts.exits if e.code == 0 and not e.killed_by_agent), key=lambda e: e.time)
    if not done or len(done) == max(len(places), len(facts.nodes)):
        return None
    failed = min((e.time for e in facts.exits if e.code != 0 and not e.killed_by_agent), default=None)
    first = done[0]
    if failed is not None and first.time > failed + _SEEN_TOGETHER_S:
        return None
    return first


def _hung(verdict: Verdict) -> bool:
    return verdict.outcome is Outcome.HUNG or verdict.reason == HANG


def _by_others(verdict: Verdict, facts: Facts) -> bool:
    """Whether the failure is of those that a rank's leaving causes: lost connections, collectives that time out."""
    bad = [e for e in facts.exits if e.code != 0 and not e.killed_by_agent]
    # NCCL's watchdog and a terminated store abort; other signals have causes of their own.
    if any(e.signal not in (None, 6) for e in bad):
        return False
    if verdict.reason not in (*_BY_OTHERS, "RuntimeError"):
        return False
    texts = _texts(verdict)
    return verdict.reason in ("NCCLRemoteError", "NCCLTimeoutError") or any(
        _BROKEN_LINK.search(t) for t in texts
    )


def _texts(verdict: Verdict) -> Sequence[str]:
    return [r.text for r in (verdict.root, *verdict.evidence) if r is not None and r.text]


def _waited_for(early: RankExit, places: Mapping[int, RankPlace], total: int | None) -> bool:
    """Whether a hang is of ranks that wait for the one that left: not of one that hangs at its own normal end."""
    mine = places.get(early.rank, RankPlace())
    others = [p for r, p in places.items() if r != early.rank]
    if total is not None and mine.step < total - 1:
        return True
    if any(p.step > mine.step for p in others):
        return True
    return any(p.in_collective for p in others)
