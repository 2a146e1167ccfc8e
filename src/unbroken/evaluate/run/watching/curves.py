"""The points of a watched run, one per checkpoint, as a table and as a page of curves over steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ....page.terminal import escape
from ...contracts import Score
from ...result.results import columns


@dataclass(frozen=True)
class Point:
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
    """In the command that wrote this: another one tries a checkpoint that failed anew."""
    code: int = 0
    """Exit code of the error; 0 where it was only removed too early."""
    worse: tuple[str, ...] = ()
    """Tasks that are significantly worse than at the checkpoint before, by `compare`."""


def series(points: Sequence[Point]) -> dict[tuple[str, str], list[tuple[int, float, float | None]]]:
    """{(task, metric): [(step, value, stderr)]} of each task's headline metric."""
    found: dict[tuple[str, str], list[tuple[int, float, float | None]]] = {}
    for p in points:
        for s in p.scores:
            if s.metrics:
                m = s.metrics[0]
                found.setdefault((s.task, m.name), []).append((p.step, m.value, m.stderr))
    return found


def curves_text(points: Sequence[Point]) -> str:
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


_W, _H, _PAD = 360, 150, 34


def curves_page(title: str, points: Sequence[Point]) -> str:
    """A page with one small chart per task: value over step with two standard errors, falls marked."""
    falls = {(t, p.step) for p in points for t in p.worse}
    charts = "".join(_chart(task, metric, rows, falls) for (task, metric), rows in series(points).items())
    failed = "".join(f"<li>step {p.step}: {escape(p.failed)}</li>" for p in points if p.failed)
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)} over steps</title>
<style>body{{font:14px/1.4 system-ui,sans-serif;margin:24px;color:#1b1f24;background:#fff}}h1{{font-size:20px}}
.charts{{display:flex;flex-wrap:wrap;gap:16px}}figure{{margin:0;border:1px solid #d8dee4;border-radius:6px;padding:8px}}
figcaption{{font-weight:600}}text{{font-size:11px;fill:#57606a}}.fall{{fill:#cf222e}}
@media(prefers-color-scheme:dark){{body{{background:#0d1117;color:#e6edf3}}figure{{border-color:#30363d}}text{{fill:#8d96a0}}}}</style>
<h1>{escape(title)}: {len(points)} checkpoints</h1>
<p>Each point is a committed checkpoint; bars are two standard errors; a red point fell significantly below the one before it.</p>
<div class="charts">{charts}</div>{f"<h2>Not evaluated</h2><ul>{failed}</ul>" if failed else ""}</html>
"""


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


def _chart(
    task: str, metric: str, rows: Sequence[tuple[int, float, float | None]], falls: set[tuple[str, int]]
) -> str:
    name = f"{escape(task)} <small>{escape(metric)}</small>"
    rows = [(s, v, e if e and math.isfinite(e) else None) for s, v, e in rows if math.isfinite(v)]
    if not rows:
        return f"<figure><figcaption>{name}</figcaption>no sample has a verdict</figure>"
    low, high = _axis(rows)
    first, last = rows[0][0], rows[-1][0]

    def at(step: int, value: float) -> tuple[float, float]:
        x = _PAD + (step - first) / max(last - first, 1) * (_W - _PAD - 12)
        return round(x, 1), round(_H - 18 - (value - low) / (high - low) * (_H - 30), 1)

    line = " ".join(f"{x},{y}" for x, y in (at(s, v) for s, v, _ in rows))
    marks = []
    for step, value, err in rows:
        x, y = at(step, value)
        if err:
            marks.append(
                f'<line x1="{x}" x2="{x}" y1="{at(step, max(low, value - 2 * err))[1]}" y2="{at(step, value + 2 * err)[1]}" stroke="#0969da" opacity=".35"/>'
            )
        fell = ' class="fall"' if (task, step) in falls else ' fill="#0969da"'
        marks.append(
            f'<circle cx="{x}" cy="{y}" r="3"{fell}><title>step {step}: {value:.4f}</title></circle>'
        )
    return (
        f'<figure><figcaption>{name}</figcaption><svg width="{_W}" height="{_H}" role="img" aria-label="{escape(task)} over steps">'
        f'<text x="0" y="14">{high:.3g}</text><text x="0" y="{_H - 18}">{low:.3g}</text>'
        f'<text x="{_PAD}" y="{_H - 2}">{first}</text><text x="{_W - 12}" y="{_H - 2}" text-anchor="end">step {last}</text>'
        f'<polyline points="{line}" fill="none" stroke="#0969da"/>{"".join(marks)}</svg></figure>'
    )
