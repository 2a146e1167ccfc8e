"""The tables: scores, tasks without one, workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan

from ...contracts import Conditions, Metric, Report, SampleNote, Score
from .markup import duration, esc, number, percent


def errors(report: Report) -> str:
    """Tasks that have no score, and why; nothing where all have one."""
    if not report.errors:
        return ""
    rows = "".join(
        f"<tr><td class=task>{esc(task)}</td><td>{esc(why)}</td></tr>"
        for task, why in sorted(report.errors.items())
    )
    n = len(report.errors)
    return (
        f"<section class=trouble><h2>{n} task{'s' * (n != 1)} without a score</h2>"
        f"<table><thead><tr><th>Task<th>Why</thead><tbody>{rows}</tbody></table></section>"
    )


def scores(report: Report) -> str:
    """Every task with its headline metric; the rest unfolds."""
    if not report.scores:
        return ""
    spent = dict.fromkeys((s.task for s in report.scores), 0.0)
    for trial in report.trials:
        if trial.task in spent:
            spent[trial.task] += trial.busy_s
    standard = _usual(report.scores)
    groups = "".join(_row(g, report, {}, standard, group=True) for g in report.groups)
    rows = "".join(_row(s, report, spent, standard) for s in report.scores)
    find = (
        "<input id=find type=search placeholder='Filter tasks' aria-label='Filter tasks'>"
        if len(report.scores) > 8
        else ""
    )
    conditions = (
        f"<p class=soft>{esc(_conditions(standard))}. Tasks that ran otherwise say so.</p>"
        if standard
        else ""
    )
    body = f"<tbody class=groups>{groups}</tbody>" if groups else ""
    return (
        f"<section id=all-scores><div class=bar><h2>Scores</h2><div>{find} <button id=csv type=button>Copy as CSV</button></div></div>"
        f"{conditions}<div class=scroll><table id=scores class=sortable><thead><tr><th data-sort=text>Task"
        "<th>Metric<th class=num data-sort=num>Score<th class=num data-sort=num>± standard error<th class=spark>"
        "<th class=num data-sort=num>Samples<th class=num data-sort=num>Inference<th class=num data-sort=num>Scoring"
        f"<th>Licence</tr></thead>{body}<tbody id=tasks>{rows}</tbody></table></div></section>"
    )


def _row(
    score: Score,
    report: Report,
    spent: Mapping[str, float],
    standard: Conditions | None,
    *,
    group: bool = False,
) -> str:
    head: Metric | None = score.metrics[0] if score.metrics else None
    error = head.stderr if head is not None and head.stderr is not None and not isnan(head.stderr) else None
    missing = score.samples - score.scored
    badge = (
        f"<span class=badge title='samples without a verdict'>{missing} without verdict</span>"
        if missing
        else ""
    )
    samples = f"{score.samples:,}" if not missing else f"{score.scored:,} / {score.samples:,}"
    gpu = spent.get(score.task)
    cells = [
        f"<td class=task><button class=unfold aria-expanded=false aria-label='Details'>▸</button>{esc(score.task)} {badge}",
        f"<td class=metric>{esc(head.name) if head else ''}{_arrow(head)}",
        f'<td class=num data-v="{head.value if head and not isnan(head.value) else ""}"><b>{esc(number(head.value)) if head else "none"}</b>',
        f'<td class=num data-v="{error if error is not None else ""}">'
        f"{esc(number(error)) if error is not None else '<span class=soft>–</span>'}",
        f"<td class=spark>{_spark(head)}",
        f'<td class=num data-v="{score.samples}">{samples}',
        f'<td class=num data-v="{gpu or 0}">{_inference(gpu, report)}',
        f'<td class=num data-v="{score.seconds}">{esc(duration(score.seconds)) if score.seconds else ""}',
        f"<td class=soft>{'(a group)' if group else esc(report.licences.get(score.task, ''))}",
    ]
    kind = "grouprow" if group else "taskrow"
    return (
        f'<tr class={kind} data-task="{esc(score.task)}">{"".join(cells)}</tr>'
        f"<tr class=detail hidden><td colspan=9>{_detail(score, standard)}</td></tr>"
    )


def _inference(seconds: float | None, report: Report) -> str:
    """Seconds inside inference; a task without any in an evaluation that went on was answered before."""
    if seconds:
        return esc(duration(seconds))
    if seconds is None or not report.reused:
        return ""
    return "<span class=soft title='all its answers were there before'>before</span>"


def _arrow(metric: Metric | None) -> str:
    if metric is None or metric.higher_is_better:
        return ""
    return " <span class=soft title='lower is better'>↓</span>"


def _spark(metric: Metric | None) -> str:
    """A score between 0 and 1 on a line, with two standard errors to each side."""
    if metric is None or not 0 <= metric.value <= 1:
        return ""
    x, out = 100 * metric.value, []
    if metric.stderr is not None and not isnan(metric.stderr):
        a, b = max(0.0, x - 200 * metric.stderr), min(100.0, x + 200 * metric.stderr)
        out.append(f'<rect x="{a:.1f}" y="4" width="{max(0.5, b - a):.1f}" height="6" class=ci />')
    out.append(f'<rect x="{min(98.5, max(0, x - 0.75)):.1f}" y="1" width="1.5" height="12" class=mark />')
    return (
        '<svg viewBox="0 0 100 14" width=100 height=14 preserveAspectRatio=none aria-hidden=true>'
        f"<rect x=0 y=6.5 width=100 height=1 class=line />{''.join(out)}</svg>"
    )


def _detail(score: Score, standard: Conditions | None) -> str:
    metrics = "".join(
        f"<tr><td>{esc(m.name)}{_arrow(m)}<td class=num title='{m.value!r}'>{esc(number(m.value))}"
        f"<td class=num>{esc('± ' + number(m.stderr)) if m.stderr is not None and not isnan(m.stderr) else ''}</tr>"
        for m in score.metrics
    )
    facts = [
        ("Coverage", percent(score.coverage)),
        ("Version", score.version),
        ("Prompts", score.prompt_hash),
    ]
    ran = [_conditions(c) for c in score.conditions if c != standard]
    if ran:
        facts.append(("Ran as", "; ".join(ran)))
    said = "".join(f"<dt>{esc(k)}<dd>{esc(v)}" for k, v in facts if v)
    return f"<div class=two><table class=inner>{metrics}</table><dl>{said}</dl></div>{_notes(score.notes)}"


def _notes(notes: Sequence[SampleNote]) -> str:
    if not notes:
        return ""
    shown = "".join(
        f"<tr><td class=num>{n.sample}<td>{esc(n.status)}<td>{esc(n.why)}</tr>" for n in notes[:50]
    )
    more = f"<p class=soft>and {len(notes) - 50:,} more, in the score's file</p>" if len(notes) > 50 else ""
    return (
        "<table class=inner><thead><tr><th class=num>Sample<th>No verdict<th>Why</thead>"
        f"<tbody>{shown}</tbody></table>{more}"
    )


def _usual(scores: Sequence[Score]) -> Conditions | None:
    """The conditions of most tasks."""
    counts: dict[Conditions, int] = {}
    for s in scores:
        for c in s.conditions:
            counts[c] = counts.get(c, 0) + 1
    return max(counts, key=lambda c: counts[c]) if counts else None


def _conditions(c: Conditions) -> str:
    padding = f", padding {c.padding}" if c.padding else ""
    return f"{c.engine} on {c.device}, {c.dtype}, batch size {c.batch_size}{padding}"


def workers(report: Report) -> str:
    """What each GPU worker spent its time on."""
    if not report.workers:
        return ""
    end = max([t.ended for t in report.trials], default=report.ended)
    rows = []
    for w in sorted(report.workers, key=lambda w: (w.node, w.gpus, w.name)):
        own = [t for t in report.trials if t.worker == w.name]
        busy = sum(t.busy_s for t in own)
        there = max(1e-9, min(w.ended or end, end) - w.started)
        lost = sum(1 for t in own if t.outcome in ("lost", "failed"))
        share = min(1.0, busy / there)
        rows.append(
            f"<tr><td class=task>{esc(w.name)}<td>{esc(w.node)}<td>{esc(', '.join(map(str, w.gpus)) or 'CPU')}"
            f'<td class=num data-v="{share}">{esc(percent(share))}<td class=meter>'
            f'<div class=track><div style="width:{100 * share:.1f}%"></div></div>'
            f'<td class=num data-v="{w.start_s}">{esc(duration(w.start_s)) if w.start_s else ""}'
            f'<td class=num data-v="{w.fetch_s}">{esc(duration(w.fetch_s)) if w.fetch_s else ""}'
            f'<td class=num data-v="{w.load_s}">{esc(duration(w.load_s)) if w.load_s else ""}'
            f'<td class=num data-v="{len(own)}">{len(own)}<td class=num data-v="{lost}">{lost or ""}'
            f"<td class=soft>{esc(w.why)}</tr>"
        )
    return (
        "<section id=workers><h2>Workers</h2><div class=scroll><table class=sortable><thead><tr><th data-sort=text>Worker"
        "<th data-sort=text>Node<th>GPUs<th class=num data-sort=num>Busy<th><th class=num data-sort=num>Start<th class=num data-sort=num>Fetch"
        "<th class=num data-sort=num>Load<th class=num data-sort=num>Trials<th class=num data-sort=num>Lost<th>Ended because"
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )
