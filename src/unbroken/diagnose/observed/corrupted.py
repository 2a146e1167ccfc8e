"""Verdicts on wrong numbers without an error: who is suspect, and how sure that is."""

from __future__ import annotations

from ...progress.records.verdict import CORRUPTED, UNKNOWN, Action, Category, Faulty, Outcome, Root, Verdict
from ..judge.facts import CorruptionFact, Facts, RankExit

_OWN = 0.95
"""How sure a card is at fault that does not agree with itself: what else changes bits (a library, a race) is rare, and there."""


def judge_corruption(found: CorruptionFact, facts: Facts) -> Verdict:
    """Replicas differ: their minority is suspect; whatever was saved since they were equal does not count."""
    nodes = dict(facts.nodes)
    suspects = {nodes[r] for r in found.ranks if r in nodes}
    rank = found.ranks[0] if len(found.ranks) == 1 else None
    node = next(iter(suspects)) if len(suspects) == 1 else None
    return Verdict(
        Outcome.FAILED, Category.INFRASTRUCTURE, UNKNOWN, root=Root(text=found.why, rank=rank, node=node, time=facts.noticed),
        faulty=Faulty(node, rank, _gpu(facts, rank)) if node or rank is not None else None, recoverable=True,
        cordon=(node,) if node else (), action=Action.RESTART_ELSEWHERE if node else Action.RESTART,
        mitigation=f"Taken back to step {found.before}, where all replicas were equal. Check the suspect: `unbroken check --full`.",
        confidence=found.confidence, decided_by=CORRUPTED,
        notes=(f"suspect: rank {', '.join(map(str, found.ranks[:8]))} ({found.confidence:.0%} sure)",),
    )  # fmt: skip


def judge_own_corruption(end: RankExit, facts: Facts) -> Verdict:
    """A rank ended because its card did not agree with itself; nothing of that step was applied anywhere."""
    text = (
        f"rank {end.rank} on {end.node} computed a step again and did not get the same: its card is suspect"
    )
    return Verdict(
        Outcome.FAILED, Category.INFRASTRUCTURE, UNKNOWN, root=Root(text=text, rank=end.rank, node=end.node, time=end.time),
        faulty=Faulty(end.node, end.rank, _gpu(facts, end.rank)), recoverable=True, cordon=(end.node,),
        action=Action.RESTART_ELSEWHERE, confidence=_OWN, decided_by=CORRUPTED,
        mitigation="Restarted elsewhere from the newest snapshot: the step was not applied. Check the card: `unbroken check --full`.",
    )  # fmt: skip


def _gpu(facts: Facts, rank: int | None) -> int | None:
    """The GPU of a rank: its place among the ranks of its node."""
    nodes = dict(facts.nodes)
    if rank is None or rank not in nodes:
        return None
    return sorted(r for r, n in nodes.items() if n == nodes[rank]).index(rank)
