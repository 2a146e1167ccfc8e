"""From what was measured to a Report: busy fraction, lower bound, the naive plan on the same times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..contracts import Assignment, PreparedTask, Report, Score, ScoreDone, WorkerSeen
from .contenders import baseline
from .planner import Costs, Work, lower_bound
from .simulated import Dataset, Machines, Weights


@dataclass(frozen=True)
class BlockTime:
    """One answered block."""

    task: str
    block: int
    seconds: float
    gpus: int


@dataclass(frozen=True)
class Measured:
    """What one coordinator saw."""

    suite: str
    model: str
    checkpoint: str
    started: float
    """When the first worker was started."""
    assignments: Sequence[Assignment]
    blocks: Sequence[BlockTime]
    scorings: Sequence[ScoreDone]
    workers: Sequence[WorkerSeen]
    prepare_s: Mapping[str, float]
    cpu_workers: int
    expected_s: float
    reused: int = 0


def report(
    seen: Measured,
    prepared: Mapping[str, PreparedTask],
    scores: Sequence[Score],
    groups: Sequence[Score],
    errors: Mapping[str, str],
) -> Report:
    """Puts the numbers together; pure."""
    ends = [t.ended for t in seen.assignments]
    last_gpu = max(ends, default=seen.started)
    ended = max([last_gpu, *(s.ended for s in seen.scorings)])
    busy = sum(t.busy_s for t in seen.assignments)
    span = sum(max(0.0, min(w.ended or last_gpu, last_gpu) - w.started) for w in seen.workers)
    return Report(
        suite=seen.suite,
        model=seen.model,
        checkpoint=seen.checkpoint,
        started=seen.started,
        ended=ended,
        scores=tuple(scores),
        errors=dict(errors),
        trials=tuple(seen.assignments),
        scorings=tuple(seen.scorings),
        workers=tuple(seen.workers),
        lower_bound_s=bound(seen),
        naive_s=naive(seen, prepared),
        busy_fraction=min(1.0, busy / span) if span > 0 else 0.0,
        expected_s=seen.expected_s,
        groups=tuple(groups),
        licences={p.task.name: p.task.licence for p in prepared.values() if p.task.licence},
        reused=seen.reused,
    )


def with_times_of(found: Report, before: Report | None) -> Report:
    """The report with the times, assignments and workers of the one before it, where this run asked the model nothing.

    The same command shows a finished evaluation again; its page then still says how the scores came about.
    """
    if found.trials or before is None or not before.trials or before.checkpoint != found.checkpoint:
        return found
    return replace(
        before,
        scores=found.scores,
        errors=found.errors,
        groups=found.groups,
        licences=found.licences,
        checks=found.checks,
    )


def bound(seen: Measured) -> float:
    """The lower bound with every block taking what it took, and every load what the fastest took."""
    if not seen.workers:
        return 0.0
    times: dict[str, list[float]] = {}
    gpus: dict[str, int] = {}
    for b in seen.blocks:
        times.setdefault(b.task, []).append(b.seconds)
        gpus[b.task] = b.gpus
    metric = {s.task: s for s in seen.scorings}
    cpus = max(1, seen.cpu_workers)
    work = [
        Work(
            t,
            tuple(s),
            score_s=metric[t].seconds if t in metric else 0.0,
            gpus=gpus[t],
            score_parts=cpus if t in metric and metric[t].parts else 1,
        )
        for t, s in times.items()
    ]
    ready = [w.ready - w.started for w in seen.workers if w.ready]
    costs = Costs(min(ready, default=0.0), 0.0, cpus)
    first = [w for w in seen.workers if w.ready] or list(seen.workers)
    widths = [max(1, len(w.gpus)) for w in first]
    if work and max(w.gpus for w in work) > max(widths):
        widths = [max(w.gpus for w in work)] * len(widths)
    return lower_bound(work, widths, costs)


def naive(seen: Measured, prepared: Mapping[str, PreparedTask]) -> float:
    """The makespan of the naive plan: one job per dataset, a new process and load each, prompts and metric inside."""
    infer: dict[str, float] = {}
    for b in seen.blocks:
        infer[b.task] = infer.get(b.task, 0.0) + b.seconds
    metric = {s.task: s.seconds for s in seen.scorings}
    loads = [w.ready - w.started for w in seen.workers if w.ready]
    if not infer or not loads:
        return 0.0
    datasets = [
        Dataset(
            t,
            s,
            seen.prepare_s.get(t, 0.0),
            metric.get(t, 0.0),
            prepared[t].samples,
            False,
            block=prepared[t].block,
        )
        for t, s in infer.items()
    ]
    cluster = Machines(nodes=1, gpus=len(loads), cpus=max(1, seen.cpu_workers))
    return baseline(datasets, Weights(0.0, start_s=sum(loads) / len(loads)), cluster).makespan_s
