"""The report as one self-contained HTML page: no network, no library, readable without scripts and on paper."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from importlib.resources import files
from urllib.parse import quote

from ..page.terminal import escape, script_json
from ..units import Bytes, Duration
from ..version import __version__
from .curve import thin
from .data import PHASES, AttemptStory, IncidentStory, Report, same_command, seconds_text
from .figures import Figure, curve_figure, timeline_figure

_MAX_INCIDENTS = 200
_MAX_ATTEMPTS = 150
_MAX_CHECKPOINTS = 15
_CURVE_POINTS = 1600

STATUS_TEXT = {
    "new": "not started", "running": "running", "completed": "completed", "stopped": "stopped",
    "interrupted": "stopped on request", "abandoned": "supervisor is gone",
}  # fmt: skip
KIND_TEXT = {
    "failed": "a rank ended with an error", "hung": "the steps stopped coming", "node_lost": "a node was lost",
    "agent_lost": "a node's agent died", "supervisor_lost": "the supervisor died and the ranks ended with it",
    "lease": "a node lost its supervisor",
}  # fmt: skip
ACTION_TEXT = {
    "restart": "restarted", "restart_elsewhere": "restarted elsewhere", "rollback_skip": "restarted, nothing skipped",
    "stop": "stopped the run", "none": "nothing to do",
}  # fmt: skip
PHASE_TEXT = {
    "detect": "detect", "stop": "stop", "diagnose": "diagnose", "schedule": "schedule", "start": "start",
    "restore_and_first_step": "restore and first step", "replay": "replay",
}  # fmt: skip


def page(report: Report, *, base: str = "") -> str:
    """The HTML text. `base` leads from the page's folder to the run directory ('' where it lies in it)."""
    steps = thin(report.executions.last, _CURVE_POINTS)
    curve, timeline = curve_figure(report, steps), timeline_figure(report)
    data = {"curve": curve.data, "timeline": timeline.data}
    here = files(__package__)
    css = here.joinpath("page.css").read_text(encoding="utf-8")
    script = here.joinpath("page.js").read_text(encoding="utf-8")
    link = _linker(base)
    body = [
        _head(report), _notes(report), _cards(report), _where_time_went(report), _curve(report, curve),
        _timeline(report, timeline), _incidents(report, link), _attempts(report), _checkpoints(report, link),
        _places(report, link), _footer(report),
    ]  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.name)}: {escape(STATUS_TEXT.get(report.status, report.status))}</title>\n"
        f"<style>\n{css}</style>\n</head>\n<body>\n{''.join(b for b in body if b)}"
        f'<script type="application/json" id="data">{_json(data)}</script>\n<script>\n{script}</script>\n'
        "</body>\n</html>\n"
    )


def _json(value: object) -> str:
    # '<' never appears, so that no text of a run can close the script element.
    return script_json(value, allow_nan=False)


def _linker(base: str) -> Callable[[str, str], str]:
    def link(path: str, text: str) -> str:
        target = f"{base}/{path}" if base else path
        return f'<a class="mono" href="{escape(quote(target))}">{escape(text)}</a>'

    return link


def _head(report: Report) -> str:
    spec = report.spec
    size = ""
    if spec is not None:
        spares = f", {spec.spares} spare{'s' * (spec.spares != 1)}" if spec.spares else ""
        size = f"{spec.world_size} ranks on {spec.nodes} node{'s' * (spec.nodes != 1)}{spares} · run {spec.run_id} · "
    command = " ".join(spec.command) if spec else ""
    return (
        f'<header><div class="line"><h1>{escape(report.name)}</h1>'
        f'<span class="pill {escape(report.status)}">{escape(STATUS_TEXT.get(report.status, report.status))}</span>'
        f'</div><p class="soft">{escape(size)}started {clock(report.started)} UTC · '
        f"as of {clock(report.now)} UTC</p>"
        f'<p class="mono soft">{escape(command)}</p></header>\n'
    )


def _notes(report: Report) -> str:
    notes = []
    saved = any(c.counts for c in report.checkpoints)
    origin = "from the last checkpoint" if saved else "without a checkpoint, because none was saved"
    if report.status == "stopped":
        notes.append(
            f'<div class="note bad"><b>The run was stopped:</b> {escape(report.why)}<br>Fix the cause, then give the '
            f"same command again; it goes on {origin}:<br><code>{escape(same_command(report))}</code></div>"
        )
    elif report.status == "interrupted":
        notes.append(
            f'<div class="note">The run was stopped on request. The same command goes on {origin}:<br>'
            f"<code>{escape(same_command(report))}</code></div>"
        )
    elif report.status == "abandoned":
        notes.append(
            '<div class="note bad"><b>The supervisor of this run is gone.</b> The same command takes over or restarts '
            f"it:<br><code>{escape(same_command(report))}</code></div>"
        )
    if report.problems:
        lines = "".join(f"<li>{escape(p)}</li>" for p in report.problems[:20])
        notes.append(
            f'<div class="note bad">Parts of the run directory cannot be read:<ul>{lines}</ul></div>'
        )
    return "".join(notes)


def _cards(report: Report) -> str:
    loss, total = report.loss, report.total_steps
    step = "–" if report.step < 0 else f"{report.step:,}" + (f" / {total - 1:,}" if total else "")
    ettr = "–" if report.ettr is None else f"{report.ettr:.1%}"
    cards = [
        (ettr, "effective training time (ETTR)"),
        (step, "last step"),
        ("–" if loss is None else f"{loss:.5g}", "last loss"),
        (seconds_text(report.wall_s), "wall time" + (" without pauses" if report.paused_s else "")),
        (str(len(report.incidents)), "incident" + "s" * (len(report.incidents) != 1)),
        (str(len(report.attempts)), "attempt" + "s" * (len(report.attempts) != 1)),
    ]
    return (
        '<section class="cards">'
        + "".join(f'<div class="card"><b>{escape(v)}</b><span>{escape(t)}</span></div>' for v, t in cards)
        + "</section>\n"
    )


def time_split(report: Report) -> list[tuple[str, str, float]]:
    """(kind, text, seconds): where the wall time went, without pauses."""
    of = {k: sum(s.seconds for s in report.spans if s.kind == k) for k in ("starting", "unnoticed", "down")}
    parts = [
        ("training", "training that counts", report.executions.productive_s),
        ("replayed", "steps done again", report.executions.replayed_s),
        ("starting", "starting and restoring", max(0.0, of["starting"] - report.executions.first_s)),
        ("unnoticed", "not yet noticed", of["unnoticed"]),
        ("down", "down", of["down"]),
    ]
    rest = max(0.0, report.wall_s - sum(s for _, _, s in parts))
    return [*parts, ("finishing", "the rest: setting up, saving, ending", rest)]


def _where_time_went(report: Report) -> str:
    parts = time_split(report)
    whole = sum(s for _, _, s in parts)
    if not report.attempts or whole <= 0:
        return ""
    bars = "".join(
        f'<i class="b-{k}" style="width:{100 * s / whole:.3f}%" title="{escape(t)}: {seconds_text(s)}"></i>'
        for k, t, s in parts if s > 0
    )  # fmt: skip
    legend = "".join(
        f'<span><i class="b-{k}"></i>{escape(t)} <b>{seconds_text(s)}</b> ({s / whole:.1%})</span>'
        for k, t, s in parts if s > 0
    )  # fmt: skip
    return f'<div class="split">{bars}</div><div class="legend">{legend}</div>\n'


def _curve(report: Report, figure: Figure) -> str:
    if not figure.svg:
        why = "no step was completed yet" if report.step < 0 else "the script told no loss"
        return f'<h2>Loss</h2><p class="soft">There is no curve: {why}.</p>\n'
    marked = " Each numbered mark is an incident." if report.incidents else ""
    marked += f" {figure.note}" if figure.note else ""
    return (
        f'<h2>Loss</h2><p class="soft small">Of each step its last execution.{escape(marked)}</p>'
        f'<figure id="curve">{figure.svg}<div class="tip"></div></figure>\n'
    )


def _timeline(report: Report, figure: Figure) -> str:
    if not figure.svg:
        return ""
    names = {
        "training": "training", "starting": "starting and restoring", "replayed": "doing steps again",
        "unnoticed": "not yet noticed", "fault": "the rank or node at fault", "down": "down",
        "finishing": "setting up, ending", "spare": "spare",
    }  # fmt: skip
    kinds = figure.kinds | ({"finishing"} if "setup" in figure.kinds else set())
    legend = "".join(f'<span><i class="b-{k}"></i>{t}</span>' for k, t in names.items() if k in kinds)
    note = f'<p class="soft small">{escape(figure.note)}</p>' if figure.note else ""
    return (
        f'<h2>Timeline</h2>{note}<figure id="timeline">{figure.svg}<div class="tip"></div></figure>'
        f'<div class="legend">{legend}</div>\n'
    )


def _incidents(report: Report, link: Callable[[str, str], str]) -> str:
    all_ = report.incidents
    if not all_:
        return '<h2>Incidents</h2><p class="soft">None: the run was never interrupted.</p>\n'
    shown = all_[-_MAX_INCIDENTS:]
    longest = max((sum(i.phases.values()) for i in shown), default=0.0) or 1.0
    rows = "".join(_incident(i, report, link, longest) for i in shown)
    older = (
        f'<p class="soft small">The newest {len(shown)} of {len(all_)} incidents; '
        "<code>unbroken report --json</code> has all.</p>"
        if len(shown) < len(all_)
        else ""
    )
    legend = "".join(f'<span><i class="p-{k}"></i>{PHASE_TEXT[k]}</span>' for k in PHASES)
    return (
        f'<h2>Incidents</h2>{older}<div class="scroll"><table><thead><tr><th>#</th><th>What happened</th><th>Where</th>'
        '<th class="num">Detected<br>after</th><th>Verdict</th><th>Action</th><th class="num">Resumed<br>after</th>'
        '<th class="num">Steps<br>lost</th><th>Recovery</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
        f'<div class="legend">{legend}</div>'
        '<p class="soft small">Detected after: since the last sign of progress. Resumed after: from detection until the '
        "first step beyond the highest one before. Steps lost: those that had to be done again.</p>\n"
    )


def _incident(i: IncidentStory, report: Report, link: Callable[[str, str], str], longest: float) -> str:
    verdict = i.verdict
    root = verdict.get("root") or {}
    where = [f"rank {i.rank}"] if i.rank is not None else []
    where += [i.node] if i.node else []
    gpu = (verdict.get("faulty") or {}).get("gpu")
    where += [f"GPU {gpu}"] if gpu is not None else []
    confidence = verdict.get("confidence")
    sure = f"{confidence:.0%} sure" if isinstance(confidence, (int, float)) else ""
    text = str(root.get("text") or "").strip()
    quoted = f'<div class="quote mono">{escape(text[:400])}</div>' if text else ""
    bar = "".join(
        f'<i class="p-{k}" style="width:{100 * i.phases.get(k, 0.0) / longest:.2f}%" '
        f'title="{PHASE_TEXT[k]}: {seconds_text(i.phases.get(k))}"></i>'
        for k in PHASES
        if i.phases.get(k, 0.0) > 0
    )
    resumed = seconds_text(i.resumed_s) if i.resumed_s is not None else _not_resumed(i, report)
    return (
        f'<tr class="incident" id="incident-{i.number}"><td><span class="id">{i.number}</span></td>'
        f"<td><b>{escape(_capital(what_text(i)))}</b><div class='small soft'>"
        f"{since_text(report, i.at)} into the run, attempt {i.attempt}, {when_text(i)}</div>{quoted}</td>"
        f"<td>{escape(', '.join(where) or '–')}</td><td class='num'>{seconds_text(i.detected_s)}</td>"
        f"<td><b>{escape(_spaced(i.reason))}</b><div class='small soft'>{escape(sure)}</div></td>"
        f"<td>{escape(ACTION_TEXT.get(i.action, i.action or '–'))}</td>"
        f"<td class='num'>{resumed}</td>"
        f"<td class='num'>{'–' if i.steps_lost is None else f'{i.steps_lost:,}'}</td>"
        f"<td class='barcell'><div class='bar'>{bar}</div><span class='small soft'>"
        f"{seconds_text(sum(i.phases.values()))} in all</span></td></tr>"
        '<tr class="more"><td></td><td colspan="8"><details><summary>details</summary>'
        f"{_details(i, report, link)}</details></td></tr>"
    )


def what_text(i: IncidentStory) -> str:
    """What happened, in words."""
    if not i.ended_attempt:
        return "the supervisor died; the ranks went on and its successor took over"
    return KIND_TEXT.get(i.kind, i.kind)


def when_text(i: IncidentStory) -> str:
    """After which step it happened."""
    return f"after step {i.step:,}" if i.step >= 0 else "before the first step"


def _not_resumed(i: IncidentStory, report: Report) -> str:
    if i.action == "stop":
        return "–"
    later = next((o for o in report.incidents if o.number > i.number), None)
    return (
        f"cut off<br>by {later.number}"
        if later is not None
        else "not yet"
        if report.status == "running"
        else "–"
    )


def _details(i: IncidentStory, report: Report, link: Callable[[str, str], str]) -> str:
    v = i.verdict
    root = v.get("root") or {}
    items: list[tuple[str, str]] = []
    if root.get("file"):
        line = f", line {escape(str(root['line']))}" if root.get("line") else ""
        file = str(root["file"])
        inside = file.removeprefix(f"{report.run_dir.path}/")
        known = not inside.startswith("/") and (report.run_dir.path / inside).is_file()
        items.append(("first failure", (link(inside, inside) if known else escape(file)) + line))
    if v.get("category"):
        items.append(("category", escape(str(v["category"]))))
    if v.get("decided_by"):
        items.append(("decided by", escape(str(v["decided_by"]))))
    if v.get("mitigation"):
        items.append(("advice", escape(str(v["mitigation"]))))
    if i.why:
        items.append(("why this action", escape(i.why)))
    cascade = v.get("cascade") or []
    if cascade:
        text = ", ".join(f"{c.get('count')} × {c.get('reason')}" for c in cascade[:8])
        items.append(("what it caused", escape(text)))
    for note in (v.get("notes") or [])[:6]:
        items.append(("note", escape(str(note))))
    if i.next_attempt:
        items.append(("next attempt", str(i.next_attempt)))
    phases = ", ".join(f"{PHASE_TEXT[k]} {seconds_text(i.phases[k])}" for k in PHASES if k in i.phases)
    items.append(("phases", escape(phases or "–")))
    files_ = [link(f"incidents/{i.number:04d}.json", f"incidents/{i.number:04d}.json")]
    if i.evidence:
        files_.append(link(f"incidents/{i.number:04d}/", "stacks"))
    files_.append(link(f"attempts/{i.attempt:04d}/", f"logs of attempt {i.attempt}"))
    items.append(("files", ", ".join(files_)))
    return "<dl>" + "".join(f"<dt>{k}</dt><dd>{v}</dd>" for k, v in items) + "</dl>"


def _attempts(report: Report) -> str:
    shown = report.attempts[-_MAX_ATTEMPTS:]
    if not shown:
        return ""
    older = (
        f'<p class="soft small">The newest {len(shown)} of {len(report.attempts)} attempts; '
        "<code>unbroken report --json</code> has all.</p>"
        if len(shown) < len(report.attempts)
        else ""
    )
    rows = "".join(_attempt(a, report) for a in shown)
    return (
        f'<h2>Attempts</h2>{older}<div class="scroll"><table><thead><tr><th>#</th><th>Nodes</th><th>Launched</th>'
        '<th>Restored from</th><th class="num">First step<br>after</th><th class="num">Steps</th>'
        '<th class="num">Done<br>again later</th><th class="num">Lasted</th><th>Ended</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>\n"
    )


def _attempt(a: AttemptStory, report: Report) -> str:
    steps = "–" if a.first_step < 0 else f"{a.first_step:,}–{a.last_step:,}"
    first = None if a.first_step_at is None else a.first_step_at - a.launched
    origin = a.origin if a.first_step < 0 or a.origin != "the beginning" else (
        "the beginning" if a.first_step <= 1 else "what the script saved itself"
    )  # fmt: skip
    lasted = (a.ended if a.ended is not None else report.ended) - a.launched
    return (
        f"<tr><td>{a.number}</td><td>{escape(node_list(a.slots))}</td>"
        f"<td class='nowrap'>at {since_text(report, a.launched)}</td><td>{escape(origin)}</td>"
        f"<td class='num'>{seconds_text(first)}</td><td class='num'>{steps}</td>"
        f"<td class='num'>{a.lost:,}</td><td class='num'>{seconds_text(lasted)}</td>"
        f"<td>{escape(_HOW.get(a.how, a.how))}</td></tr>"
    )


_HOW = {
    "completed": "completed", "interrupted": "stopped on request", "failed": "a rank failed", "hung": "hang",
    "node_lost": "node lost", "agent_lost": "agent lost", "supervisor_lost": "supervisor lost",
    "lease": "a lease lapsed", "cut off": "cut off", "running": "still running",
}  # fmt: skip


def _checkpoints(report: Report, link: Callable[[str, str], str]) -> str:
    found = report.checkpoints
    if not found:
        return '<h2>Checkpoints</h2><p class="soft">There are none on disk.</p>\n'
    counted = [c for c in found if c.counts]
    bad = len(found) - len(counted)
    summary = (
        f"{len(counted)} on disk that count, {Bytes(sum(c.bytes for c in counted))}"
        + (f"; {bad} unfinished, damaged or not accepted" if bad else "")
        + "."
    )
    rows = "".join(
        f"<tr><td>{link(f'checkpoints/{c.name}/', c.name)}</td><td class='num'>{c.step:,}</td>"
        f"<td class='num'>{c.attempt}</td><td class='num'>{Bytes(c.bytes)}</td>"
        f"<td class='nowrap'>at {since_text(report, c.time)}</td>"
        f"<td>{'counts' if c.counts else escape(_checkpoint_state(c.status, c.why))}</td></tr>"
        for c in found[:_MAX_CHECKPOINTS]
    )
    more = f" The newest {_MAX_CHECKPOINTS} of {len(found)}:" if len(found) > _MAX_CHECKPOINTS else ""
    return (
        f'<h2>Checkpoints</h2><p class="soft small">{escape(summary + more)}</p><div class="scroll"><table><thead><tr>'
        '<th>Folder</th><th class="num">Step</th><th class="num">Attempt</th><th class="num">Size</th><th>Written</th>'
        f"<th>State</th></tr></thead><tbody>{rows}</tbody></table></div>\n"
    )


def _checkpoint_state(status: str, why: str) -> str:
    text = "not accepted: written after its attempt was sealed" if status == "committed" else status
    return f"{text}: {why}" if why else text


def _places(report: Report, link: Callable[[str, str], str]) -> str:
    last = report.attempts[-1] if report.attempts else None
    logs: list[str] = []
    if last is not None and report.spec is not None:
        nproc = report.spec.nproc
        for slot, node in enumerate(last.slots):
            for rank in range(slot * nproc, (slot + 1) * nproc):
                path = report.run_dir.rank_log(last.number, node, rank)
                if len(logs) < 16 and path.exists():
                    logs.append(link(str(path.relative_to(report.run_dir.path)), f"rank {rank}"))
    rows: list[tuple[str, str]] = [
        ("run directory", f'<span class="mono">{escape(str(report.run_dir.path))}</span>')
    ]
    if logs and last is not None:
        rows.append((f"logs of attempt {last.number}", " · ".join(logs)))
    rows += [
        (
            "all logs",
            f"{link('attempts/', 'attempts/')} (one folder per attempt, then node, one file per rank)",
        ),
        ("agents and keepers", link("agents/", "agents/")),
        ("incidents", f"{link('incidents/', 'incidents/')} (verdicts as JSON, stacks)"),
        ("journal", f"{link('journal/', 'journal/')} (everything that was decided, one record a line)"),
        ("what was asked", link("run.toml", "run.toml")),
    ]
    return "<h2>Where things lie</h2><dl>" + "".join(f"<dt>{k}</dt><dd>{v}</dd>" for k, v in rows) + "</dl>\n"


def _footer(report: Report) -> str:
    pauses = (
        " Pauses, while the run was stopped and nobody had given its command again, count in neither."
        * bool(report.paused_s)
    )
    return (
        "<footer><p>ETTR is the time in which the last execution of each step ran, over wall time from start to end."
        f"{pauses} An attempt's first step counts with the median step time.</p>"
        f"<p>Written by unbroken {escape(__version__)}. All times are UTC.</p></footer>\n"
    )


def clock(when: float) -> str:
    """A time of day with its date, UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(when)) if math.isfinite(when) else "–"


def since_text(report: Report, when: float) -> str:
    """How long after the start of the run, in its own time."""
    return seconds_text(report.own_time(when))


def node_list(names: Iterable[str]) -> str:
    """Node names, shortened where they are many."""
    unique = list(dict.fromkeys(names))
    return ", ".join(unique) if len(unique) <= 6 else f"{', '.join(unique[:3])} and {len(unique) - 3} more"


def _spaced(reason: str) -> str:
    """A reason that may be broken between its words (zero-width spaces)."""
    return "".join(
        f"\u200b{c}" if i and c.isupper() and reason[i - 1].islower() else c for i, c in enumerate(reason)
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def duration_axis(seconds: float) -> str:
    """A time on an axis."""
    return str(Duration(seconds)) if seconds else "0"
