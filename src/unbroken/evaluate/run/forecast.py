"""What `unbroken eval plan` shows: a suite's expected run times, its split over workers, makespan and lower bound."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...errors import MissingExtra, UsageError
from ...units import Duration
from ..contracts import Json, Suite, Task
from ..plan.planner import Costs, Plan, Work, arrange, plan
from ..plan.priors import Expected, Features, PriorBook
from ..result.results import columns
from ..scoring.pool import count_parts
from ..suite.registry import get_harness

UNKNOWN_SAMPLES = 1000
"""Samples of a task of which nothing is known before it is prepared."""


@dataclass(frozen=True)
class Forecast:
    """A plan with what it was made from."""

    suite: str
    workers: tuple[int, ...]
    expected: dict[str, Expected]
    plan: Plan
    naive_s: float
    """One job per dataset, the model loaded each time, metrics inside."""
    unchecked: Mapping[str, str] = field(default_factory=dict)
    """Tasks that their harness could not be asked about, and why."""

    def as_json(self) -> Json:
        """One JSON object."""
        return {
            "suite": self.suite, "workers": list(self.workers), "makespan_s": self.plan.makespan_s, "gpu_end_s": self.plan.gpu_end_s,
            "lower_bound_s": self.plan.lower_bound_s, "naive_s": self.naive_s, "unchecked": dict(self.unchecked), "rule": self.plan.rule, "shards": self.plan.shards,
            "tasks": {t: {"seconds": e.seconds, "spread": e.spread, "score_s": e.score_s, "source": e.source} for t, e in self.expected.items()},
            "parcels": [
                {"worker": p.worker, "start_s": p.start, "end_s": p.end,
                 "shards": [{"task": s.task, "blocks": len(s.blocks), "first_block": s.blocks[0]} for s in p.bundle.shards]}
                for p in self.plan.placements
            ],
        }  # fmt: skip


def look_up(suite: Suite) -> tuple[Suite, dict[str, str], dict[str, int]]:
    """The suite with its groups as their leaf tasks, the tasks whose harness is not here, with the reason, and the
    samples of those whose harness can count them (see contracts.Harness).

    A task whose run time the suite itself states is taken as it stands, and only counted where it states no samples.
    Raises what a harness raises: UnknownTask with the nearest names, DatasetMissing, InputError.
    """
    tasks: list[Task] = []
    unchecked: dict[str, str] = {}
    sizes: dict[str, int] = {}
    harness_of = functools.cache(get_harness)  # it keeps the index of its tasks, which takes seconds
    for task in suite.tasks:
        said = suite.priors.get(task.name)
        if said is not None and said.samples:
            tasks.append(task)
            continue
        try:
            harness = harness_of(task.harness)
            leaves = [task] if said is not None else harness.expand(task, suite)
            count = getattr(harness, "size", None)
            found = {} if count is None else {leaf.name: count(leaf, suite) for leaf in leaves}
            sizes |= {name: n for name, n in found.items() if n is not None}
        except MissingExtra as e:
            leaves = [task]
            unchecked[task.name] = e.message
        tasks += leaves
    return replace(suite, tasks=tuple(tasks)), unchecked, sizes


def forecast(
    suite: Suite, book: PriorBook, *, gpus: int, width: int = 1, model_b: float = 7.0, device: str = "", load_s: float | None = None,
    cpu_workers: int = 16, block: int = 32,
) -> Forecast:  # fmt: skip
    """The plan for a suite on so many GPUs. Raises UsageError if a task needs more GPUs than there are, and what
    `look_up` raises."""
    from ..plan.contenders import baseline
    from ..plan.simulated import Dataset, Machines, Weights

    suite, unchecked, counted = look_up(suite)
    expected: dict[str, Expected] = {}
    work: list[Work] = []
    datasets: list[Dataset] = []
    for t in suite.tasks:
        said = suite.priors.get(t.name)
        known = (said.samples if said else 0) or counted.get(t.name) or book.size(t.name)
        samples = known or UNKNOWN_SAMPLES
        samples = max(1, t.limited(samples))
        e = book.expect(t.name, samples, Features(), model_b, device, said)
        if not known and not t.limit:
            e = replace(e, source=f"{e.source}; {samples} samples assumed")
        expected[t.name] = e
        full, last = divmod(samples, block)
        sizes = [block] * full + ([last] if last else [])
        times = tuple(e.seconds * n / samples for n in sizes)
        parts = count_parts(t, e.score_s, cpu_workers)
        work.append(Work(t.name, times, score_s=e.score_s, gpus=max(t.gpus, 1), score_parts=parts))
        datasets.append(Dataset(t.name, e.seconds, 0.0, e.score_s, samples, False, block=block))
    if gpus % width:
        raise UsageError(f"{gpus} GPUs cannot be shared out to workers of {width}")
    load_s = book.start_s(model_b, device) if load_s is None else load_s
    costs = Costs(load_s, 0.05, cpu_workers)
    try:
        workers = (width,) * (gpus // width) if width > 1 else arrange(gpus, work, costs)
        made = plan(work, workers, costs)
    except ValueError as e:
        raise UsageError(str(e), where=suite.name, hint="Give more --gpus, or --gpus-per-worker") from e
    naive = baseline(
        datasets, Weights(0.0, start_s=load_s), Machines(gpus=len(workers), cpus=cpu_workers)
    ).makespan_s
    return Forecast(suite.name, workers, expected, made, naive, unchecked)


def forecast_text(f: Forecast) -> str:
    """For people."""
    rows = [("task", "expected", "spread", "metric", "shards", "from")]
    shards: dict[str, int] = {}
    for p in f.plan.bundles:
        for s in p.shards:
            shards[s.task] = shards.get(s.task, 0) + 1
    for t, e in sorted(f.expected.items(), key=lambda kv: -kv[1].seconds):
        metric = str(Duration(e.score_s)) if e.score_s else "-"
        rows.append(
            (t, str(Duration(e.seconds)), f"x/{e.spread:.2g}", metric, str(shards.get(t, 0)), e.source)
        )
    made = f.plan
    lines = columns(rows)
    lines += [
        "",
        f"{_many(len(f.workers), 'worker')}, {_many(made.shards, 'shard')} in {_many(len(made.bundles), 'bundle')} ({made.rule}); "
        "x/1.6: two times in three, the time lies between 1/1.6 and 1.6 times the expected one",
        f"expected makespan {Duration(made.makespan_s)}, GPUs released after {Duration(made.gpu_end_s)}",
        f"lower bound {Duration(made.lower_bound_s)}: the plan is {made.makespan_s / made.lower_bound_s:.3f} times it"
        if made.lower_bound_s
        else "",
        f"one job per dataset: {Duration(f.naive_s)}, {f.naive_s / made.makespan_s:.2f} times as long"
        if made.makespan_s
        else "",
        *(f"not looked up: {task}: {why}" for task, why in f.unchecked.items()),
    ]
    return "\n".join(lines)


def _many(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"
