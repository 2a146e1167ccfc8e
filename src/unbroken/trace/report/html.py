"""The report as one self-contained HTML file: what `report.html` is filled with."""

from __future__ import annotations

import datetime as dt

from ...page.charts.spec import Figure, Grid
from ...page.charts.svg import render as draw
from ...page.elements import Markup
from ...page.shell import render
from ...version import __version__
from .build import TraceReport, cards, highlights

KIND_CLASS = {
    "set aside": "bad",
    "assumption": "warn",
    "missing": "warn",
    "repaired": "warn",
    "difference": "warn",
}
KIND_ORDER = ("set aside", "repaired", "assumption", "missing", "difference", "info")


def page(report: TraceReport, now: dt.datetime | None = None) -> str:
    """The whole page. Raises MissingExtra without Jinja2."""
    now = now or dt.datetime.now(dt.UTC)
    summary = list(report.findings.get("summary").dicts())
    firsts = [r["first_utc"] for r in summary if r["first_utc"]]
    lasts = [r["last_utc"] for r in summary if r["last_utc"]]
    more = f" and {len(report.files) - 4} more" if len(report.files) > 4 else ""
    labels = ", ".join(r.label for r in report.references)
    without = [(s.title, missing) for s, figures, missing in report.sections if not figures]
    return render(
        "trace/report/report.html",
        report=report,
        span=f"{min(firsts):%d %B %Y} to {max(lasts):%d %B %Y}. " if firsts and lasts else "",
        source=", ".join(f"{n} ({f})" for n, f in report.files[:4]) + more,
        compared=f", compared with {labels}" if labels else "",
        places=[
            *((s.key, s.title) for s, figures, _ in report.sections if figures),
            ("data", "About the data"),
        ],
        cards=cards(report.findings),
        empty=not sum(r["jobs"] for r in summary) if summary else not report.figures,
        highlights=highlights(report),
        notes=sorted(report.notes, key=lambda n: KIND_ORDER.index(n.kind)),
        kinds=KIND_CLASS,
        chapters=[(title, missing[0][1]) for title, missing in without if missing],
        version=__version__,
        written=f"{now:%d %B %Y, %H:%M}",
        numeric=numeric,
        layout=layout,
        drawn=drawn,
        long=lambda f: layout(f) == "many" or any(len(g.rows) > 14 for g in f.grids),
    )


def numeric(g: Grid, column: int) -> bool:
    """Whether a column holds numbers."""
    return bool(g.numeric) and g.numeric[column]


def layout(f: Figure) -> str:
    """How the panels of a figure lie: many small ones, one over the whole width, or side by side."""
    return "many" if len(f.panels) > 4 else "solo" if len(f.panels) == 1 else ""


def drawn(f: Figure) -> list[Markup]:
    """The panels of a figure."""
    size = {"many": (400, 250), "solo": (1080, 320), "": (520, 310)}[layout(f)]
    return [draw(p, *size) for p in f.panels]
