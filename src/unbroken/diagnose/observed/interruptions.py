"""Verdicts on interruptions in which the training had no part: no log could tell more."""

from __future__ import annotations

import time

from ...progress.records.verdict import UNKNOWN, Action, Outcome, Root, Verdict
from ..judge.facts import RankExit


def agent_lost_verdict(node: str, step: int) -> Verdict:
    """The verdict for an agent that died on a node whose keeper is still there: nothing a log can tell."""
    text = f"the agent of {node} ended; its keeper and the snapshots in memory are still there"
    return Verdict(
        outcome=Outcome.FAILED,
        reason="Unknown",
        root=Root(text=text, node=node, time=time.time()),
        recoverable=True,
        action=Action.RESTART,
        mitigation="Restarted on the same node from the snapshots in memory.",
        confidence=0.9,
        decided_by="lost-agent",
    )


def lease_expired_verdict(end: RankExit) -> Verdict:
    """The verdict when ranks were ended because their node heard from no supervisor: nothing that they did."""
    text = f"{end.node} did not hear from its supervisor for longer than its lease, and its ranks were ended"
    return Verdict(
        outcome=Outcome.FAILED,
        reason=UNKNOWN,
        root=Root(text=text, node=end.node, time=end.time),
        recoverable=True,
        action=Action.RESTART,
        mitigation="Restarted from the newest snapshots.",
        confidence=0.95,
        decided_by="lapsed-lease",
    )


def preempted_verdict(text: str, now: float) -> Verdict:
    """The verdict when a node was announced to be taken away, and the ranks were stopped at a step for that."""
    return Verdict(
        outcome=Outcome.PREEMPTED,
        root=Root(text=text, time=now),
        recoverable=True,
        action=Action.RESTART,
        mitigation="Restarted on other nodes from the snapshot that was made for it.",
        confidence=1.0,
        decided_by="notice",
    )


def takeover_verdict() -> Verdict:
    """The verdict when a supervisor was lost and its successor found every rank still running."""
    return Verdict(
        outcome=Outcome.RUNNING,
        root=Root(
            text="the supervisor was gone; every rank was still running when its successor came",
            time=time.time(),
        ),
        recoverable=True,
        action=Action.NONE,
        mitigation="Nothing to do: the successor took the ranks over.",
        confidence=1.0,
        decided_by="takeover",
    )
