"""Verdict to action: what the supervisor does about an incident, from the verdict and the run's history alone.

Pure: no clock, no disk, no process. The simulator runs the same code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ...progress import Budgets
from ...progress.records.decision import Decision, PastIncident
from ...progress.records.verdict import HANG, UNKNOWN, Action, Category, Outcome, Verdict

_BACKOFF_FIRST_S = 0.0
_BACKOFF_S = 2.0
_BACKOFF_MAX_S = 60.0
FREE, LEASE_EXPIRED, AGENT = "free", "lease", "agent"
OUTSIDE = ("free", "node_loss", "killed", AGENT, LEASE_EXPIRED)
"""Causes from outside the training: they may strike twice at the same step, and are only counted."""
DECIDED = frozenset({Action.RESTART, Action.RESTART_ELSEWHERE, Action.STOP})
"""What `decide` may decide: each is carried out by the supervisor. `none` is for a takeover, where nothing is to be done;
`rollback_skip` is a diagnosis's advice, which nobody carries out yet: such a run is restarted, and that is said."""


def cause_of(verdict: Verdict, *, killed: bool = False) -> str:
    """Which budget an incident is charged to: hang, node_loss, failure, framework, script, killed, unknown or free.

    `killed` says that the first process to end was ended by a signal from outside that nothing in the logs explains.
    """
    if verdict.outcome in (Outcome.PREEMPTED, Outcome.TIME_LIMIT):
        return "free"
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
    return "killed" if killed else "unknown"


def fingerprint(verdict: Verdict, stacks: str = "") -> str:
    """A root that compares equal when the same failure happens again: numbers, addresses and times removed.

    `stacks` says where the ranks of a hang stood; a node that a verdict is sure enough of to cordon belongs to the root.
    """
    text = verdict.root.text if verdict.root else ""
    text = re.sub(r"0x[0-9a-fA-F]+|\d+", "#", text)
    place = "".join(f"@{n}" for n in verdict.cordon)
    return f"{verdict.outcome}/{verdict.reason}/{text.strip()[:300]}{place}{f'/{stacks}' if stacks else ''}"


def decide(
    verdict: Verdict, step: int, history: Sequence[PastIncident], budgets: Budgets, *, killed: bool = False,
    reached: bool = True, stacks: str = "",
) -> Decision:  # fmt: skip
    """The action for an incident at `step` (the highest completed one, -1 for none), oldest history first.

    A verdict that a restart cannot help stops the run. So does the same failure twice at the same step without
    progress between, whatever its cause, with these exceptions, which are only counted against their budget:

    - what comes from outside (`OUTSIDE`: a kill, a lost node or agent): it need not repeat;
    - a hang of which the stacks are not known (`stacks` empty): it need not be the same one;
    - a failure of the infrastructure before the first step of an attempt (`reached` False): a network or a
      storage may be away for minutes.

    Budgets count only incidents since the last progress.
    """
    cause = cause_of(verdict, killed=killed)
    if verdict.action is Action.STOP or (cause == "script" and not verdict.recoverable):
        return Decision(Action.STOP, f"{verdict.reason}: a restart cannot help. {verdict.mitigation}".strip())
    stalled = [p for p in history if p.step >= step]
    ours = [p for p in stalled if p.cause == cause]
    if _repeats(cause, fingerprint(verdict, stacks), stalled, reached, stacks):
        where = f"at step {step}" if step >= 0 else "before the first step"
        return Decision(
            Action.STOP, f"the same failure came twice {where} without progress between: {_named(verdict)}"
        )
    budget = {
        "free": None, "hang": budgets.hang, "node_loss": budgets.node_loss, "failure": budgets.failure, "killed": budgets.killed,
        "framework": budgets.framework, "script": 1, "unknown": budgets.unknown,
    }[cause]  # fmt: skip
    if budget is not None and len(ours) >= budget:
        return Decision(
            Action.STOP,
            f"{len(ours) + 1} incidents of kind {cause} without progress between; the budget is {budget}",
        )
    # The first restart is at once; without progress between, each further one waits longer, so that one bad
    # node cannot eat every retry in a minute.
    delay = _delay(len(stalled))
    action = (
        Action.RESTART_ELSEWHERE
        if verdict.cordon or verdict.action is Action.RESTART_ELSEWHERE
        else Action.RESTART
    )
    why = f"{cause}: {_budget_text(budget, len(ours) + 1)}{_not_as_advised(verdict)}"
    return Decision(action, why, verdict.cordon, delay)


def as_carried_out(decision: Decision, replaceable: int) -> Decision:
    """The decision as it will be done with so many spares: without one the node stays in use, and that is no
    restart elsewhere."""
    if decision.action is not Action.RESTART_ELSEWHERE or (decision.exclude and replaceable):
        return decision
    what = f"; {', '.join(decision.exclude)} stays in use: no spare is left" if decision.exclude else ""
    return replace(decision, action=Action.RESTART, why=f"{decision.why}{what}")


def _not_as_advised(verdict: Verdict) -> str:
    """What the verdict says or advises and the decision does not follow, in words."""
    if verdict.action is Action.ROLLBACK_SKIP:
        return (
            "; from the newest checkpoint and with the same data: going back before the spike and skipping is not"
            " built yet"
        )
    if verdict.outcome in (Outcome.COMPLETED, Outcome.CANCELLED):
        return (
            f"; the logs say {verdict.outcome}, but its ranks did not all finish and nobody stopped this run"
        )
    return ""


def _repeats(cause: str, mark: str, stalled: Sequence[PastIncident], reached: bool, stacks: str) -> bool:
    """Whether this failure came before without progress since, and is of a kind that cannot repeat by chance."""
    if cause in OUTSIDE or (cause == "hang" and not stacks):
        return False
    same = [p for p in stalled if p.fingerprint == mark]
    if cause == "failure":
        return reached and any(p.reached for p in same)
    return bool(same)


def _named(verdict: Verdict) -> str:
    """The failure in a few words: its reason, or the root's own where there is none."""
    if verdict.reason in (None, UNKNOWN) and verdict.root is not None and verdict.root.text:
        return verdict.root.text.strip()[:200]
    return str(verdict.reason)


def decide_lease_expired(step: int, history: Sequence[PastIncident], budgets: Budgets) -> Decision:
    """Ranks were ended for a lease that expired under a supervisor that lives: its machine hardly lets it run.

    No failure of theirs, and free of charge as long as training gets on; without progress between it waits, and ends.
    """
    return _decide_counted(
        LEASE_EXPIRED, step, history, budgets.unknown, "the lease of the ranks expired {n} times without progress between: the "
        "supervisor hardly runs. Free its machine, or give a longer --lease",
    )  # fmt: skip


def decide_agent_lost(step: int, history: Sequence[PastIncident], budgets: Budgets) -> Decision:
    """An agent died whose node is well: free of charge while training gets on, else counted as a kill would be."""
    return _decide_counted(
        AGENT, step, history, budgets.killed, "agents were lost {n} times without progress between. See what ends them: "
        "the kernel's log (out of memory?), and the agents' logs in the run directory",
    )  # fmt: skip


def _decide_counted(
    cause: str, step: int, history: Sequence[PastIncident], budget: int, why: str
) -> Decision:
    stalled = [p for p in history if p.step >= step]
    before = sum(p.cause == cause for p in stalled)
    if before >= budget:
        return Decision(Action.STOP, why.format(n=before + 1))
    return Decision(Action.RESTART, "free of charge: not the training's fault", (), _delay(len(stalled)))


def _delay(n: int) -> float:
    """Before a restart, after so many incidents without progress between."""
    return _BACKOFF_FIRST_S if n == 0 else min(_BACKOFF_S * 2 ** min(n - 1, 16), _BACKOFF_MAX_S)


def _budget_text(budget: int | None, used: int) -> str:
    return "free of charge" if budget is None else f"restart {used} of {budget} without progress"
