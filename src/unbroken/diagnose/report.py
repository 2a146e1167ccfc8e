"""A verdict for readers: lines for the terminal, a page for the browser, a bundle for a colleague or vendor."""

from __future__ import annotations

import datetime
import io
import json
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

from ..page.terminal import escape
from ..progress.records.verdict import MACHINE_ONLY, Outcome, Verdict
from ..version import __version__
from .assist.incident_store_shape import Similar
from .engine import Diagnosis
from .read import excerpt
from .redact.redact import Redactor

_SAID = {
    Outcome.FAILED: "failed",
    Outcome.HUNG: "hung: it stopped making progress without an error",
    Outcome.LOSS_SPIKE: "went wrong: its loss rose or is no longer a number",
    Outcome.COMPLETED: "completed",
    Outcome.CANCELLED: "was cancelled",
    Outcome.TIME_LIMIT: "ended at its time limit",
    Outcome.PREEMPTED: "was preempted",
    Outcome.RUNNING: "is still running",
    Outcome.UNKNOWN: "ended, and nothing says how",
}
_ACTIONS = {
    "restart": "restart from the last checkpoint",
    "restart_elsewhere": "restart from the last checkpoint, without the faulty node",
    "rollback_skip": "go back to a checkpoint before the spike and skip the batches after it (by hand: `unbroken run` restarts from the newest)",
    "stop": "do not restart: the same failure would come again",
    "none": "nothing to do",
}
Style = Callable[[str, str], str]


def plain(text: str, style: str) -> str:
    """Text without any style."""
    return text


def text(
    d: Diagnosis, similar: tuple[Similar, ...] = (), incident: str | None = None, style: Style = plain
) -> str:
    """The report for the terminal. `style(text, name)` may colour: names are bad, good, dim, bold."""
    v = d.verdict
    lines = [style(headline(v), "bad" if v.reason else "good"), ""]
    if v.root:
        where = f"{v.root.file}:{v.root.line}" if v.root.line else v.root.file or ""
        lines.append(f"{style('First' if v.reason else 'Seen ', 'bold')}   {where}{_place(v)}{_when(v)}")
        shown = excerpt.of_root(v.root, d.sources.logs) or [(v.root.line or 0, v.root.text)]
        for number, body in shown:
            mark = ">" if number == v.root.line else " "
            row = f"  {mark} {number:>7}  {body[:240]}"
            lines.append(style(row, "bad" if mark == ">" and v.reason else "dim"))
        lines.append("")
    if v.faulty:
        parts = [
            f"{k} {x}"
            for k, x in (("node", v.faulty.node), ("rank", v.faulty.rank), ("GPU", v.faulty.gpu))
            if x is not None
        ]
        lines.append(f"{style('Where', 'bold')}   {', '.join(parts)}")
    if v.cascade:
        lines.append(f"{style('Caused', 'bold')}  " + ", ".join(f"{c.reason} x{c.count}" for c in v.cascade))
    for e in v.evidence[:4]:
        lines.append(style(f"        also {e.file}:{e.line}  {e.text.strip()[:160]}", "dim"))
    lines.append(
        f"{style('Do', 'bold')}      {_ACTIONS[v.action.value]}"
        + (f"; cordon {', '.join(v.cordon)}" if v.cordon else "")
    )
    if v.mitigation:
        lines.append(f"        {v.mitigation}")
    lines.append(
        f"{style('Sure', 'bold')}    {v.confidence:.0%}, decided by {v.decided_by}"
        + (f" ({'; '.join(v.notes)})" if v.notes else "")
    )
    if similar:
        lines += ["", style("Seen before", "bold")]
        lines += [
            f"        {s.id}  {s.reason or s.outcome} ({s.score:.0%} alike): {s.text.strip()[:110]}"
            for s in similar
        ]
    read = f"{len(d.scans)} log{'s' if len(d.scans) != 1 else ''}, {sum(s.ending.lines for s in d.scans):,} lines"
    lines += ["", style(f"Read {read}.{f' Incident {incident}.' if incident else ''}", "dim")]
    lines += [style(f"Note: {n}", "dim") for n in d.notes[:8]]
    if len(d.notes) > 8:
        lines.append(style(f"Note: and {len(d.notes) - 8} more", "dim"))
    return "\n".join(lines)


def headline(v: Verdict) -> str:
    """One sentence that says it all."""
    if v.decided_by == "no-fault":
        return "No failure is reported here: it is a log of the machine, not of a job."
    if v.decided_by.startswith("interrupted"):
        return f"The job was {'suspended at its terminal' if v.recoverable else 'interrupted by its user'}."
    if v.reason in (None, "Hang", "LossSpike"):
        return f"The job {_SAID[v.outcome]}."
    whose = f" ({v.category.value})" if v.category else ""
    known = "the cause is not known" if v.reason == "Unknown" else f"{v.reason}{whose}"
    can = "a restart can help" if v.recoverable else "a restart cannot help"
    if MACHINE_ONLY in v.notes:
        return f"The machine reports a failure: {known}; no job's log was read."
    return f"The job {_SAID[v.outcome]}: {known}; {can}."


def page(d: Diagnosis, similar: tuple[Similar, ...] = ()) -> str:
    """The report as one self-contained HTML page."""
    v, e = d.verdict, escape
    kind = (
        "good"
        if v.outcome is Outcome.COMPLETED
        else "wait"
        if not v.reason
        else "stop"
        if not v.recoverable
        else "bad"
    )
    context = excerpt.of_root(v.root, d.sources.logs, 6, 8) if v.root else []
    code = "".join(
        f'<div class="row{" hit" if v.root and n == v.root.line else ""}"><span>{n}</span><code>{e(t[:600])}</code></div>'
        for n, t in context or ([(v.root.line or 0, v.root.text)] if v.root else [])
    )
    facts = [
        ("Outcome", v.outcome.value), ("Reason", v.reason or "none"), ("Category", v.category.value if v.category else "none"),
        ("Node", v.faulty.node if v.faulty else None), ("Rank", v.faulty.rank if v.faulty else None),
        ("GPU", v.faulty.gpu if v.faulty else None), ("Restart can help", "yes" if v.recoverable else "no"),
        ("Action", _ACTIONS[v.action.value]), ("Cordon", ", ".join(v.cordon) or None),
        ("Confidence", f"{v.confidence:.0%}"), ("Decided by", v.decided_by),
    ]  # fmt: skip
    table = "".join(f"<tr><th>{e(k)}</th><td>{e(str(x))}</td></tr>" for k, x in facts if x is not None)
    rows = "".join(
        f'<tr class="{e(ev.role)}"><td>{_clock(ev.time)}</td><td>{e(str(ev.rank if ev.rank is not None else ""))}</td><td>{e(ev.node or "")}</td>'
        f"<td>{e(ev.reason or ev.rule.outcome or '')}</td><td>{e(ev.id)}</td><td><code>{e(ev.text.strip()[:220])}</code></td></tr>"
        for ev in _story(d)
    )
    cascade = ", ".join(f"{e(c.reason)} &times;{c.count}" for c in v.cascade) or "nothing else"
    before = "".join(
        f"<li><b>{e(s.id)}</b> {e(s.reason or s.outcome)} ({s.score:.0%} alike) <code>{e(s.text[:160])}</code></li>"
        for s in similar
    )
    notes = "".join(f"<li>{e(n)}</li>" for n in (*v.notes, *d.notes[:20]))
    return _PAGE.format(
        title=e(headline(v)), first="What came first" if v.reason else "What shows it", kind=kind, table=table, code=code or "<p class=dim>no line</p>", cascade=cascade, mitigation=e(v.mitigation or "Nothing to do."),
        rows=rows or '<tr><td colspan="6" class="dim">no event</td></tr>', before=f"<h2>Seen before</h2><ul>{before}</ul>" if before else "",
        notes=f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "", chart=_chart(d), version=__version__,
        logs=f"{len(d.scans):,} logs, {sum(s.ending.lines for s in d.scans):,} lines",
        made=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )  # fmt: skip


def bundle(d: Diagnosis, out: Path) -> list[str]:
    """Writes a .tar.gz with the verdict, the report and the evidence, all redacted; returns its member names."""
    redact, members = Redactor(), []
    from ..atomic import write_bytes
    from .compress import evidence_lines

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:

        def add(name: str, body: str) -> None:
            data = body.encode("utf-8", "replace")
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), int(time.time())
            tar.addfile(info, io.BytesIO(data))
            members.append(name)

        add(
            "README.txt",
            "Made by `unbroken diagnose --bundle`. Secrets, user names and addresses were replaced by stand-ins.\n",
        )
        add("verdict.json", json.dumps(redact.values(d.verdict.as_json()), indent=1))
        add("report.txt", redact(text(d)) + "\n")
        add("topology.json", json.dumps(redact.values({
            "nodes": d.topology.nodes, "world_size": d.topology.size, "gpus_per_node": d.topology.gpus_per_node,
            "ranks": {r: [p.node, p.gpu] for r, p in sorted(d.topology.places.items())},
        }), indent=1))  # fmt: skip
        for source in d.sources.logs[:2000]:
            rows = list(evidence_lines(d, source))
            if rows:
                safe = source.name.replace("..", "_").lstrip("/")
                texts = redact.lines([t for _, t in rows])  # before the name: a user of the log may be in it
                body = "".join(f"{n}: {t}\n" for (n, _), t in zip(rows, texts, strict=True))
                add(f"evidence/{redact(safe).replace('<', '').replace('>', '')}.txt", body)
    write_bytes(out, buffer.getvalue())
    return members


def _story(d: Diagnosis) -> list:
    """The events that a reader needs, in order: each kind once per rank, root first seen, then what followed."""
    seen: set[tuple[str, int | None]] = set()
    out = []
    everything = sorted(
        (*d.chronicle.candidates, *d.chronicle.cascades, *d.chronicle.endings, *d.chronicle.context),
        key=lambda x: (x.time or 0.0, x.file, x.line),
    )
    for ev in everything:
        key = (ev.id, ev.rank)
        if key not in seen:
            seen.add(key)
            out.append(ev)
    return out[:60]


def _place(v: Verdict) -> str:
    if v.root is None or v.root.rank is None:
        return f", {v.root.node}" if v.root and v.root.node else ""
    return f", rank {v.root.rank}" + (f" on {v.root.node}" if v.root.node else "")


def _when(v: Verdict) -> str:
    return f", {_clock(v.root.time)}" if v.root and v.root.time else ""


def _clock(when: float | None) -> str:
    return datetime.datetime.fromtimestamp(when, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S") if when else ""


def _chart(d: Diagnosis) -> str:
    """The loss near the end as a small SVG line, where the logs show one."""
    points = [p.loss for p in d.chronicle.progress if p.loss is not None and abs(p.loss) < 1e6][-600:]
    if len(points) < 8:
        return ""
    low, high = min(points), max(points)
    span = (high - low) or 1.0
    path = " ".join(
        f"{i * 640 / (len(points) - 1):.1f},{110 - (x - low) / span * 100:.1f}" for i, x in enumerate(points)
    )
    return (
        f'<h2>Loss near the end</h2><svg viewBox="-4 0 700 122" role="img" aria-label="loss near the end"><polyline points="{path}" fill="none" '
        f'stroke="currentColor" stroke-width="1.6"/><text x="646" y="14">{high:.3g}</text><text x="646" y="114">{low:.3g}</text></svg>'
    )


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #1c2430; --paper: #fbfbf9; --dim: #6b7480; --line: #d9dde2; --bad: #b3402a; --stop: #8a2020; --good: #2b7a4b; --wait: #8a6d1d; --hit: #fde9e3; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e4e8ee; --paper: #14181e; --dim: #8d97a5; --line: #2b323c; --hit: #43231b; --bad: #f08a6f; --stop: #ff8b8b; --good: #6cc493; --wait: #dcbc5c; }} }}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 68rem; margin: 2rem auto; padding: 0 1.2rem; }}
h1 {{ font-size: 1.5rem; line-height: 1.3; border-left: .4rem solid var(--{kind}); padding-left: .8rem; }}
h2 {{ font-size: 1.05rem; margin-top: 2rem; }}
code, .row {{ font: 12.5px/1.5 ui-monospace, Menlo, Consolas, monospace; }}
table {{ border-collapse: collapse; width: 100%; }} th, td {{ text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); }}
table.facts {{ width: auto; }} table.facts th {{ color: var(--dim); font-weight: 500; }}
.scroll {{ overflow-x: auto; border: 1px solid var(--line); border-radius: .4rem; padding: .4rem 0; }}
.row {{ display: flex; white-space: pre; }} .row span {{ color: var(--dim); min-width: 5.5rem; text-align: right; padding-right: 1rem; user-select: none; }}
.hit {{ background: var(--hit); font-weight: 600; }}
.do {{ border: 1px solid var(--line); border-radius: .4rem; padding: .7rem 1rem; }}
.dim, footer {{ color: var(--dim); }} footer {{ margin-top: 3rem; font-size: .85rem; }}
.story td, .story th {{ white-space: nowrap; padding-left: .8rem; }} .story td:last-child {{ white-space: normal; overflow-wrap: anywhere; min-width: 22rem; }}
tr.cascade td {{ color: var(--dim); }} svg {{ width: 100%; max-height: 9rem; color: var(--{kind}); }} svg text {{ fill: var(--dim); font-size: 11px; }}
</style>
<h1>{title}</h1>
<table class="facts">{table}</table>
<h2>{first}</h2>
<div class="scroll">{code}</div>
<p>It caused: {cascade}.</p>
<h2>What to do</h2>
<p class="do">{mitigation}</p>
{chart}
<h2>In order</h2>
<div class="scroll"><table class="story"><tr><th>Time (UTC)</th><th>Rank</th><th>Node</th><th>Reason</th><th>Rule</th><th>Line</th></tr>{rows}</table></div>
{before}{notes}
<footer>Read {logs}. Made by unbroken {version}, {made}.</footer>
</html>
"""
