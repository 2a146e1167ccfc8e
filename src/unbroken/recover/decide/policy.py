"""Verdict to action: every rule of what happens after an incident, from verdict, facts and the run's history alone.

Pure: no clock, no disk, no process. The simulator runs the same code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ...diagnose.judge.facts import Facts, LossFact
from ...progress import Budgets, Policy
from ...progress.records.decision import Decision, PastIncident, Rollback
from ...progress.records.verdict import (
    HANG,
    KILLED,
    PORT_TAKEN,
    REFUSED,
    UNKNOWN,
    Action,
    Category,
    Outcome,
    Verdict,
)
from ...units import plural
from .rollback import NEAR, describe, plan_rollback

_BACKOFF_FIRST_S = 0.0
_BACKOFF_S = 2.0
_BACKOFF_MAX_S = 60.0
_FAILED_STARTS = 10
_START_MAX_S = 30.0
_HOUR_S = 3600.0
_QUOTED = 600
_LIKELY = 0.5
"""A run that stops for a verdict that is no surer than this is told so."""
FREE, LEASE_EXPIRED, AGENT, LOSS, PORT = "free", "lease", "agent", "loss", "port"
OUTSIDE = ("free", "node_loss", "killed", AGENT, LEASE_EXPIRED, PORT)
"""Causes from outside the training: they may strike twice at the same step, and are only counted."""
_OF_NODES = ("failure", "hang")
"""Causes that may be a node's fault without saying whose."""
DECIDED = frozenset({Action.RESTART, Action.RESTART_ELSEWHERE, Action.ROLLBACK_SKIP, Action.STOP})
"""What `decide` may decide: each is carried out by the supervisor. `none` is for a takeover, where nothing is to be done;
`rollback_skip` needs the loss that was watched: where only a log speaks of it the run is restarted, and that is said."""
_FREE = "free of charge: not the training's fault"
_WHY_COUNTED = {
    LEASE_EXPIRED: "the lease of the ranks expired {n} times without progress between: the supervisor hardly runs. Free its "
    "machine, or give a longer --lease",
    AGENT: "agents were lost {n} times without progress between. See what ends them: the kernel's log (out of memory?), and "
    "the agents' logs in the run directory",
    PORT: "the port at which the ranks meet was taken by another process {n} times without progress between, another port each time. "
    "See who takes ports there (ss -ltnp), or a range of ports for clients that is too narrow (net.ipv4.ip_local_port_range)",
}


def cause_of(verdict: Verdict, facts: Facts | None = None) -> str:
    """Which budget an incident is charged to: hang, node_loss, failure, framework, script, killed, unknown, agent, lease, loss,
    port or free.

    What the training had no part in must not use up the budget of failures that nobody can explain.
    """
    if facts is not None and facts.loss is not None and verdict.outcome is Outcome.LOSS_SPIKE:
        return LOSS
    if facts is not None and not verdict.category:
        if facts.agents_lost:
            return AGENT
        if facts.lease_expired is not None:
            return LEASE_EXPIRED
        if facts.supervisor_lost or facts.launch_error or facts.preempted or facts.taken_over:
            return FREE
    if facts is not None and facts.step is None and verdict.decided_by == PORT_TAKEN:
        return PORT
    if verdict.outcome in (Outcome.PREEMPTED, Outcome.TIME_LIMIT):
        return FREE
    if verdict.outcome is Outcome.HUNG or verdict.reason == HANG:
        return "hang"
    if verdict.reason == "NodeFailure":
        return "node_loss"
    if verdict.category is Category.INFRASTRUCTURE:
        return "failure"
    if verdict.category is Category.FRAMEWORK:
        return "framework"
    if verdict.category is Category.SCRIPT:
        return "script"
    return "killed" if verdict.decided_by == KILLED else "unknown"


_VARIES = re.compile(r"exit code \d+|0x[0-9a-fA-F]+|\d+")


def fingerprint(verdict: Verdict, stacks: str = "") -> str:
    """A root that compares equal when the same failure happens again: numbers, addresses and times removed; an exit
    code stays.

    `stacks` says where the ranks of a hang stood; a node that a verdict is sure enough of to cordon belongs to the root.
    """
    text = verdict.root.text if verdict.root else ""
    text = _VARIES.sub(lambda m: m[0] if m[0].startswith("exit code") else "#", text)
    place = "".join(f"@{n}" for n in verdict.cordon)
    return f"{verdict.outcome}/{verdict.reason}/{text.strip()[:300]}{place}{f'/{stacks}' if stacks else ''}"


def decide(
    verdict: Verdict,
    facts: Facts,
    history: Sequence[PastIncident],
    budgets: Budgets,
    spares: int,
    policy: Policy = Policy(),
    cordons: Sequence[tuple[float, str]] = (),
    priors: Mapping[str, float] = MappingProxyType({}),
    smaller_by: int = 0,
) -> Decision:
    """The action after an incident; `history` has the oldest first, `spares` is how many nodes could take another's place, `cordons` says when nodes
    were taken out of use (seconds since the epoch) and why, `priors` how likely each node is a cause by what happened to it in other runs, `smaller_by` how many nodes the run can do without
    (--min-nodes): so many are left out without another in their place, where it is sure that they are at fault.

    What a verdict may do that is less sure than `policy` asks for is in `Policy`: it neither stops a run by itself nor takes a
    node out of use.
    A verdict that a restart cannot help stops the run. So does the same failure twice at the same step without
    progress between, whatever its cause, with these exceptions, which are only counted against their budget:

    - what comes from outside (`OUTSIDE`: a kill, a lost node or agent): it need not repeat;
    - a hang of which the stacks are not known: it need not be the same one;
    - a failure of the infrastructure before the first step of an attempt: a network or a storage may be away for
      minutes.

    Budgets count only incidents since the last progress.
    """
    step = facts.run_step if facts.step is None else max(facts.run_step, facts.step)
    cause, stacks = cause_of(verdict, facts), facts.hang.where if facts.hang is not None else ""
    mark = "takeover" if facts.taken_over else fingerprint(verdict, stacks)
    named = _name_nodes(verdict, facts)
    charged = PastIncident(
        cause, mark, step, facts.step is not None, bool(named or facts.lost_nodes), facts.noticed
    )
    if facts.taken_over:
        return Decision(Action.NONE, "a successor took over; no rank was touched", charged)
    if cause == LOSS and facts.loss is not None:
        return _decide_loss(facts.loss, charged, history, budgets)
    stalled = [p for p in history if p.step >= step]
    if why := _why_to_stop(verdict, charged, stalled, budgets, stacks, policy.stop_at):
        return Decision(Action.STOP, why, charged)
    # The first restart is at once; without progress between, each further one waits longer, so that one bad
    # node cannot eat every retry in a minute.
    planned = facts.supervisor_lost or facts.launch_error or facts.preempted
    if cause == FREE and planned:
        return Decision(Action.RESTART, _FREE, charged)
    delay = _delay(len(stalled))
    if cause in (AGENT, LEASE_EXPIRED):
        return Decision(Action.RESTART, _FREE, charged, (), delay)
    if cause == PORT:
        why = f"{_FREE}; another process took the port at which the ranks were to meet, and they meet at another one"
        return Decision(Action.RESTART, why, charged, (), delay)
    used = sum(p.cause == cause for p in stalled) + 1
    why = f"{cause}: {_budget_text(_budget_of(cause, budgets), used)}{_not_as_advised(verdict)}"
    if _is_hopeless(verdict, cause) and verdict.confidence < policy.stop_at:
        why += f"; {verdict.reason} is only {verdict.confidence:.0%} sure, and a run is ended for good from {policy.stop_at:.0%} on"
    limit = _why_no_more(verdict, facts, policy, cordons)
    doubt = _why_unsure(verdict, policy, priors) or limit
    bare = Decision(Action.RESTART, why, charged, (), delay)
    decision = _leave_out(verdict, facts, spares + smaller_by, bare, doubt)
    if not limit:
        decision = _doubt(verdict, facts, history, spares, policy, cordons, named, bare, decision)
    if facts.corruption is None:
        return decision
    # What was saved since the replicas were equal may hold the wrong numbers on every rank by now.
    before = facts.corruption.before
    return replace(decision, why=f"back to step {before}; {decision.why}", rollback=Rollback(before))


def _decide_loss(
    loss: LossFact, charged: PastIncident, history: Sequence[PastIncident], budgets: Budgets
) -> Decision:
    """Back to before it, further each time; after as many times as the budget says a person is needed."""
    earlier = sum(p.cause == LOSS and p.step >= charged.step - NEAR for p in history)
    if earlier >= budgets.loss:
        why = f"{plural(earlier, 'rollback')} within {NEAR} steps did not help: {loss.why}. Look at the data, the learning rate and what is new"
        return Decision(Action.STOP, why, charged)
    rollback = plan_rollback(loss, earlier)
    if rollback is None:
        return Decision(Action.STOP, f"{loss.why}; no checkpoint from before is left to go back to", charged)
    again = "; the same data once more: a NaN that comes again is the data's or the model's, one that does not a node's"
    why = f"{describe(rollback)}{again if loss.kind == 'nan' and not earlier else ''} (rollback {earlier + 1} of {budgets.loss})"
    return Decision(Action.ROLLBACK_SKIP, why, charged, rollback=rollback)


def decide_failed_start(count: int, error: str) -> tuple[float, str]:
    """After so many attempts in a row that could not be launched: (seconds to wait, ""), or why the run stops."""
    if count > _FAILED_STARTS:
        return 0.0, f"{count} attempts in a row could not be started: {error}"
    return (min(0.5 * 2**count, _START_MAX_S) if count > 1 else 0.0), ""


def _why_to_stop(
    verdict: Verdict,
    now: PastIncident,
    stalled: Sequence[PastIncident],
    budgets: Budgets,
    stacks: str,
    stop_at: float,
) -> str:
    """Why the run stops; "" where it goes on."""
    budget = _budget_of(now.cause, budgets)
    before = sum(p.cause == now.cause for p in stalled)
    if now.cause in _WHY_COUNTED:
        return _WHY_COUNTED[now.cause].format(n=before + 1) if budget is not None and before >= budget else ""
    if _is_hopeless(verdict, now.cause) and verdict.confidence >= stop_at:
        sure = "" if verdict.confidence > _LIKELY else f" ({verdict.confidence:.0%} sure)"
        if verdict.decided_by in REFUSED and verdict.root is not None and verdict.root.text:
            return f"a restart cannot help. {verdict.root.text.strip()[:_QUOTED]}"
        return f"{verdict.reason}{sure}: a restart cannot help. {verdict.mitigation}".strip()
    if _repeats(now, stalled, stacks):
        where = f"at step {now.step}" if now.step >= 0 else "before the first step"
        return f"the same failure came twice {where} without progress between: {_named(verdict)}"
    if budget is not None and before >= budget:
        return f"{plural(before + 1, 'incident')} of kind {now.cause} without progress between; the budget is {budget}"
    return ""


def _is_hopeless(verdict: Verdict, cause: str) -> bool:
    """Whether the verdict says that a restart cannot help."""
    return verdict.action is Action.STOP or (cause == "script" and not verdict.recoverable)


def _why_unsure(verdict: Verdict, policy: Policy, priors: Mapping[str, float]) -> str:
    """Why this verdict's word is not enough to take a node out of use; "" where it is."""
    # Two signs that do not depend on each other: what this incident shows, and what the node did before.
    before = max((priors.get(n, 0.0) for n in verdict.cordon), default=0.0)
    if 1 - (1 - verdict.confidence) * (1 - before) < policy.cordon_at:
        return f"the verdict is {verdict.confidence:.0%} sure, and a node is taken out of use from {policy.cordon_at:.0%} on"
    return ""


def _count_out(nodes: int) -> str:
    return f"{plural(nodes, 'node')} {'was' if nodes == 1 else 'were'}"


def _why_no_more(verdict: Verdict, facts: Facts, policy: Policy, cordons: Sequence[tuple[float, str]]) -> str:
    """Why no further node is taken out of use within this hour; "" where one may be."""
    if facts.noticed is None:
        return ""
    lately = [reason for at, reason in cordons if facts.noticed - at < _HOUR_S]
    new = sum(n not in facts.lost_nodes for n in verdict.cordon)
    if len(lately) + new > policy.cordons_per_hour:
        return f"{_count_out(len(lately))} taken out of use within the hour, and {policy.cordons_per_hour} may be: see whether the detection is right"
    same = sum(reason == str(verdict.reason) for reason in lately)
    if same + new > policy.cordons_per_hour_and_cause:
        return (
            f"{_count_out(same)} taken out of use for {verdict.reason} within the hour, and {policy.cordons_per_hour_and_cause} may be: "
            "see whether the detection is right"
        )
    return ""


def _budget_of(cause: str, budgets: Budgets) -> int | None:
    """How many restarts a cause may cost without progress between; None where they are free."""
    return {
        FREE: None, "hang": budgets.hang, "node_loss": budgets.node_loss, "failure": budgets.failure, "killed": budgets.killed,
        "framework": budgets.framework, "script": 1, "unknown": budgets.unknown, AGENT: budgets.killed,
        LEASE_EXPIRED: budgets.unknown, LOSS: budgets.loss, PORT: budgets.failure,
    }[cause]  # fmt: skip


def _leave_out(verdict: Verdict, facts: Facts, spares: int, decision: Decision, doubt: str) -> Decision:
    """The decision with the nodes that are not used again, as far as there are others in their place: lost ones go first. With
    a `doubt` none but the lost ones."""
    lost = [n for n in verdict.cordon if n in facts.lost_nodes]
    suspects = [n for n in verdict.cordon if n not in facts.lost_nodes]
    left = 0 if doubt else max(0, spares - len(facts.lost_nodes))
    out, kept = suspects[:left], suspects[left:]
    why = decision.why
    if kept and doubt:
        why += f"; {', '.join(kept)} stays in use: {doubt}"
    elif kept:
        why += f"; {', '.join(kept)} stays in use: no spare is left"
    if facts.lost_nodes and not spares:
        why += f"; no spare is left for {', '.join(facts.lost_nodes)}"
    elsewhere = bool(out or (lost and spares))
    action = Action.RESTART_ELSEWHERE if elsewhere else Action.RESTART
    return Decision(action, why, decision.charged, (*lost, *out), decision.delay_s)


def _name_nodes(verdict: Verdict, facts: Facts) -> tuple[str, ...]:
    """Nodes that may be at fault, sure or not: those of the verdict, and of the ranks that hold a hang up."""
    place = dict(facts.nodes)
    late = [place.get(c.rank) for c in facts.hang.named] if facts.hang is not None else []
    at = verdict.faulty.node if verdict.faulty is not None else None
    found = dict.fromkeys(n for n in (*verdict.cordon, at, *late) if n)
    return tuple(n for n in found if n not in facts.lost_nodes)


def _doubt(
    verdict: Verdict,
    facts: Facts,
    history: Sequence[PastIncident],
    spares: int,
    policy: Policy,
    cordons: Sequence[tuple[float, str]],
    named: Sequence[str],
    bare: Decision,
    decision: Decision,
) -> Decision:
    """The decision with those nodes that leave at once and are tested aside, or with a test of all nodes where a second incident within
    an hour names none. Only for what may be a node's fault: a script's error is nobody's.

    The group that surely holds the culprit has to have spares, and counts among the nodes that may leave within an hour.
    """
    at_node = verdict.category is Category.INFRASTRUCTURE or decision.charged.cause == "hang"
    if policy.on_doubt == "keep" or not at_node or decision.action is Action.STOP:
        return decision
    suspects = tuple(n for n in named if n not in decision.exclude)
    now = facts.noticed
    if suspects:
        lately = sum(now is not None and now - at < _HOUR_S for at, _ in cordons)
        if len(suspects) > spares - len(decision.exclude) or lately + len(suspects) > policy.cordons_per_hour:
            return decision
        base = decision.why if decision.exclude else bare.why
        why = f"{base}; {', '.join(suspects)} leaves at once and is tested aside: it is not certain that it is at fault"
        return replace(decision, action=Action.RESTART_ELSEWHERE, why=why, suspects=suspects)
    before = [
        p for p in history if not p.named and p.at is not None and now is not None and now - p.at < _HOUR_S
    ]
    if decision.charged.named or not any(p.cause in _OF_NODES for p in before):
        return decision
    return replace(
        decision,
        why=f"{decision.why}; the second within an hour that names no node: all are tested in pairs first",
        test_pairs=True,
    )


def _not_as_advised(verdict: Verdict) -> str:
    """What the verdict says or advises and the decision does not follow, in words."""
    if verdict.action is Action.ROLLBACK_SKIP:
        return (
            "; from the newest checkpoint and with the same data: only a log speaks of the loss, and nothing is skipped"
            " on its word"
        )
    if verdict.outcome in (Outcome.COMPLETED, Outcome.CANCELLED):
        return (
            f"; the logs say {verdict.outcome}, but its ranks did not all finish and nobody stopped this run"
        )
    return ""


def _repeats(now: PastIncident, stalled: Sequence[PastIncident], stacks: str) -> bool:
    """Whether this failure came before without progress since, and is of a kind that cannot repeat by chance."""
    if now.cause in OUTSIDE or (now.cause == "hang" and not stacks):
        return False
    same = [p for p in stalled if p.fingerprint == now.fingerprint]
    if now.cause == "failure":
        return now.reached and any(p.reached for p in same)
    return bool(same)


def _named(verdict: Verdict) -> str:
    """The failure in a few words: its reason, or the root's own where there is none."""
    if verdict.reason in (None, UNKNOWN) and verdict.root is not None and verdict.root.text:
        text = verdict.root.text.strip()[:200]
        return f"{text}; {verdict.last_words}" if verdict.last_words else text
    return str(verdict.reason)


def _delay(n: int) -> float:
    """Before a restart, after so many incidents without progress between."""
    return _BACKOFF_FIRST_S if n == 0 else min(_BACKOFF_S * 2 ** min(n - 1, 16), _BACKOFF_MAX_S)


def _budget_text(budget: int | None, used: int) -> str:
    return "free of charge" if budget is None else f"restart {used} of {budget} without progress"
