"""What every GPU and CPU worker did when, and the share of busy GPUs over time, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...contracts import Report, ScoreDone, Trial, WorkerSeen
from .markup import attributes, duration, esc, nice_step, percent

WIDTH = 1120.0
_LEFT = 132.0
_RIGHT = 32.0
_PLOT = WIDTH - _LEFT - _RIGHT


@dataclass(frozen=True)
class Bar:
    """One thing that a worker did, in seconds since the start."""

    kind: str
    """'start', 'fetch', 'load', 'infer', 'shared', 'lost', 'failed' or 'score'."""
    start: float
    end: float
    task: str = ""
    says: str = ""


@dataclass(frozen=True)
class Row:
    """One worker's line."""

    name: str
    bars: tuple[Bar, ...]
    cpu: bool = False
    node: str = ""
    life: tuple[float, float] = (0.0, 0.0)
    """When it was there, in seconds since the start."""


def rows_of(report: Report) -> list[Row]:
    """GPU workers by node, then CPU workers; bars in order of time."""
    t0 = report.started
    trials: dict[str, list[Trial]] = {}
    for trial in report.trials:
        trials.setdefault(trial.worker, []).append(trial)
    rows = []
    last = max([report.ended, *(t.ended for t in report.trials)])
    for w in sorted(report.workers, key=lambda w: (w.node, w.gpus, w.name)):
        bars = list(_starting(w, t0))
        for t in sorted(trials.pop(w.name, []), key=lambda t: t.started):
            bars.append(_trial(t, t0))
        rows.append(Row(_name(w), tuple(bars), node=w.node, life=(w.started - t0, (w.ended or last) - t0)))
    for name in sorted(trials):  # a worker that never said hello, yet has trials: never hidden
        rows.append(Row(name, tuple(_trial(t, t0) for t in trials[name]), life=(0.0, last - t0)))
    cpus = sorted({worker for s in report.scorings for worker, _, _ in s.bars}, key=_natural)
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
        rows.append(Row(cpu, tuple(sorted(bars, key=lambda b: b.start)), cpu=True, life=(0.0, last - t0)))
    return rows


def _scored(s: ScoreDone, seconds: float) -> str:
    if s.score is None:
        return f"not scored: {s.error[:160]}"
    if not s.parts:
        return f"scored in {duration(seconds)}"
    return f"one of {len(s.parts)} parts, {duration(seconds)} of {duration(s.seconds)}"


def _name(w: WorkerSeen) -> str:
    return f"GPU {','.join(map(str, w.gpus))}" if w.gpus else w.name


def _natural(name: str) -> tuple[str, int]:
    head = name.rstrip("0123456789")
    return head, int(name[len(head) :] or 0)


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


def _trial(t: Trial, t0: float) -> Bar:
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
    """Share of GPU workers inside a trial, in `points` equal slices from start to end."""
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


def section(report: Report) -> str:
    """The chart with its legend; page.js adds zoom, highlight and tips."""
    rows = rows_of(report)
    if not rows or report.makespan_s <= 0:
        return ""
    span = max([report.makespan_s, *(b.end for r in rows for b in r.bars)])
    height = 22 if len(rows) <= 24 else 14 if len(rows) <= 64 else 8 if len(rows) <= 200 else 4
    legend = "".join(
        f'<span class=key><i class="swatch {kind}"></i>{text}</span>'
        for kind, text in (
            ("start", "starting"), ("fetch", "fetching the model"), ("load", "loading it"), ("infer", "inference"),
            ("shared", "inference, tail given away"), ("lost", "lost or failed"), ("score", "scoring (CPU)"),
        )
        if any(b.kind == kind or (kind == "lost" and b.kind == "failed") for r in rows for b in r.bars)
    )  # fmt: skip
    return (
        "<section id=timeline><h2>What every worker did</h2>"
        f"<div class=bar><div class=legend>{legend}</div>"
        "<div class=zoom>Drag to zoom, double-click for all. "
        "<button id=zoom-out type=button hidden>Show all</button></div></div>"
        f"<div class=scroll>{_curve(report, span)}{_chart(rows, span, height)}</div></section>"
    )


def _x(seconds: float, span: float) -> float:
    return _LEFT + _PLOT * seconds / span


def _axis(span: float, y: float, top: float) -> str:
    step = nice_step(span, 10)
    out = []
    at = 0.0
    while at <= span * 1.0001:
        x = _x(at, span)
        out.append(f'<g class=tick data-t="{at:g}"><line x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{y:.1f}"/>'
                   f'<text x="{x:.1f}" y="{y + 15:.1f}">{esc(_clock(at, step))}</text></g>')  # fmt: skip
        at += step
    return "".join(out)


def _clock(seconds: float, step: float) -> str:
    if seconds == 0:
        return "0"
    if step >= 3600:
        return f"{seconds / 3600:g} h"
    if step >= 60:
        return (
            f"{seconds / 60:g} min"
            if seconds < 3600
            else f"{int(seconds // 3600)}:{int(seconds % 3600 // 60):02d} h"
        )
    if seconds < 60:
        return f"{seconds:g} s"
    return f"{int(seconds // 60)}:{seconds % 60:02.0f} min"


def _chart(rows: Sequence[Row], span: float, height: int) -> str:
    y, out, gap = 8.0, [], 3 if height > 8 else 1
    named = height >= 8
    before: Row | None = None
    for row in rows:
        heading = ""
        if row.cpu and (before is None or not before.cpu):
            heading = "Scoring, CPU"
        elif not row.cpu and (before is None or row.node != before.node) and row.node:
            heading = row.node
        if heading:
            y += 6 if before else 0
            out.append(f'<text class=head x="0" y="{y + 11:.1f}">{esc(heading)}</text>')
            y += 18
        before = row
        a, b = _x(max(0.0, row.life[0]), span), _x(min(span, row.life[1]), span)
        out.append(f'<g class=row data-name="{esc(row.name)}">')
        if named:
            out.append(
                f'<text class=name x="{_LEFT - 8:.0f}" y="{y + height / 2 + 4:.1f}">{esc(_short(row.name))}'
                f"<title>{esc(row.name)}</title></text>"
            )
        out.append(f'<rect class=lane x="{a:.2f}" y="{y:.1f}" width="{max(0.0, b - a):.2f}" height="{height}"'
                   f' data-a="{max(0.0, row.life[0]):.3f}" data-b="{min(span, row.life[1]):.3f}"/>')  # fmt: skip
        out.extend(_bar(bar, y, height, span, row.name) for bar in row.bars)
        out.append("</g>")
        y += height + gap
    label = "Gantt chart: one line per worker, time from left to right"
    return (
        f'<svg id=gantt viewBox="0 0 {WIDTH:.0f} {y + 26:.0f}" width="{WIDTH:.0f}" height="{y + 26:.0f}" role=img '
        f'aria-label="{label}" data-left="{_LEFT:.0f}" data-plot="{_PLOT:.0f}" data-span="{span:.6f}">'
        f'<defs><clipPath id=plot><rect x="{_LEFT:.0f}" y="0" width="{_PLOT:.0f}" height="{y + 26:.0f}"/></clipPath>'
        "<pattern id=hatch width=6 height=6 patternUnits=userSpaceOnUse patternTransform='rotate(45)'>"
        "<rect width=6 height=6 class=hatch-ground /><line x1=0 y1=0 x2=0 y2=6 class=hatch-line /></pattern></defs>"
        f"<g class=axis>{_axis(span, y + 4, 4)}</g>{''.join(out)}<rect id=brush y=0 height={y + 4:.0f} width=0 x=0 /></svg>"
    )


def _bar(bar: Bar, y: float, height: int, span: float, worker: str) -> str:
    a, b = _x(bar.start, span), _x(bar.end, span)
    title = f"{bar.task or worker}: {bar.says}"
    rect = (
        f'<rect class="b {bar.kind}" x="{a:.2f}" y="{y:.1f}" width="{max(0.7, b - a):.2f}" height="{height}" '
        f'rx="{2 if height > 8 else 0}" clip-path="url(#plot)" '
        + attributes(data_a=f"{bar.start:.3f}", data_b=f"{bar.end:.3f}", data_task=bar.task or None,
                     data_says=bar.says, data_worker=worker)
        + f"><title>{esc(title)}</title></rect>"
    )  # fmt: skip
    if height < 14 or not bar.task:
        return rect
    # Labels that do not fit stay empty; page.js fills them in when zooming makes room.
    room = int((b - a - 8) / 6.4)
    shown = bar.task if len(bar.task) <= room else bar.task[: max(0, room - 1)] + "…" if room >= 4 else ""
    return rect + (
        f'<text class="t {bar.kind}" x="{a + 4:.1f}" y="{y + height / 2 + 4:.1f}" data-a="{bar.start:.3f}" '
        f'data-b="{bar.end:.3f}" data-full="{esc(bar.task)}" clip-path="url(#plot)">{esc(shown)}</text>'
    )


def _short(name: str) -> str:
    return name if len(name) <= 17 else name[:8] + "…" + name[-8:]


def _curve(report: Report, span: float) -> str:
    values = busy_curve(report)
    if not values:
        return ""
    high, base = 46.0, 54.0
    slices = len(values)
    made = report.makespan_s

    def point(i: int, v: float) -> str:
        return f"{_x(made * i / slices, span):.1f},{base - high * v:.1f}"

    path = " ".join(f"{point(i, v)} {point(i + 1, v)}" for i, v in enumerate(values))
    return (
        f'<svg id=busy viewBox="0 0 {WIDTH:.0f} 64" width="{WIDTH:.0f}" height=64 role=img '
        'aria-label="Share of GPUs inside inference over time" '
        f'data-values="{" ".join(f"{v:.3f}" for v in values)}" data-made="{made:.6f}">'
        f'<text class=name x="{_LEFT - 8:.0f}" y="22">busy workers</text>'
        f'<text class="name soft" x="{_LEFT - 8:.0f}" y="38">{esc(percent(report.busy_fraction))} on average</text>'
        f'<line class=grid x1="{_LEFT:.0f}" x2="{_LEFT + _PLOT:.0f}" y1="{base - high:.0f}" y2="{base - high:.0f}"/>'
        f'<line class=grid x1="{_LEFT:.0f}" x2="{_LEFT + _PLOT:.0f}" y1="{base:.0f}" y2="{base:.0f}"/>'
        f'<polygon class=area points="{_x(0, span):.1f},{base} {path} {_x(made, span):.1f},{base}"/></svg>'
    )
