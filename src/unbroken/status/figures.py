"""The two figures of a report: the loss curve with its incidents, and the timeline in lanes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from ..page.charts.curve import curve
from ..page.charts.drawing import drawing
from ..page.charts.lanes import Window, lanes
from ..page.charts.marks import BADGE_H, LEFT, RIGHT, WIDTH, Mark, badge_rows
from ..page.charts.scales import Axis
from ..page.elements import Markup
from ..progress.records.incident import Incident
from ..units import Duration
from .curve import Steps
from .data import AttemptRecord, AttemptSpan, RunReport, seconds_text

_MAX_NODES = 24
_MAX_STRIPS = 64
_MAX_TIPS = 1500
_STRIP = 11.0
_GAP = 7.0
_GAP_FACTOR = 10


@dataclass(frozen=True)
class PageFigure:
    """A drawing ('' where there is nothing to draw), what hovering says, the kinds of windows in it, a note."""

    svg: Markup
    data: dict[str, object] = field(default_factory=dict)
    kinds: frozenset[str] = frozenset()
    note: str = ""


def curve_figure(report: RunReport, steps: Steps) -> PageFigure:
    """The loss curve of the steps that count (already thinned), with a mark for each incident."""
    last = report.executions.last
    if not len(steps) or not len(last):
        return PageFigure(Markup())
    span = (float(last.step[0]), float(last.step[-1]))
    points = list(zip(steps.step.tolist(), steps.loss.tolist(), strict=True))
    x_of = Axis("linear", span[0], max(span[1], span[0] + 1), LEFT, WIDTH - RIGHT)
    marks = [
        Mark(x_of.at(i.step), str(i.number), incident_title(i), f"incident-{i.number}")
        for i in report.incidents
    ]
    gaps = _gaps(last)
    drawn, x, y = curve(points, marks, steps=span, gaps=gaps, height=320.0)
    rows = zip(points, steps.attempt.tolist(), steps.time.tolist(), strict=True)
    data: dict[str, object] = {
        "points": [
            [
                round(x.at(step), 1),
                round(y.at(loss) if math.isfinite(loss) else y.b, 1),
                f"step {step:,}\nloss {loss:.6g}\nattempt {attempt}, after {seconds_text(report.own_time(when))}",
            ]
            for (step, loss), attempt, when in rows
        ],
        "top": y.b,
        "bottom": y.a,
    }
    svg = drawing(drawn, WIDTH, 320.0, "Loss by step")
    note = (
        f"The line is broken in {len(gaps)} place{'s' * (len(gaps) != 1)}, where steps were completed and not reported."
        if gaps
        else ""
    )
    return PageFigure(svg, data, note=note)


def _gaps(last: Steps) -> frozenset[int]:
    """The steps before which others are missing: where the step rises by far more than it usually does."""
    rises = np.diff(last.step)
    if not len(rises):
        return frozenset()
    return frozenset(last.step[1:][rises > _GAP_FACTOR * max(1.0, float(np.median(rises)))].tolist())


def timeline_figure(report: RunReport) -> PageFigure:
    """A lane for each rank's place on each node, over the run's time without its pauses."""
    if not report.attempts or report.spec is None:
        return PageFigure(Markup())
    clock = report.own_time
    x = Axis("linear", 0.0, max(clock(report.ended), 1e-3), LEFT + 10, WIDTH - RIGHT)
    nodes, note = _nodes_to_show(report)
    nproc = report.spec.nproc
    strips = nproc if nproc * len(nodes) <= _MAX_STRIPS else 1
    marks = [
        Mark(
            x.at(clock(i.last_sign if i.step >= 0 else i.detected)),
            str(i.number),
            incident_title(i),
            f"incident-{i.number}",
        )
        for i in report.incidents
    ]
    placed = badge_rows(marks)
    base = [(s.kind, x.at(clock(s.start)), x.at(clock(s.end))) for s in report.spans if s.kind != "paused"]
    kinds = {k for k, _, _ in base}
    rows: list[tuple[float, list[Window]]] = []
    labels = []
    at_y = 12.0 + BADGE_H * len(placed)
    for node in nodes:
        labels.append((node, at_y + strips * _STRIP / 2 + 3))
        for local in range(strips):
            whole = strips == 1 and nproc > 1
            own = [
                (kind, x.at(clock(a)), x.at(clock(b)))
                for kind, a, b in _own(report, node, None if whole else local)
            ]
            kinds |= {k for k, _, _ in own}
            rows.append((at_y, own))
            at_y += _STRIP
        at_y += _GAP
    height = at_y + 46.0
    pauses = [
        (
            x.at(clock(s.start)),
            f"stopped here for {seconds_text(s.seconds)}, until the command was given again",
        )
        for s in report.spans
        if s.kind == "paused"
    ]
    drawn = lanes(
        base,
        rows,
        placed,
        pauses,
        x=x,
        labels=labels,
        height=height,
        time_text=lambda v: str(Duration(v)) if v else "0",
    )
    svg = drawing(drawn, WIDTH, height, "What each node did over time")
    tips = sorted((s for s in report.spans if s.kind != "paused"), key=lambda s: -s.seconds)[:_MAX_TIPS]
    spans_data = [
        [round(x.at(clock(s.start)), 1), round(x.at(clock(s.end)), 1), _tip(s, report)]
        for s in sorted(tips, key=lambda s: s.start)
    ]
    return PageFigure(svg, {"spans": spans_data}, frozenset(kinds), note)


def incident_title(i: Incident) -> str:
    """One line about an incident, for hovering."""
    where = ", ".join(([f"rank {i.rank}"] if i.rank is not None else []) + ([i.node] if i.node else []))
    return f"{i.number}: {i.reason}{f' ({where})' if where else ''}, last step {i.step}"


def _nodes_to_show(report: RunReport) -> tuple[list[str], str]:
    """All nodes, or where they are many those that something happened to, and a few more."""
    if len(report.nodes) <= _MAX_NODES:
        return list(report.nodes), ""
    told = dict.fromkeys(n for i in report.incidents for n in (i.node, *i.nodes) if n)
    told.update(dict.fromkeys(str(e["node"]) for e in report.events if e["kind"] in ("lost", "cordon")))
    first = set(report.attempts[0].slots)
    changed = dict.fromkeys(n for a in report.attempts for n in a.slots if n not in first)
    chosen = list(dict.fromkeys([*told, *changed, *report.nodes]))[:_MAX_NODES]
    hidden = len(report.nodes) - len(chosen)
    return sorted(
        chosen
    ), f"{len(chosen)} of {len(report.nodes)} nodes, those with incidents first; {hidden} are not shown."


def _own(report: RunReport, node: str, local: int | None) -> list[tuple[str, float, float]]:
    """(kind, from, to) in which one rank's place on a node (the node as a whole where `local` is None) differs from
    the run as a whole: spare or away while others train, fault where it is what the others waited for."""
    found: list[tuple[str, float, float]] = []
    faults = {i.attempt: i for i in report.incidents if i.ended_attempt}
    extent: dict[int, tuple[float, float]] = {}
    unnoticed: dict[int, AttemptSpan] = {}
    for s in report.spans:
        if s.kind != "paused":
            extent[s.attempt] = (extent.get(s.attempt, (s.start, 0.0))[0], s.end)
        if s.kind == "unnoticed":
            unnoticed[s.attempt] = s
    lost = _lost_times(report, node)
    for a in report.attempts:
        if a.number not in extent:
            continue
        if node not in a.slots:
            begin, end = extent[a.number]
            kind = "away" if any(low <= begin < high for low, high in lost) else "spare"
            if found and found[-1][0] == kind and found[-1][2] == begin:
                begin = found.pop()[1]
            found.append((kind, begin, end))
            continue
        fault, wait = faults.get(a.number), unnoticed.get(a.number)
        if fault is not None and wait is not None and _is_at_fault(fault, a, node, local, report):
            found.append(("fault", wait.start, wait.end))
    return found


def _is_at_fault(i: Incident, a: AttemptRecord, node: str, local: int | None, report: RunReport) -> bool:
    """Whether the incident's rank (or, without one, its node) is this place."""
    nproc = report.spec.nproc if report.spec else 1
    if i.rank is not None and 0 <= i.rank // nproc < len(a.slots):
        return a.slots[i.rank // nproc] == node and (local is None or i.rank % nproc == local)
    return i.node == node


def _lost_times(report: RunReport, node: str) -> list[tuple[float, float]]:
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


def _tip(s: AttemptSpan, report: RunReport) -> str:
    words = {
        "starting": "starting and restoring", "replayed": "doing steps again", "unnoticed": "not yet noticed",
        "finishing": "ending", "setup": "setting up",
    }  # fmt: skip
    since = seconds_text(report.own_time(s.start))
    who = f"attempt {s.attempt}: " if s.attempt else ""
    return f"{who}{words.get(s.kind, s.kind)}\n{seconds_text(s.seconds)}, from {since} on"
