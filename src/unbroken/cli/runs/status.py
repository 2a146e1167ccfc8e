"""`unbroken status`: where a run stands, on one screen."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ...status.run_status import NodeStatus, RunStatus

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_INCIDENTS = 5
_NODES = 12
_AMENDMENTS = 3
_OLD_S = 5.0


@app.command()
def status(
    run_dir: Annotated[Path, typer.Argument(metavar="DIR", help="The run directory.")],
    json_out: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show where a run stands: running or not, step, loss, checkpoints, incidents, nodes, and what to do next.

    Only reads, and works at any moment; a supervisor that is alive here is asked what the run waits for. Exit codes: 0 told, 3 the folder is no run directory.
    """
    from ...progress import RunDir
    from ...recover.ask import ask_waits
    from ...status import read_status

    told = read_status(RunDir(run_dir), ask=ask_waits)
    print(json.dumps(told.as_json()) if json_out else screen(told))


def screen(s: RunStatus) -> str:
    """The screen as text, at most about 30 lines."""
    from ...status.data import seconds_text
    from ...status.page import STATUS_TEXT, clock, node_list, when_text
    from ...units import plural

    lines: list[tuple[str, str]] = [("run", s.run_dir + (f"  ({s.run_id})" if s.run_id else ""))]
    state = STATUS_TEXT.get(s.status, "its supervisor is on another host")
    lines.append(("status", state + (f": {s.why}" if s.why and s.status != "abandoned" else "")))
    if s.supervisor is not None:
        v = s.supervisor
        alive = {True: "alive", False: "gone", None: "cannot be seen from here"}[v.alive]
        if v.stopped:
            alive = "stopped by a signal: nobody supervises"
        lines.append(
            ("supervisor", f"process {v.pid} on {v.host}, {alive} (the {_ordinal(v.term)} of this run)")
        )
    if s.attempt:
        of = f", after {s.attempts - 1} restart{'s' * (s.attempts != 2)}" if s.attempts > 1 else ""
        lines.append(("attempt", f"{s.attempt}{of}"))
    lines.append(("started", f"{clock(s.started)} UTC, wall time {seconds_text(s.wall_s)}"))
    if s.step >= 0:
        newer = s.step > s.told_step
        age = None if s.last_step_at is None else max(0.0, s.now - s.last_step_at)
        old = _find_old(s, age, newer)
        parts = [f"{s.step:,}"]
        # Snapshots are often a moment ahead of what is written down: that is worth a word only where it stays so.
        if newer and (old or age is None):
            parts[0] += " at least, as it is saved"
        if newer and age is not None and old:
            parts[0] += f"; the last that is written down: {s.told_step:,}"
        if s.loss is not None:
            parts.append(f"loss {s.loss:.5g}" + (f" at {s.told_step:,}" if newer and not old else ""))
        if s.step_s is not None:
            parts.append(
                f"{seconds_text(s.step_s) if s.step_s >= 1 else f'{1000 * s.step_s:.3g} ms'} per step"
            )
        if age is not None:
            parts.append(f"{seconds_text(age)} ago" + (f" ({old})" if old else ""))
        lines.append(("last step", ", ".join(parts)))
    else:
        lines.append(("last step", "none yet"))
    if s.started_from:
        lines.append(("from", s.started_from))
    for amended in s.amendments[-_AMENDMENTS:]:
        lines.append(("amended", amended))
    if size := s.size.describe():
        lines.append(("size", size))
    if s.trouble:
        lines.append(("disk", f"{s.trouble}: what is to be written there waits"))
    saved = []
    if s.memory_step is not None:
        saved.append(f"step {s.memory_step:,} in memory")
    if s.disk_step is not None:
        saved.append(f"step {s.disk_step:,} on disk ({s.disk_name})")
    lines.append(("saved", ", ".join(saved) or _describe_unsaved(s)))
    text = [f"{k:<11} {v}" for k, v in lines]
    text.append(f"{'incidents':<11} {len(s.incidents) or 'none'}")
    if len(s.incidents) > _INCIDENTS:
        text[-1] += f", the last {_INCIDENTS}:"
    for i in s.incidents[-_INCIDENTS:]:
        where = ", ".join(([f"rank {i.rank}"] if i.rank is not None else []) + ([i.node] if i.node else []))
        if i.resumed_s is not None:
            over = f"resumed after {seconds_text(i.resumed_s)}, {plural(i.steps_lost or 0, 'step')} lost"
        else:
            over = "it stopped the run" if i.action == "stop" else "not resumed"
        place = f" ({where})" if where else ""
        text.append(f"{'':<11} {i.number}: {i.reason}{place} {when_text(i)}; {i.action}; {over}")
    text += _node_lines(s.nodes, node_list)
    for problem in s.problems[:5]:
        text.append(f"{'damaged':<11} {problem}")
    if s.hint:
        text += ["", *textwrap.wrap(s.hint, 110, break_long_words=False, break_on_hyphens=False)]
    elif s.status in ("running", "completed"):
        text += ["", f"`unbroken report {s.run_dir}` writes the whole record."]
    return "\n".join(text)


def _describe_unsaved(s: RunStatus) -> str:
    """Of a run without any checkpoint of ours."""
    if s.own_checkpoint:
        ended = s.status in ("interrupted", "stopped", "completed")
        when = "" if ended else f", as attempt {s.attempt} started"
        return f"nothing by unbroken; by the script itself{when}: {s.own_checkpoint}"
    if s.own_pattern:
        return f"nothing by unbroken; what the script saves itself is looked for in {s.own_pattern}"
    return "nothing yet" if s.status in ("new", "running", "unknown") else "nothing by unbroken"


def _find_old(s: RunStatus, age: float | None, newer: bool) -> str:
    """Why the last step that is written down may not be the last one, in words; "" where it is, or none is written."""
    if age is None:
        return ""
    if s.status == "abandoned":
        left = any((n.processes or {}).get("rank") for n in s.nodes)
        return "old: its supervisor is gone" if left or newer else ""
    if s.supervisor is not None and s.supervisor.stopped:
        return "old: its supervisor is stopped"
    if s.trouble and (newer or age > _OLD_S):
        return "old: newer ones cannot be written"
    return "old: nothing newer is written down" if newer and age > _OLD_S else ""


def _node_lines(nodes: tuple[NodeStatus, ...], names: object) -> list[str]:
    if not nodes:
        return []
    if len(nodes) > _NODES:
        groups: dict[str, list[str]] = {}
        for n in nodes:
            groups.setdefault(n.doing.split(",")[0].split(":")[0], []).append(n.name)
        rows = [f"{len(found)} {what}: {names(found)}" for what, found in groups.items()]  # type: ignore[operator]
    else:
        width = max(len(n.name) for n in nodes)
        rows = [f"{n.name:<{width}}  {n.doing}{_here(n)}" for n in nodes]
    return [f"{'nodes' if i == 0 else '':<11} {row}" for i, row in enumerate(rows)]


def _here(n: NodeStatus) -> str:
    if n.processes is None:
        return ""
    if not n.processes:
        return (
            ""
            if not n.doing.startswith(("training", "starting"))
            else "  (no process of the run is left on it)"
        )
    parts = [f"{c} {r}{'s' * (c != 1)}" for r, c in sorted(n.processes.items())]
    return f"  [{', '.join(parts)}]"


def _ordinal(n: int) -> str:
    suffix = "th" if 10 <= n % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"
