"""One evaluation as a page: a single HTML file that needs no network and no other file.

    render(report) -> str          write_page(report, path)

evaluation.html   the page's template
summary.py        tiles, tables and the makespan against its bound, as values
gantt.py          what every GPU and CPU worker did when, and the share of busy GPUs over time
markup.py         numbers and durations for people
"""

from __future__ import annotations

from math import isfinite
from pathlib import Path

from .... import atomic
from ....journal.codec import encode
from ....page import shell
from ....page.charts.gantt import gantt as chart
from ....page.charts.gantt import share_curve
from ....page.charts.spark import interval
from ....page.elements import Markup
from ...contracts import Metric, Report
from ..cost import FORMULA
from ..results import checked, finite
from . import gantt, summary
from .markup import duration, number, percent, when

_KINDS = (
    ("start", "starting"), ("fetch", "fetching the model"), ("load", "loading it"), ("infer", "inference"),
    ("shared", "inference, tail given away"), ("lost", "lost or failed"), ("score", "scoring (CPU)"),
)  # fmt: skip


def write_page(report: Report, path: Path) -> None:
    """Replaces `path` by the page."""
    atomic.write_text(path, render(report))


def render(report: Report) -> str:
    """The whole page. Raises MissingExtra without Jinja2."""
    rows = gantt.rows_of(report) if report.makespan_s > 0 else []
    span = max([report.makespan_s, *(b.end for r in rows for b in r.bars)])
    drawn = {b.kind for r in rows for b in r.bars}
    values = gantt.busy_curve(report)
    average = f"{percent(report.busy_fraction)} on average"
    busy = share_curve(values, report.makespan_s, span, "busy workers", average, "Share of GPUs inside inference over time") if values else Markup()  # fmt: skip
    spent = dict.fromkeys((s.task for s in report.scores), 0.0)
    for one in report.trials:
        if one.task in spent:
            spent[one.task] += one.busy_s
    spans = summary.spans(report)
    standard = summary.usual(report.scores)
    places = {
        "all-scores": report.scores,
        "sameness": report.checks,
        "makespan": spans,
        "timeline": rows,
        "workers": report.workers,
    }
    return shell.render(
        "evaluate/result/page/evaluation.html",
        data=finite(encode(report)),
        report=report,
        places=[(k, k.removeprefix("all-").capitalize()) for k, shown in places.items() if shown],
        tiles=summary.tiles(report),
        spent=spent,
        standard=standard,
        spans=spans,
        longest=max((s for _, s, _, _ in spans), default=1.0),
        gantt=chart(rows, span, "Gantt chart: one line per worker, time from left to right") if rows else "",
        busy=busy,
        kinds=[(k, t) for k, t in _KINDS if k in drawn or (k == "lost" and "failed" in drawn)],
        workers=summary.workers(report),
        csv=summary.as_csv(report),
        checked=checked(report),
        differing=sorted(
            (c for c in report.checks if c.differ or c.why),
            key=lambda c: (not c.beyond_chance, c.drawn, c.task),
        ),
        alike=[c for c in report.checks if not (c.differ or c.why)],
        conditions=summary.conditions,
        formula=FORMULA,
        facts=lambda score: summary.facts(score, standard),
        spark=_spark,
        known=lambda value: value is not None and isfinite(value),
        duration=duration,
        number=number,
        percent=percent,
        repr=repr,
        when=when,
    )


def _spark(metric: Metric | None) -> Markup:
    return interval(metric.value, metric.stderr) if metric is not None else Markup()
