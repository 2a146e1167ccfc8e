"""What one sees first: what was evaluated, whether it is whole, how long it took and against what."""

from __future__ import annotations

from ...contracts import Report
from ..results import against_naive
from .markup import duration, esc, percent, tag, when

PLACES = {"all-scores": "Scores", "makespan": "Makespan", "timeline": "Timeline", "workers": "Workers"}
"""The sections that the header can lead to, by their id."""


def header(report: Report, body: str) -> str:
    """Suite, model, checkpoint and date, and links to those sections that `body` has."""
    checkpoint = f' · checkpoint <code title="{esc(report.checkpoint)}">{esc(report.checkpoint[:12])}</code>'
    return (
        f"<header><p class=kicker>{esc(report.suite)}</p><h1>{esc(report.model)}</h1>"
        f"<p class=sub>{when(report.started)}{checkpoint if report.checkpoint else ''}</p>"
        f"<nav>{''.join(f'<a href=#{place}>{name}</a>' for place, name in PLACES.items() if f'id={place}>' in body)}</nav></header>"
    )


def tiles(report: Report) -> str:
    """The figures that answer the first questions."""
    samples = sum(s.samples for s in report.scores)
    scored = sum(s.scored for s in report.scores)
    tasks = len(report.scores) + len(report.errors)
    gpus = sum(max(1, len(w.gpus)) for w in report.workers)
    nodes = len({w.node for w in report.workers})
    whole = not report.errors and scored == samples
    what = (
        f"{gpus} GPU{'s' * (gpus != 1)}"
        if any(w.gpus for w in report.workers)
        else f"{gpus} CPU worker{'s' * (gpus != 1)}"
    )
    boxes = [
        _tile(
            f"{len(report.scores)} of {tasks}" if report.errors else str(tasks),
            "tasks scored" if tasks != 1 else "task scored",
            f"{scored:,} of {samples:,} samples have a verdict",
            "good" if whole else "warn",
        )
    ]
    if not report.trials:
        boxes.append(_tile("0", "GPUs taken", "every answer was there already"))
        return tag("section", *boxes, class_="tiles", aria_label="Summary")
    boxes.append(
        _tile(
            duration(report.makespan_s),
            "from start to last score",
            f"on {what}, {nodes} node{'s' * (nodes != 1)}"
            + (f"; {report.reused:,} answers were there before" if report.reused else ""),
        )
    )
    if report.lower_bound_s > 0:
        ratio = report.makespan_s / report.lower_bound_s
        boxes.append(
            _tile(
                f"{ratio:.2f} ×",
                "the lower bound",
                f"no plan can take less than {duration(report.lower_bound_s)}",
                "good" if ratio <= 1.1 else "warn" if ratio > 1.5 else "",
            )
        )
    if (found := against_naive(report)) is not None:
        figure, how = found
        boxes.append(
            _tile(
                figure,
                f"{how} {'as' if how == 'as fast' else 'than'} one trial per dataset",
                f"which takes {duration(report.naive_s)} with the same times",
                "warn" if how == "slower" else "",
            )
        )
    busy = report.busy_fraction
    boxes.append(
        _tile(
            percent(busy),
            "of worker time spent on inference",
            "until the last trial ended",
            "good" if busy >= 0.9 else "warn" if busy < 0.5 else "",
        )
    )
    return tag("section", *boxes, class_="tiles", aria_label="Summary")


def _tile(figure: str, what: str, more: str, mood: str = "") -> str:
    return (
        f"<div class='tile {mood}'><div class=figure>{esc(figure)}</div>"
        f"<div class=what>{esc(what)}</div><div class=more>{esc(more)}</div></div>"
    )


def makespan(report: Report) -> str:
    """The makespan between its lower bound and the naive plan, as bars on one scale."""
    rows = [
        ("Lower bound", report.lower_bound_s, "bound", "no plan on these workers can be shorter"),
        ("Promised", report.expected_s, "promise", "what the plan expected before the start"),
        (
            "This evaluation",
            report.makespan_s,
            "ours",
            "from the start to the last score" + (", for what was still missing" if report.reused else ""),
        ),
        (
            "One trial per dataset",
            report.naive_s,
            "naive",
            "model loaded each time, metrics inside the GPU job",
        ),
    ]
    rows = [r for r in rows if r[1] > 0]
    if len(rows) < 2:
        return ""
    longest = max(r[1] for r in rows)
    bars = "".join(
        f"<div class=mrow><div class=mname>{esc(name)}</div>"
        f'<div class=mtrack><div class="mbar {kind}" style="--share:{s / longest:.4f}"></div>'
        f"<span class=mvalue>{esc(duration(s))}</span></div><div class=mwhy>{esc(why)}</div></div>"
        for name, s, kind, why in rows
    )
    return f"<section id=makespan><h2>Makespan</h2><div class=mbars>{bars}</div></section>"


def explanation() -> str:
    """How the figures come about."""
    return """<section class=notes><h2>How to read this page</h2><dl>
<dt>Scores</dt><dd>are the harness's own, with its own standard errors. A sample without a verdict (the judge failed, the
scorer crashed, the model gave no answer) is not counted as wrong: it is left out, and listed under its task.</dd>
<dt>Lower bound</dt><dd>With the measured times, no plan on these workers can be shorter: the work shared out evenly,
or the longest piece that cannot be cut, whichever is longer, after one load of the model per worker.</dd>
<dt>One trial per dataset</dt><dd>The usual way, computed from the same measured times: each dataset is a job of its own
that loads the model, runs the inference, and holds its GPU until its metrics are there.</dd>
<dt>Busy</dt><dd>Share of the workers' time, from the start to the end of the last trial, inside inference calls.</dd>
</dl></section>"""
