"""How much of a run's time trained, by both published definitions, and what that allows: time per incident, spares. Pure.

Sources: the exact cycle form, and the small-loss form of Kokolis et al., "Revisiting reliability in large-scale machine learning research
clusters" (HPCA 2025); the pool as the quantile of a binomial, as in ByteRobust (SOSP 2025), with the time to a replacement in place of a day.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

SHARES = {"detect": 0.2, "decide": 0.1, "schedule": 0.1, "start and restore": 0.4, "redo": 0.2}
"""How a time budget is handed down to the phases of a recovery."""
PHASES_OF = {
    "detect": ("detect",), "decide": ("stop", "diagnose"), "schedule": ("schedule",),
    "start and restore": ("start", "restore_and_first_step"), "redo": ("replay",),
}  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """What both forms take, in seconds: `between` is productive time between two interruptions, `interval` that between two
    snapshots, `blocking` what one holds the training up, `recovery` from the failure to the first new step without what is redone."""

    between: float
    interval: float
    blocking: float
    recovery: float


def exact_ettr(i: Inputs) -> float:
    """1 / (1 + b/D + (recovery + D/2) / M): no approximation of small losses, never below 0."""
    overhead = i.blocking / i.interval if i.interval else 0.0
    return 1.0 / (1.0 + overhead + (i.recovery + i.interval / 2) / i.between) if i.between > 0 else 0.0


def small_loss_ettr(i: Inputs) -> float:
    """(1 - (recovery + D/2) / M) / (1 + b/D): what is published for small losses; below 0 where they are not small."""
    overhead = i.blocking / i.interval if i.interval else 0.0
    return (1.0 - (i.recovery + i.interval / 2) / i.between) / (1.0 + overhead) if i.between > 0 else 0.0


def budget_per_incident(between: float, goal: float) -> dict[str, float]:
    """Seconds that one incident may cost at this goal, in all and by phase: M (1 - goal) of what trains, M / goal of what passes."""
    total = between * (1.0 - goal) / goal
    return {"all": total, **{name: share * total for name, share in SHARES.items()}}


def advise_spares(
    nodes: int, failures_per_node_day: float, replace_s: float, quantile: float = 0.99, largest_group: int = 1
) -> int:
    """The smallest pool that lasts, with this probability, until failed nodes are replaced; never below the largest group that
    may leave at once. `failures_per_node_day` is a rate, `replace_s` the time until a replacement is ready.

    Raises ValueError for a quantile outside of 0 to 1 or a negative rate."""
    if not 0 < quantile < 1 or failures_per_node_day < 0 or nodes < 1:
        raise ValueError("a quantile lies between 0 and 1, a rate is not negative, and there is a node")
    p = 1.0 - math.exp(-failures_per_node_day * replace_s / 86_400.0)
    term, total, k = (1.0 - p) ** nodes, 0.0, 0
    while True:
        total += term
        if total >= quantile or k >= nodes:
            return max(k, largest_group)
        term *= (nodes - k) / (k + 1) * p / (1.0 - p)
        k += 1


@dataclass(frozen=True)
class LossByCause:
    """What incidents of one cause cost: how many, seconds in all, on average, and of the worst one percent (of few: the worst)."""

    count: int
    seconds: float
    mean: float
    p99: float
    phases: Mapping[str, float]


def lose_by_cause(incidents: Sequence[tuple[str, Mapping[str, float]]]) -> dict[str, LossByCause]:
    """By cause, the dearest first; each incident is its cause and the seconds of its phases."""
    found: dict[str, list[Mapping[str, float]]] = {}
    for cause, phases in incidents:
        found.setdefault(cause, []).append(phases)
    out = {}
    for cause, mine in found.items():
        costs = sorted(sum(p.values()) for p in mine)
        at = min(len(costs) - 1, math.ceil(0.99 * len(costs)) - 1)
        phases = {k: sum(p.get(k, 0.0) for p in mine) for k in sorted({k for p in mine for k in p})}
        out[cause] = LossByCause(len(mine), sum(costs), fmean(costs), costs[at], phases)
    return dict(sorted(out.items(), key=lambda c: -c[1].seconds))


def measure(
    productive_s: float, incidents: Sequence[tuple[str, Mapping[str, float]]], goal: float = 0.99
) -> dict[str, object] | None:
    """What a run's own figures give, as plain JSON: both forms with their inputs, time lost by cause and phase, mean and P99, the
    budget of an incident at this goal. None without an incident, or before a step.

    Half an interval is what was redone on average; what a snapshot blocks is part of the steps' own time, so it counts as 0 here.
    """
    if not incidents or productive_s <= 0:
        return None
    redone = fmean(p.get("replay", 0.0) for _, p in incidents)
    recovery = fmean(sum(s for k, s in p.items() if k != "replay") for _, p in incidents)
    inputs = Inputs(productive_s / len(incidents), 2 * redone, 0.0, recovery)
    costs = lose_by_cause([("all", p) for _, p in incidents])["all"]
    return {
        "exact": round(exact_ettr(inputs), 6), "small_loss": round(small_loss_ettr(inputs), 6), "goal": goal,
        "inputs": {k: round(getattr(inputs, k), 3) for k in ("between", "interval", "blocking", "recovery")},
        "incident_mean_s": round(costs.mean, 3), "incident_p99_s": round(costs.p99, 3),
        "budget_s": {k: round(v, 3) for k, v in budget_per_incident(inputs.between, goal).items()},
        "spent_s": {
            name: round(fmean(sum(p.get(x, 0.0) for x in own) for _, p in incidents), 3) for name, own in PHASES_OF.items()
        },
        "lost_by_cause": {
            cause: {
                "count": c.count, "seconds": round(c.seconds, 3), "mean_s": round(c.mean, 3), "p99_s": round(c.p99, 3),
                "phases": {k: round(v, 3) for k, v in c.phases.items()},
            }
            for cause, c in lose_by_cause(incidents).items()
        },
    }  # fmt: skip
