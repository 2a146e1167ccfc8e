"""The report as one self-contained HTML file: styles, script and drawings inline, nothing from a network."""

from __future__ import annotations

import datetime as dt
from importlib import resources

from ...page.charts.spec import Bars, Boxes, Figure, Grid, Heat
from ...page.charts.svg import render
from ...page.terminal import escape
from ...samples.tables import Note
from ...version import __version__
from .build import Report, cards, highlights

KIND_CLASS = {
    "set aside": "aside",
    "assumption": "assumed",
    "missing": "assumed",
    "repaired": "assumed",
    "difference": "assumed",
}
KIND_ORDER = ("set aside", "repaired", "assumption", "missing", "difference", "info")


def page(report: Report, now: dt.datetime | None = None) -> str:
    """The whole page."""
    folder = resources.files("unbroken.trace.report")
    css, js = folder.joinpath("page.css").read_text("utf-8"), folder.joinpath("page.js").read_text("utf-8")
    now = now or dt.datetime.now(dt.UTC)
    summary = list(report.findings.get("summary").dicts())
    span = ""
    firsts = [r["first_utc"] for r in summary if r["first_utc"]]
    lasts = [r["last_utc"] for r in summary if r["last_utc"]]
    if firsts and lasts:
        span = f"{min(firsts):%d %B %Y} to {max(lasts):%d %B %Y}"
    files = report.files[:4]
    source = ", ".join(f"{n} ({f})" for n, f in files) + (
        f" and {len(report.files) - 4} more" if len(report.files) > 4 else ""
    )
    compared = ", compared with " + ", ".join(r.label for r in report.references) if report.references else ""
    nav = [(s.key, s.title) for s, figures, _ in report.sections if figures]
    nav.append(("data", "About the data"))
    body = [
        '<header class="top">',
        f"<h1>{escape(report.title)}: what runs, how it ends, what it costs</h1>",
        f"<p>{escape(span + '. ' if span else '')}From {escape(source)}{escape(compared)}.</p></header>",
        "<nav><div>" + "".join(f'<a href="#{k}">{escape(t)}</a>' for k, t in nav) + "</div></nav><main>",
    ]
    numbers = cards(report.findings)
    if numbers:
        body.append(
            '<div class="cards">'
            + "".join(
                f'<div class="card"><b>{escape(v)}</b><span>{escape(w)}</span></div>' for v, w in numbers
            )
            + "</div>"
        )
    if report.rejected_count:
        body.append(
            f'<p class="note"><span class="kind aside">set aside</span> {report.rejected_count:,} rows could not be used: '
            '<a href="#data">see why</a>.</p>'
        )
    if (summary and not sum(r["jobs"] for r in summary)) or (not summary and not report.figures):
        body.append("<p><b>The trace holds no job.</b> The header was read, but no row follows it.</p>")
    said = highlights(report)
    if said:
        body.append('<ul class="lead">' + "".join(f"<li>{escape(s)}</li>" for s in said) + "</ul>")
    for section, figures, missing in report.sections:
        if not figures:
            continue
        body.append(f'<section id="{section.key}"><h2>{escape(section.title)}</h2>')
        body += [figure_html(f) for f in figures]
        if missing:
            body.append(
                '<p class="note">Not shown: '
                + "; ".join(f"{escape(w)} (needs {escape(n)})" for w, n in missing)
                + ".</p>"
            )
        body.append("</section>")
    body.append(data_html(report))
    body.append(
        f"<footer>Written by unbroken {escape(__version__)} on {now:%d %B %Y, %H:%M} UTC. Figures and tables are numbered as in "
        "“Characterization of Large Language Model Development in the Datacenter” (NSDI’24); those with a name instead of a number "
        "are additions. Published values: InternLM/AcmeTrace, CC-BY-4.0.</footer></main>"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(report.title)}: cluster report</title><style>{css}</style></head><body>'
        + "\n".join(body)
        + f'<div id="tip" role="status"></div><script>{js}</script></body></html>\n'
    )


def figure_html(f: Figure) -> str:
    """A figure: number, title, its sentence, panels, tables."""
    many = len(f.panels) > 4
    solo = len(f.panels) == 1
    size = (400, 250) if many else (1080, 320) if solo else (520, 310)
    panels = []
    for i, p in enumerate(f.panels):
        width, height = size
        if solo and isinstance(p, Bars | Heat | Boxes):
            width = 1080
        button = f'<button data-name="{f.key}-{i + 1}" title="Save this drawing as SVG">SVG</button>'
        panels.append(f'<div class="panel">{button}{render(p, width, height)}</div>')
    kind = " many" if many else " solo" if solo else ""
    inner = f'<div class="panels{kind}">' + "".join(panels) + "</div>" if panels else ""
    tables = "".join(
        grid_html(g, fold=bool(panels) and len(g.rows) > 3 and not f.table_first) for g in f.grids
    )
    body = tables + inner if f.table_first else inner + tables
    note = f'<p class="note">{escape(f.note)}</p>' if f.note else ""
    say = f'<p class="say">{escape(f.sentence)}</p>' if f.sentence else ""
    long = ' class="long"' if many or any(len(g.rows) > 14 for g in f.grids) else ""
    return f'<figure id="fig-{f.key}"{long}><h3><small>{escape(f.number)}</small>{escape(f.title)}</h3>{say}{body}{note}</figure>'


def grid_html(g: Grid, fold: bool) -> str:
    """A table, folded away where drawings already say it."""
    flags = g.numeric or tuple(False for _ in g.header)

    def cells(tag: str, row: tuple[str, ...]) -> str:
        return "".join(
            f"<{tag}{' class=n' if n else ''}>{escape(c)}</{tag}>" for c, n in zip(row, flags, strict=True)
        )

    caption = f"<caption>{escape(g.caption)}</caption>" if g.caption else ""
    table = (
        f'<div class="scroll"><table>{caption}<thead><tr>{cells("th", g.header)}</tr></thead><tbody>'
        + "".join(f"<tr>{cells('td', r)}</tr>" for r in g.rows)
        + "</tbody></table></div>"
    )
    return f"<details><summary>The numbers</summary>{table}</details>" if fold else table


def data_html(report: Report) -> str:
    """About the data: what was assumed, repaired, set aside; what was declared; the rows that were set aside."""
    notes = sorted(report.notes, key=lambda n: KIND_ORDER.index(n.kind))
    rows = "".join(note_html(n) for n in notes)
    out = [
        '<section id="data"><h2>About the data</h2>',
        '<p class="say">Everything that was assumed, repaired or set aside. No row was dropped without being counted here.</p>',
        f'<div class="scroll"><table class="data"><thead><tr><th></th><th class="n">rows</th><th>what</th><th>file</th></tr></thead><tbody>{rows}</tbody></table></div>'
        if rows
        else "<p>Nothing had to be assumed, repaired or set aside.</p>",
        '<p class="note">Declared: ' + escape("; ".join(report.settings.sentences())) + ".</p>",
        '<p class="note">Quantiles are the smallest value that at least the share does not exceed, exact to the second up to 4.5 hours and '
        "to one part in 16,384 above. Types, states and sizes count GPU jobs; GPU time is GPUs times duration.</p>",
    ]
    if report.rejected:
        lines = "\n".join(f"{r.source}: {r.reason}: {(r.text or '')[:160]}" for r in report.rejected[:60])
        more = f" (the first 60 of {report.rejected_count:,})" if report.rejected_count > 60 else ""
        out.append(
            f"<details><summary>The rows that were set aside{more}</summary><pre>{escape(lines)}</pre></details>"
        )
    empty = [(s.title, missing) for s, figures, missing in report.sections if not figures]
    if empty:
        out.append(
            '<p class="note">Chapters without data: '
            + "; ".join(f"{escape(t)} (needs {escape(m[0][1])})" for t, m in empty if m)
            + ".</p>"
        )
    return "".join(out) + "</section>"


def note_html(n: Note) -> str:
    """A row of the table of notes."""
    count = f"{n.count:,}" + (f" of {n.of:,}" if n.of and n.of != n.count else "") if n.count else ""
    examples = f"<br><code>{escape(' · '.join(e[:140] for e in n.examples))}</code>" if n.examples else ""
    return (
        f'<tr><td><span class="kind {KIND_CLASS.get(n.kind, "")}">{n.kind}</span></td><td class="n">{count}</td>'
        f"<td>{escape(n.text)}{examples}</td><td>{escape(n.source)}</td></tr>"
    )
