"""What every GPU and CPU worker did when, and the share of busy GPUs over time, as rows and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....page.charts import gantt
from ....page.charts.gantt import Bar
from ...contracts import Assignment, Report, ScoreDone, WorkerSeen
from .markup import duration, natural, percent


@dataclass(frozen=True)
class WorkerRow(gantt.Row):
    """One worker's line."""

    cpu: bool = False

    @property
    def heading(self) -> str:
        """The node of GPU workers; those who score stand together."""
        return "Scoring, CPU" if self.cpu else self.node


def rows_of(report: Report) -> list[WorkerRow]:
    """GPU workers by node, then CPU workers; bars in order of time."""
    t0 = report.started
    assignments: dict[str, list[Assignment]] = {}
    for one in report.trials:
        assignments.setdefault(one.worker, []).append(one)
    rows = []
    last = max([report.ended, *(t.ended for t in report.trials)])
    for w in sorted(report.workers, key=lambda w: (natural(w.node), w.gpus, natural(w.name))):
        bars = list(_starting(w, t0))
        for t in sorted(assignments.pop(w.name, []), key=lambda t: t.started):
            bars.append(_bar(t, t0))
        rows.append(
            WorkerRow(_name(w), tuple(bars), node=w.node, life=(w.started - t0, (w.ended or last) - t0))
        )
    for name in sorted(assignments):  # a worker that never said hello, yet has some: never hidden
        rows.append(WorkerRow(name, tuple(_bar(t, t0) for t in assignments[name]), life=(0.0, last - t0)))
    cpus = sorted({worker for s in report.scorings for worker, _, _ in s.bars}, key=natural)
    for cpu in cpus:
        bars = [
            Bar(
                "score" if s.score is not None else "failed",
                start - t0,
                end - t0,
                s.task,
                _scored(s, end - start),
            )
            for s in report.scorings
            for worker, start, end in s.bars
            if worker == cpu
        ]
        rows.append(
            WorkerRow(cpu, tuple(sorted(bars, key=lambda b: b.start)), cpu=True, life=(0.0, last - t0))
        )
    return rows


def _scored(s: ScoreDone, seconds: float) -> str:
    if s.score is None:
        return f"not scored: {s.error[:160]}"
    if not s.parts:
        return f"scored in {duration(seconds)}"
    return f"one of {len(s.parts)} parts, {duration(seconds)} of {duration(s.seconds)}"


def _name(w: WorkerSeen) -> str:
    return f"GPU {','.join(map(str, w.gpus))}" if w.gpus else w.name


def _starting(w: WorkerSeen, t0: float) -> Sequence[Bar]:
    at = w.started - t0
    out = []
    if w.start_s > 0:
        out.append(
            Bar("start", at, at + w.start_s, says=f"starting: imports and device, {duration(w.start_s)}")
        )
        at += w.start_s
    if w.fetch_s > 0:
        out.append(Bar("fetch", at, at + w.fetch_s, says=f"fetching the model, {duration(w.fetch_s)}"))
    if w.load_s > 0:
        end = (w.ready - t0) if w.ready else at + w.fetch_s + w.load_s
        out.append(Bar("load", end - w.load_s, end, says=f"loading the model, {duration(w.load_s)}"))
    return out


def _bar(t: Assignment, t0: float) -> Bar:
    kind = {"done": "infer", "shared": "shared"}.get(t.outcome, t.outcome)
    took = t.ended - t.started
    share = f", {percent(t.busy_s / took)} inside inference" if took > 0 else ""
    says = f"{len(t.blocks)} block{'s' * (len(t.blocks) != 1)} in {duration(took)}{share}"
    if t.expected_s:
        says += f" (expected {duration(t.expected_s)})"
    if t.outcome == "shared":
        says += "; its tail went to an idle worker"
    if t.outcome in ("lost", "failed"):
        says = f"{t.outcome} after {duration(took)}: {t.why or 'the worker died'}"
    return Bar(kind, t.started - t0, t.ended - t0, t.task, says)


def busy_curve(report: Report, points: int = 240) -> list[float]:
    """Share of GPU workers inside an assignment, in `points` equal slices from start to end."""
    span = report.makespan_s
    if span <= 0 or not report.workers:
        return []
    step = span / points
    out = [0.0] * points
    for t in report.trials:
        a, b = (t.started - report.started) / step, (t.ended - report.started) / step
        share = min(1.0, t.busy_s / (t.ended - t.started)) if t.ended > t.started else 0.0
        for i in range(max(0, int(a)), min(points, int(b) + 1)):
            out[i] += share * max(0.0, min(b, i + 1) - max(a, i))
    return [min(1.0, v / len(report.workers)) for v in out]
