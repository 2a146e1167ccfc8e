"""A verdict for readers: lines for the terminal, a page for the browser, a bundle for a colleague or vendor."""

from __future__ import annotations

import datetime
import io
import json
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

from ..page.charts.spark import row_of
from ..page.elements import Markup
from ..page.shell import render
from ..progress.records.verdict import MACHINE_ONLY, Outcome, Verdict
from ..units import plural
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
    "rollback_skip": "go back to a checkpoint before the spike and skip the batches after it (`unbroken run` does where it sees the loss and a checkpoint tells its data position; else by hand)",
    "stop": "do not restart: the same failure would come again",
    "none": "nothing",
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
    if v.mitigation and v.mitigation != "Nothing to do.":
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
    read = f"{len(d.scans)} log{'s' if len(d.scans) != 1 else ''}, {sum(s.log_end.lines for s in d.scans):,} lines"
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
    """The report as one self-contained HTML page, without any script. Raises MissingExtra without Jinja2."""
    v = d.verdict
    root = [(v.root.line or 0, v.root.text)] if v.root else []
    faulty = v.faulty
    facts = [
        ("Outcome", v.outcome.value), ("Reason", v.reason or "none"), ("Category", v.category.value if v.category else "none"),
        ("Node", faulty.node if faulty else None), ("Rank", faulty.rank if faulty else None),
        ("GPU", faulty.gpu if faulty else None), ("Restart can help", "yes" if v.recoverable else "no"),
        ("Action", _ACTIONS[v.action.value]), ("Cordon", ", ".join(v.cordon) or None),
        ("Confidence", f"{v.confidence:.0%}"), ("Decided by", v.decided_by),
    ]  # fmt: skip
    return render(
        "diagnose/diagnosis.html",
        v=v,
        headline=headline(v),
        mood="good" if v.outcome is Outcome.COMPLETED else "warn" if not v.reason else "bad",
        facts=facts,
        code=(excerpt.of_root(v.root, d.sources.logs, 6, 8) if v.root else []) or root,
        chart=_chart(d),
        story=_events_to_show(d),
        similar=similar,
        notes=(*v.notes, *d.notes[:20]),
        read=f"{plural(len(d.scans), 'log')}, {plural(sum(s.log_end.lines for s in d.scans), 'line')}",
        version=__version__,
        made=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        clock=_clock,
    )


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


def _events_to_show(d: Diagnosis) -> list:
    """The events that a reader needs, in order: each kind once per rank, root first seen, then what followed."""
    seen: set[tuple[str, int | None]] = set()
    out = []
    everything = sorted(
        (*d.timeline.candidates, *d.timeline.cascades, *d.timeline.endings, *d.timeline.context),
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


def _chart(d: Diagnosis) -> Markup:
    """The loss near the end as a line, where the logs show one."""
    points = [p.loss for p in d.timeline.progress if p.loss is not None and abs(p.loss) < 1e6][-600:]
    return row_of(points, "loss near the end") if len(points) >= 8 else Markup()
