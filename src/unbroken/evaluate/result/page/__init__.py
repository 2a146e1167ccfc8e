"""One evaluation as a page: a single HTML file that needs no network and no other file.

    render(report) -> str          write_page(report, path)

markup.py    escaping, numbers and durations for people
summary.py   the tiles, and the makespan against its bound, its promise and the naive plan
gantt.py     what every GPU and CPU worker did when, and the share of busy GPUs over time
tables.py    scores, tasks without one, workers
page.css, page.js   looks and behaviour; our own, no library
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from .... import atomic
from ....journal.codec import encode
from ....page.terminal import script_json
from ...contracts import Report
from ..results import finite
from . import gantt, summary, tables
from .markup import esc, when


def write_page(report: Report, path: Path) -> None:
    """Replaces `path` by the page."""
    atomic.write_text(path, render(report))


def render(report: Report) -> str:
    """The whole page. Every text that comes from outside is escaped."""
    here = files(__package__)
    data = script_json(finite(encode(report)))
    sections = [
        summary.tiles(report),
        tables.errors(report),
        tables.scores(report),
        summary.makespan(report),
        gantt.section(report),
        tables.workers(report),
        summary.explanation(),
    ]
    body = "\n".join(sections)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{esc(report.suite)} · {esc(report.model)} · unbroken eval</title>",
            f"<style>{here.joinpath('page.css').read_text()}</style></head><body><main>",
            summary.header(report, body),
            body,
            f"<footer>Made by <code>unbroken eval</code>, {when(report.ended)}.</footer></main>",
            '<div id="tip" role="status" hidden></div>',
            f'<script type="application/json" id="report">{data}</script>',
            f"<script>{here.joinpath('page.js').read_text()}</script>",
            "</body></html>",
            "",
        ]
    )
