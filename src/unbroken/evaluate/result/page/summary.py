"""What the page's tables and tiles say: what one sees first, scores as CSV, what each worker spent its time on."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from math import isfinite

from ...contracts import Conditions, Report, Score, WorkerSeen
from ..cost import cost_of
from ..results import against_naive
from .markup import duration, natural, percent

Tile = tuple[str, str, str, str]
"""Figure, what it is, more about it, mood ('good', 'warn' or '')."""


def tiles(report: Report) -> list[Tile]:
    """The figures that answer the first questions."""
    samples = sum(s.samples for s in report.scores)
    scored = sum(s.scored for s in report.scores)
    tasks = len(report.scores) + len(report.errors)
    gpus = sum(max(1, len(w.gpus)) for w in report.workers)
    nodes = len({w.node for w in report.workers})
    whole = not report.errors and scored == samples
    kind = "GPU" if any(w.gpus for w in report.workers) else "CPU worker"
    out: list[Tile] = [
        (
            f"{len(report.scores)} of {tasks}" if report.errors else str(tasks),
            "tasks scored" if tasks != 1 else "task scored",
            f"{scored:,} of {samples:,} samples have a verdict",
            "good" if whole else "warn",
        )
    ]
    if not report.trials:
        return [*out, ("0", "GPUs taken", "every answer was there already", "")]
    before = f"; {report.reused:,} answers were there before" if report.reused else ""
    where = f"on {gpus} {kind}{'s' * (gpus != 1)}, {nodes} node{'s' * (nodes != 1)}{before}"
    out.append((duration(report.makespan_s), "from start to last score", where, ""))
    if report.lower_bound_s > 0:
        ratio = report.makespan_s / report.lower_bound_s
        bound = f"no plan can take less than {duration(report.lower_bound_s)}"
        out.append(
            (
                f"{ratio:.2f} ×",
                "the lower bound",
                bound,
                "good" if ratio <= 1.1 else "warn" if ratio > 1.5 else "",
            )
        )
    if (found := against_naive(report)) is not None:
        figure, how = found
        than = f"{how} {'as' if how == 'as fast' else 'than'} one job per dataset"
        takes = f"which takes {duration(report.naive_s)} with the same times"
        out.append((figure, than, takes, "warn" if how == "slower" else ""))
    out += cost_tiles(report)
    busy = report.busy_fraction
    mood = "good" if busy >= 0.9 else "warn" if busy < 0.5 else ""
    return [
        *out,
        (percent(busy), "of worker time spent on inference", "until the last assignment ended", mood),
    ]


def cost_tiles(report: Report) -> list[Tile]:
    """Tokens a second, share of the limit, GPU hours, energy: what is known of them."""
    cost = cost_of(report)
    on_gpus = any(w.gpus for w in report.workers)
    unit = "GPU" if on_gpus else "worker"
    out: list[Tile] = []
    if cost.tokens_read + cost.tokens_made:
        made = f"{cost.made_per_s:,.0f} made, " if cost.tokens_made else ""
        said = f"{made}{cost.read_per_s:,.0f} read; {cost.tokens_read + cost.tokens_made:,} in all"
        out.append((f"{cost.read_per_s + cost.made_per_s:,.0f}", f"tokens a second per {unit}", said, ""))
    if cost.limit_share is not None:
        out.append(
            (
                percent(cost.limit_share),
                "of what the GPU can do at all",
                "the formula is at the end of the page",
                "",
            )
        )
    if cost.gpu_hours:
        energy = (
            f"; {cost.energy_j / 3.6e6:.3g} kWh by their own counters" if cost.energy_j is not None else ""
        )
        hours = f"{cost.gpu_hours:.2f}" if cost.gpu_hours >= 0.1 else f"{cost.gpu_hours:.1g}"
        out.append((hours, f"{unit} hours", f"from each worker's start to its end{energy}", ""))
    return out


def spans(report: Report) -> list[tuple[str, float, str, str]]:
    """(name, seconds, kind, why): the makespan between its lower bound and the naive plan; [] where it stands alone."""
    missing = ", for what was still missing" if report.reused else ""
    rows = [
        ("Lower bound", report.lower_bound_s, "bound", "no plan on these workers can be shorter"),
        ("Promised", report.expected_s, "promise", "what the plan expected before the start"),
        ("This evaluation", report.makespan_s, "ours", f"from the start to the last score{missing}"),
        (
            "One job per dataset",
            report.naive_s,
            "naive",
            "model loaded each time, metrics inside the GPU job",
        ),
    ]
    rows = [r for r in rows if r[1] > 0]
    return rows if len(rows) > 1 else []


def usual(scores: Sequence[Score]) -> Conditions | None:
    """The conditions of most tasks."""
    counts: dict[Conditions, int] = {}
    for s in scores:
        for c in s.conditions:
            counts[c] = counts.get(c, 0) + 1
    return max(counts, key=lambda c: counts[c]) if counts else None


def conditions(c: Conditions) -> str:
    """How a task ran, in words."""
    if not c.batch_size:  # the fast way says in words how it batches
        size = f"{c.padding}, up to {c.batch_tokens:,} each" if c.batch_tokens else c.padding
    else:
        size = f"batch size {c.batch_size}" + (f", padding {c.padding}" if c.padding else "")
    return f"{c.engine} on {c.device}, {c.dtype}, {size}"


def _some(ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, ids[:20]))
    return shown if len(ids) <= 20 else f"{shown} and {len(ids) - 20} more"


def facts(score: Score, standard: Conditions | None) -> list[tuple[str, str]]:
    """What unfolds below a task beside its metrics."""
    ran = "; ".join(conditions(c) for c in score.conditions if c != standard)
    return [
        ("Coverage", percent(score.coverage)),
        ("Version", score.version),
        ("Prompts", score.prompt_hash),
        (
            "Cut short",
            f"{len(score.partial)} answers had no time to end, and count as they are: samples {_some(score.partial)}"
            if score.partial
            else "",
        ),
        ("Ran as", ran),
    ]


def as_csv(report: Report) -> str:
    """Every metric of every group and task, one a line."""
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(("task", "metric", "value", "stderr", "scored", "samples"))
    for s in (*report.groups, *report.scores):
        for m in s.metrics:
            stderr = m.stderr if m.stderr is not None and isfinite(m.stderr) else ""
            rows.writerow((s.task, m.name, m.value if isfinite(m.value) else "", stderr, s.scored, s.samples))
    return out.getvalue()


def workers(report: Report) -> list[tuple[WorkerSeen, float, int, int]]:
    """Each worker with its busy share, its assignments, and how many of them were lost."""
    end = max([t.ended for t in report.trials], default=report.ended)
    out = []
    for w in sorted(report.workers, key=lambda w: (natural(w.node), w.gpus, natural(w.name))):
        own = [t for t in report.trials if t.worker == w.name]
        there = max(1e-9, min(w.ended or end, end) - w.started)
        lost = sum(1 for t in own if t.outcome in ("lost", "failed"))
        out.append((w, min(1.0, sum(t.busy_s for t in own) / there), len(own), lost))
    return out
