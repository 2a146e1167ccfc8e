"""Verdicts on interruptions in which the training had no part: no log could tell more."""

from __future__ import annotations

from dataclasses import replace

from ...errors import SilentCorruption
from ...progress.records.verdict import LOSS_SPIKE, UNKNOWN, Action, Outcome, Root, Verdict
from ..judge.facts import Facts, LossFact, RankExit
from .corrupted import judge_corruption, judge_own_corruption


def judge_interruption(facts: Facts) -> Verdict | None:
    """The verdict on what ended an attempt without the training's part; None where the logs are to be read."""
    if facts.taken_over:
        return _taken_over(facts)
    if facts.agents_lost:
        return _agents_lost(facts)
    if facts.launch_error:
        return _failed(
            Root(text=f"the attempt could not be launched: {facts.launch_error}", time=facts.noticed),
            "Tried again.", 0.9, "launch",
        )  # fmt: skip
    if facts.preempted:
        return _preempted(facts)
    if facts.loss is not None:
        return _loss(facts.loss, facts)
    if facts.corruption is not None:
        return judge_corruption(facts.corruption, facts)
    if (
        corrupt := next((e for e in facts.failures() if e.code == SilentCorruption.exit_code), None)
    ) is not None:
        return judge_own_corruption(corrupt, facts)
    if facts.lease_expired is not None:
        # What other ranks said and did after that, their own lease's end or a lost connection, followed from it.
        return _lease_expired(facts.lease_expired)
    if facts.supervisor_lost and not facts.failures():
        text = "the supervisor was gone, and so are the ranks: nothing else is known of their end"
        return _failed(Root(text=text, time=facts.noticed), "Restarted from the newest snapshots.", 0.9, "lost-supervisor")  # fmt: skip
    return None


def unread(why: str) -> Verdict:
    """The verdict where the logs could not be read."""
    advice = "Read the ranks' logs, or run `unbroken diagnose` on the run directory."
    return replace(_failed(None, advice, 0.0, "no-diagnosis"), notes=(why,))


def _failed(root: Root | None, mitigation: str, confidence: float, decided_by: str) -> Verdict:
    return Verdict(
        Outcome.FAILED, reason=UNKNOWN, root=root, recoverable=True, action=Action.RESTART, mitigation=mitigation,
        confidence=confidence, decided_by=decided_by,
    )  # fmt: skip


def _agents_lost(facts: Facts) -> Verdict:
    """Agents died on nodes whose keepers are still there: nothing a log can tell."""
    first, *others = facts.agents_lost
    one = f"the agent of {first} ended; its keeper and the snapshots in memory are still there"
    many = f"the agents of {', '.join(facts.agents_lost)} ended; their keepers and the snapshots in memory are still there"
    return _failed(
        Root(text=many if others else one, node=None if others else first, time=facts.noticed),
        f"Restarted on the same node{'s' if others else ''} from the snapshots in memory.", 0.9, "lost-agent",
    )  # fmt: skip


def _lease_expired(end: RankExit) -> Verdict:
    """Ranks were ended because their node heard from no supervisor: nothing that they did."""
    text = f"{end.node} did not hear from its supervisor for longer than its lease, and its ranks were ended"
    root = Root(text=text, node=end.node, time=end.time)
    return _failed(root, "Restarted from the newest snapshots.", 0.95, "lapsed-lease")


def _preempted(facts: Facts) -> Verdict:
    """A node was announced to be taken away, and the ranks were stopped at a step for that."""
    return Verdict(
        outcome=Outcome.PREEMPTED,
        root=Root(text=facts.preempted, time=facts.noticed),
        recoverable=True,
        action=Action.RESTART,
        mitigation="Restarted on other nodes from the snapshot that was made for it.",
        confidence=1.0,
        decided_by="notice",
    )


def _loss(loss: LossFact, facts: Facts) -> Verdict:
    """The loss was watched and did not come back: the ranks were ended for that, and their logs tell no more."""
    return Verdict(
        Outcome.LOSS_SPIKE, reason=LOSS_SPIKE, root=Root(text=loss.why, time=facts.noticed), recoverable=True,
        action=Action.ROLLBACK_SKIP, confidence=0.9, decided_by="loss-watch",
        mitigation="Taken back to a checkpoint before it. Where it comes again look at the data, the learning rate and the "
        "changes since the last good run.",
    )  # fmt: skip


def _taken_over(facts: Facts) -> Verdict:
    """A supervisor was lost and its successor found every rank still running."""
    text = "the supervisor was gone; every rank was still running when its successor came"
    return Verdict(
        outcome=Outcome.RUNNING,
        root=Root(text=text, time=facts.noticed),
        recoverable=True,
        action=Action.NONE,
        mitigation="Nothing to do: the successor took the ranks over.",
        confidence=1.0,
        decided_by="takeover",
    )
