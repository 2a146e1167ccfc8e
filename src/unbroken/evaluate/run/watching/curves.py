"""The points of a watched run, one per checkpoint, as a table and as a page of curves over steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ....page.charts import spark
from ....page.elements import Markup
from ....page.shell import render
from ...contracts import Score
from ...result.results import columns


@dataclass(frozen=True)
class CurvePoint:
    """One checkpoint on the curves."""

    name: str
    step: int
    attempt: int
    at: float
    scores: tuple[Score, ...] = ()
    """Without notes and per-sample values: those are in the checkpoint's own report."""
    failed: str = ""
    """The first error of it; what a second try met is only said."""
    tries: int = 1
    """In the command that wrote this: another one tries again a checkpoint that failed."""
    code: int = 0
    """Exit code of the error; 0 where it was only removed too early."""
    worse: tuple[str, ...] = ()
    """Tasks that are significantly worse than at the checkpoint before, by `compare`."""


def series(points: Sequence[CurvePoint]) -> dict[tuple[str, str], list[tuple[int, float, float | None]]]:
    """{(task, metric): [(step, value, stderr)]} of each task's headline metric."""
    found: dict[tuple[str, str], list[tuple[int, float, float | None]]] = {}
    for p in points:
        for s in p.scores:
            if s.metrics:
                m = s.metrics[0]
                found.setdefault((s.task, m.name), []).append((p.step, m.value, m.stderr))
    return found


def curves_text(points: Sequence[CurvePoint]) -> str:
    """A table: one row per checkpoint, one column per task; '!' marks a significant fall."""
    tasks = list(dict.fromkeys(t for t, _ in series(points)))
    rows = [("step", "attempt", *tasks)]
    for p in points:
        values = {s.task: s.metrics[0].value for s in p.scores if s.metrics}
        values = {t: v for t, v in values.items() if not math.isnan(v)}  # no sample has a verdict
        cells = [f"{values[t]:.4f}{'!' if t in p.worse else ''}" if t in values else "-" for t in tasks]
        rows.append(
            (
                str(p.step),
                str(p.attempt),
                *(cells if not p.failed else ["failed"] + ["-"] * (len(tasks) - 1))[: len(tasks)],
            )
        )
    lines = columns(rows)
    lines += [f"step {p.step}: {p.failed}" for p in points if p.failed]
    return "\n".join(lines) + "\n"


def curves_page(title: str, points: Sequence[CurvePoint]) -> str:
    """A page with one small chart per task: value over step with two standard errors, falls marked."""
    falls = {(t, p.step) for p in points for t in p.worse}
    charts = [(task, metric, _chart(task, rows, falls)) for (task, metric), rows in series(points).items()]
    failed = [p for p in points if p.failed]
    return render(
        "evaluate/run/watching/curves.html", title=title, points=points, charts=charts, failed=failed
    )


def _axis(rows: Sequence[tuple[int, float, float | None]]) -> tuple[float, float]:
    """The ends of a chart's axis: around the values and their errors, and not below zero where no value is."""
    low = min(v - 2 * (e or 0) for _, v, e in rows)
    high = max(v + 2 * (e or 0) for _, v, e in rows)
    if low == high:  # a level line in the middle; at zero, on the ground of an axis like that of a share
        span = abs(high) or 1.0
        low, high = (low - span / 2, high + span / 2) if high else (0.0, 1.0)
    else:
        margin = (high - low) * 0.05
        low, high = low - margin, high + margin
    return (0.0 if low < 0 <= min(v for _, v, _ in rows) else low), high


def _chart(task: str, rows: Sequence[tuple[int, float, float | None]], falls: set[tuple[str, int]]) -> Markup:
    """The values of one task over steps; '' where no sample has a verdict."""
    rows = [(s, v, e if e and math.isfinite(e) else None) for s, v, e in rows if math.isfinite(v)]
    if not rows:
        return Markup()
    shown = [spark.Point(s, v, e, (task, s) in falls) for s, v, e in rows]
    return spark.points(shown, *_axis(rows), f"{task} over steps", "step")
