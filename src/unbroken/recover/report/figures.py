"""The two figures of a report: the loss curve with its incidents, and the timeline in lanes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...units import Duration
from .curve import Steps
from .data import AttemptStory, IncidentStory, Report, Span, seconds_text
from .svg import LEFT, RIGHT, WIDTH, Mark, Scale, curve, lanes

_MAX_NODES = 24
_MAX_STRIPS = 64
_MAX_TIPS = 3000
_STRIP = 11.0
_GAP = 7.0
_TOP = 64.0


@dataclass(frozen=True)
class Figure:
    """SVG text ('' where there is nothing to draw), what its script needs, the kinds of stretches in it, a note."""

    svg: str
    data: dict[str, object] = field(default_factory=dict)
    kinds: frozenset[str] = frozenset()
    note: str = ""


def curve_figure(report: Report, steps: Steps) -> Figure:
    """The loss curve of the steps that count (already thinned), with a mark for each incident."""
    empty: dict[str, object] = {"step": [], "x": [0, 0], "range": [0, 0]}
    last = report.executions.last
    if not len(steps) or not len(last):
        return Figure("", empty)
    span = (float(last.step[0]), float(last.step[-1]))
    points = list(zip(steps.step.tolist(), steps.loss.tolist(), strict=True))
    x_of = Scale(span[0], max(span[1], span[0] + 1), LEFT, WIDTH - RIGHT)
    marks = [
        Mark(
            x_of(min(max(i.step, span[0]), span[1])), str(i.number), incident_title(i), f"incident-{i.number}"
        )
        for i in report.incidents
    ]
    height = 320.0
    drawn, x, y = curve(points, marks, step_range=span, height=height)
    svg = (
        f'<svg viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" aria-label="Loss by step">'
        f'<rect x="0" y="0" width="{WIDTH:.0f}" height="{height:.0f}" fill="transparent"/>{drawn}'
        f'<line class="cross" y1="20" y2="{height - 34:.0f}" style="display:none"/>'
        '<circle class="dot" r="3.5" style="display:none"/></svg>'
    )
    data: dict[str, object] = {
        "range": [x.low, x.high],
        "x": [x.start, x.stop],
        "step": steps.step.tolist(),
        "loss": [f"{v:.6g}" for v in steps.loss.tolist()],
        "py": [round(y(min(v, y.high)) if math.isfinite(v) else y(y.high), 1) for v in steps.loss.tolist()],
        "attempt": steps.attempt.tolist(),
        "at": [seconds_text(max(0.0, t - report.started)) for t in steps.time.tolist()],
    }
    return Figure(svg, data)


def timeline_figure(report: Report) -> Figure:
    """A lane for each rank's place on each node, over the run's time without its pauses."""
    if not report.attempts or report.spec is None:
        return Figure("", {"spans": []})
    clock = _Clock(report)
    x = Scale(0.0, max(clock(report.ended), 1e-3), LEFT + 10, WIDTH - RIGHT)
    nodes, note = _nodes_to_show(report)
    nproc = report.spec.nproc
    strips = nproc if nproc * len(nodes) <= _MAX_STRIPS else 1
    rows: list[tuple[str, float, Sequence[tuple[str, float, float]]]] = []
    labels = []
    kinds: set[str] = set()
    at_y = _TOP
    for node in nodes:
        labels.append((node, at_y + strips * _STRIP / 2 + 3))
        for local in range(strips):
            spans = [
                (kind, x(clock(a)), x(clock(b)))
                for kind, a, b in _strip(report, node, local if strips > 1 or nproc == 1 else None)
            ]
            kinds |= {k for k, _, _ in spans}
            rows.append((node, at_y, spans))
            at_y += _STRIP
        at_y += _GAP
    height = at_y + 40.0
    marks = [
        Mark(x(clock(i.at)), str(i.number), incident_title(i), f"incident-{i.number}")
        for i in report.incidents
    ]
    pauses = [
        (x(clock(s.start)), f"stopped here for {seconds_text(s.seconds)}, until the command was given again")
        for s in report.spans
        if s.kind == "paused"
    ]
    drawn = lanes(
        rows,
        marks,
        pauses,
        x=x,
        labels=labels,
        height=height,
        time_text=lambda v: str(Duration(v)) if v else "0",
    )
    svg = (
        f'<svg viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" aria-label="What each node did over time">'
        f'<rect x="0" y="0" width="{WIDTH:.0f}" height="{height:.0f}" fill="transparent"/>{drawn}</svg>'
    )
    tips = sorted((s for s in report.spans if s.kind != "paused"), key=lambda s: -s.seconds)[:_MAX_TIPS]
    spans_data = [
        [s.kind, round(x(clock(s.start)), 1), round(x(clock(s.end)), 1), _tip(s, report)]
        for s in sorted(tips, key=lambda s: s.start)
    ]
    return Figure(svg, {"spans": spans_data}, frozenset(kinds), note)


def incident_title(i: IncidentStory) -> str:
    """One line about an incident, for hovering."""
    where = ", ".join(([f"rank {i.rank}"] if i.rank is not None else []) + ([i.node] if i.node else []))
    return f"{i.number}: {i.reason}{f' ({where})' if where else ''}, after step {i.step}"


class _Clock:
    """Seconds of the run's own time: pauses take none."""

    def __init__(self, report: Report) -> None:
        self._started = report.started
        self._pauses = [(s.start, s.end) for s in report.spans if s.kind == "paused"]

    def __call__(self, when: float) -> float:
        paused = sum(min(when, end) - start for start, end in self._pauses if when > start)
        return max(0.0, when - self._started - paused)


def _nodes_to_show(report: Report) -> tuple[list[str], str]:
    """All nodes, or where they are many those that something happened to, and a few more."""
    if len(report.nodes) <= _MAX_NODES:
        return list(report.nodes), ""
    told = dict.fromkeys(n for i in report.incidents for n in (i.node, *i.nodes) if n)
    told.update(dict.fromkeys(str(e["node"]) for e in report.events if e["kind"] in ("lost", "cordon")))
    first = report.attempts[0].slots
    changed = dict.fromkeys(n for a in report.attempts for n in a.slots if n not in first)
    chosen = list(dict.fromkeys([*told, *changed, *report.nodes]))[:_MAX_NODES]
    hidden = len(report.nodes) - len(chosen)
    return sorted(
        chosen
    ), f"{len(chosen)} of {len(report.nodes)} nodes, those with incidents first; {hidden} are not shown."


def _strip(report: Report, node: str, local: int | None) -> list[tuple[str, float, float]]:
    """(kind, from, to) of one rank's place on a node; of the node as a whole where `local` is None."""
    found: list[tuple[str, float, float]] = []
    faults = {i.attempt: i for i in report.incidents}
    spans: dict[int, list[Span]] = {}
    for s in report.spans:
        spans.setdefault(s.attempt, []).append(s)
    lost = _lost_times(report, node)
    for a in report.attempts:
        mine = spans.get(a.number, [])
        if not mine:
            continue
        if node not in a.slots:
            begin, end = mine[0].start, mine[-1].end
            if not any(low <= begin < high for low, high in lost):
                found.append(("spare", begin, end))
            continue
        fault = faults.get(a.number)
        at_fault = fault is not None and _is_at_fault(fault, a, node, local, report)
        for s in mine:
            if s.kind == "paused":
                continue
            kind = "fault" if s.kind == "unnoticed" and at_fault else s.kind
            found.append((kind, s.start, s.end))
    return found


def _is_at_fault(i: IncidentStory, a: AttemptStory, node: str, local: int | None, report: Report) -> bool:
    """Whether the incident's rank (or, without one, its node) is this place."""
    nproc = report.spec.nproc if report.spec else 1
    if i.rank is not None and 0 <= i.rank // nproc < len(a.slots):
        return a.slots[i.rank // nproc] == node and (local is None or i.rank % nproc == local)
    return i.node == node


def _lost_times(report: Report, node: str) -> list[tuple[float, float]]:
    times: list[tuple[float, float]] = []
    since: float | None = None
    for e in report.events:
        if e.get("node") != node:
            continue
        if e["kind"] in ("lost", "cordon") and since is None:
            since = float(e["t"]) - 1.0
        elif e["kind"] == "returned" and since is not None:
            times.append((since, float(e["t"])))
            since = None
    return [*times, (since, math.inf)] if since is not None else times


def _tip(s: Span, report: Report) -> str:
    words = {
        "starting": "starting and restoring", "replayed": "doing steps again", "unnoticed": "not yet noticed",
        "finishing": "ending",
    }  # fmt: skip
    since = seconds_text(max(0.0, s.start - report.started))
    return f"attempt {s.attempt}: {words.get(s.kind, s.kind)}\n{seconds_text(s.seconds)}, from {since} on"
