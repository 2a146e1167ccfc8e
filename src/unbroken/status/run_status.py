"""Where a run stands, as one screen: also while it is being written, where it is damaged, or where its supervisor died."""

from __future__ import annotations

import json
import math
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..checkpoint.catalogue.candidates import candidates
from ..checkpoint.client.links import KeeperLink
from ..cluster.holding.processes import marked, read_stat
from ..cluster.local import find_root
from ..errors import UnbrokenError
from ..progress import RunDir, RunSpec, Term
from ..progress.disk import find_trouble
from ..progress.records.incident import Incident
from ..progress.records.steps import Step
from .data import Record, RunReport, RunSize, describe_goes_on, describe_incident, find_own, same_command
from .gather import gather

_TAIL = 64 * 2**10
_KEEPER_S = 1.0
_OTHERS = "with --amend other arguments too, without it they need another --run-dir"


@dataclass(frozen=True)
class SupervisorStatus:
    """The newest supervisor. `alive` is None where it cannot be known from this host; `stopped`: its process is there
    and does not run (SIGSTOP, Ctrl-Z), so nobody supervises."""

    pid: int
    host: str
    term: int
    since: float
    alive: bool | None
    stopped: bool = False


@dataclass(frozen=True)
class NodeStatus:
    """One node: what it does, in words, and how many of the run's processes of each role run on it (None where
    that cannot be known from this host)."""

    name: str
    doing: str
    processes: dict[str, int] | None


@dataclass(frozen=True)
class RunStatus:
    """A run at `now`. `memory_step` and `disk_step` are the newest steps from which it could go on (None for
    none), `hint` what to do next. `status`: as in `RunReport`, or unknown: its supervisor is on another host."""

    run_dir: str
    run_id: str | None
    now: float
    status: str
    why: str
    hint: str
    started: float
    wall_s: float
    supervisor: SupervisorStatus | None
    attempt: int
    attempts: int
    step: int
    """The newest that is known, be it by a snapshot of it alone."""
    told_step: int
    """The newest that is written down, of which loss and times are; -1 for none."""
    loss: float | None
    step_s: float | None
    last_step_at: float | None
    memory_step: int | None
    disk_step: int | None
    disk_name: str | None
    started_from: str
    """What the run was given with --from, with the step of that; "" where it was given nothing."""
    amendments: tuple[str, ...]
    """What was changed of the run in between (--amend), in words, oldest first."""
    size: RunSize
    """With how many nodes it goes on, and for how long it had fewer than it was asked for."""
    incidents: tuple[Incident, ...]
    nodes: tuple[NodeStatus, ...]
    problems: tuple[str, ...]
    waits: str = ""
    """What the run waits for, in words; "" for nothing."""
    own_checkpoint: str = ""
    """The newest checkpoint that the script wrote by itself, as it was last looked for (at a start, and at the end)."""
    own_pattern: str = ""
    """Where those are looked for (--resume-from); "" for where they usually lie."""
    trouble: str = ""
    """Why its directory cannot be written now, such as a full disk."""

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; a loss that is no number becomes null."""
        value = asdict(self)
        # Names in JSON are what scripts read; they do not follow renames.
        value["todo"] = value.pop("hint")
        value["incidents"] = [describe_incident(i, RunDir(Path(self.run_dir))) for i in self.incidents]
        if self.supervisor is not None:
            value["supervisor"]["epoch"] = value["supervisor"].pop("term")
        if self.loss is None or not math.isfinite(self.loss):
            value["loss"] = None
        return value


def read_status(
    run_dir: RunDir, *, now: float | None = None, ask: Callable[[RunDir], str] | None = None
) -> RunStatus:
    """Where a run stands. Reads only; never waits longer than a second for each keeper on this machine. `ask` asks a supervisor
    that is alive here what the run waits for, where no file may say it.

    Raises InputError where the folder is no run directory.
    """
    report = gather(run_dir, now=now, with_steps=False)
    term = report.terms[-1] if report.terms else None
    here = term is None or term.host == socket.gethostname()
    counts = _processes(report.spec) if here else None
    alive = None if term is None else (not term.supervisor_is_gone() if here else None)
    status = report.status
    if status == "running" and alive is None and term is not None:
        status = "unknown"
    last, step_s, of = _newest_step(run_dir, run_dir.attempt_numbers())
    memory, memory_of = _memory_step(report, counts) if counts else (None, 0)
    disk = next((c for c in report.checkpoints if c.counts), None)
    known = [
        int(r["step"]) for r in report.events if r["kind"] in ("ended", "incident", "status") and "step" in r
    ]
    told_step = last.step if last is not None else max(known, default=-1)
    # What is saved of an attempt before the one that stepped last may be what the run was taken back from.
    saved = [(memory, memory_of), (disk.step, disk.attempt) if disk else (None, 0)]
    saved_step = max((s for s, attempt in saved if s is not None and attempt >= of), default=-1)
    supervisor = _supervisor(term, alive)
    wait = _waits(report)
    waits = f"waits for a person: {wait['why']}" if wait else ""
    if ask is not None and status == "running" and supervisor and supervisor.alive and not supervisor.stopped:
        waits = waits or ask(run_dir)
    told = RunStatus(
        run_dir=str(run_dir.path),
        run_id=report.spec.run_id if report.spec else None,
        now=report.now,
        status=status,
        why=report.why or waits,
        hint="",
        started=report.started,
        wall_s=report.wall_s,
        supervisor=supervisor,
        attempt=report.attempts[-1].number if report.attempts else 0,
        attempts=len(report.attempts),
        step=max(told_step, saved_step),
        told_step=told_step,
        loss=None if last is None or math.isnan(last.loss) else last.loss,
        step_s=step_s,
        last_step_at=last.time if last is not None else None,
        memory_step=memory,
        disk_step=disk.step if disk else None,
        disk_name=disk.name if disk else None,
        started_from=_started_from(report),
        amendments=tuple(report.amendments),
        size=report.size,
        incidents=report.incidents,
        nodes=tuple(_nodes(report, counts)),
        problems=report.problems,
        waits=waits,
        own_checkpoint=find_own(report),
        own_pattern=report.spec.resume_from if report.spec else "",
        trouble=_find_trouble(run_dir) if status in ("running", "unknown", "abandoned") else "",
    )
    return replace(told, hint=_hint(told, report))


def newest_step(run_dir: RunDir, attempts: Sequence[int]) -> tuple[Step | None, float | None]:
    """The newest step that was received and the mean time of the last steps, from the ends of the newest files."""
    return _newest_step(run_dir, attempts)[:2]


def _newest_step(run_dir: RunDir, attempts: Sequence[int]) -> tuple[Step | None, float | None, int]:
    """As `newest_step`, and of which attempt it is; of the first one where there is none."""
    for attempt in reversed(attempts):
        steps = _tail(run_dir.steps(attempt))
        if steps:
            first, last = steps[0], steps[-1]
            took = (last.time - first.time) / (last.step - first.step) if last.step > first.step else None
            return last, took, attempt
    return None, None, 1


def _find_trouble(run_dir: RunDir) -> str:
    try:
        return find_trouble(run_dir.path)
    except FileNotFoundError:
        return ""


def _tail(path: Path) -> list[Step]:
    """The last steps of a steps.jsonl (up to 50), without reading all of it."""
    try:
        with open(path, "rb") as f:
            size = f.seek(0, os.SEEK_END)
            f.seek(max(0, size - _TAIL))
            lines = f.read().split(b"\n")[:-1]
    except OSError:
        return []
    steps = []
    for line in lines[-50:]:
        try:
            r = json.loads(line)
            steps.append(Step(int(r["step"]), float.fromhex(r["loss"]), int(r["tokens"]), float(r["t"])))
        except (ValueError, KeyError, TypeError):
            continue  # torn, or the cut-off beginning of the piece that was read
    return steps


def _supervisor(term: Term | None, alive: bool | None) -> SupervisorStatus | None:
    if term is None:
        return None
    return SupervisorStatus(
        term.pid, term.host, term.number, term.claimed, alive, bool(alive) and _is_stopped(term.pid)
    )


def _is_stopped(pid: int) -> bool:
    try:
        return read_stat(pid)[0] in ("T", "t")
    except (OSError, ValueError):
        return False


def _processes(spec: RunSpec | None) -> dict[str, Counter[str]] | None:
    """node -> role -> how many processes of the run are on this machine."""
    if spec is None or not Path("/proc").is_dir():
        return None
    found: dict[str, Counter[str]] = {}
    for p in marked(spec.run_id):
        found.setdefault(p.node, Counter())[p.role] += 1
    return found


def _memory_step(report: RunReport, counts: Mapping[str, Counter[str]]) -> tuple[int | None, int]:
    """The newest step that the keepers on this machine hold for every rank, and its attempt; None where there is none."""
    spec = report.spec
    if spec is None or not report.attempts:
        return None, 0
    root = find_root(spec.run_id)
    inventories: dict[str, list[Record]] = {}
    for node, roles in counts.items():
        if roles.get("keeper"):
            inventories[node] = _inventory(root / node / "keeper.sock")
    slots = report.attempts[-1].slots
    ranks = {s * spec.nproc + i: n for s, n in enumerate(slots) for i in range(spec.nproc)}
    # Of a run that goes on with fewer nodes, snapshots of more ranks restore nothing.
    mine = {
        n: [e for e in held if e.get("world_size") in (None, 0, len(ranks))]
        for n, held in inventories.items()
    }
    whole = [c for c in candidates({}, mine, ranks) if len(c["memory"]) == len(ranks)]
    return (int(whole[0]["step"]), int(whole[0]["attempt"])) if whole else (None, 0)


def _inventory(path: Path) -> list[Record]:
    """What a keeper holds; nothing where it does not answer in time."""
    try:
        link = KeeperLink(path, {"role": "visitor"}, timeout_s=_KEEPER_S)
    except (OSError, UnbrokenError):
        return []
    try:
        answer, _ = link.request({"op": "inventory"})
        return list(answer["inventory"])
    except (OSError, UnbrokenError, KeyError):
        return []
    finally:
        link.disconnect()


def _nodes(report: RunReport, counts: Mapping[str, Counter[str]] | None) -> list[NodeStatus]:
    """What each node does, from the journal."""
    out: dict[str, str] = {}
    for e in report.events:
        if e["kind"] == "lost":
            out[str(e["node"])] = f"lost: {e.get('reason', '')}".rstrip(": ")
        elif e["kind"] == "cordon":
            out[str(e["node"])] = f"cordoned: {e.get('reason', '')}".rstrip(": ")
        elif e["kind"] == "suspect":
            out[str(e["node"])] = f"suspect, tested aside: {e.get('why', '')}".rstrip(": ")
        elif e["kind"] in ("returned", "cleared"):
            out.pop(str(e["node"]), None)
    last = report.attempts[-1] if report.attempts else None
    nproc = report.spec.nproc if report.spec else 1
    going = last is not None and last.ended is None and report.status == "running"
    stepping = last is not None and bool(_tail(report.run_dir.steps(last.number)))
    places = {name: slot for slot, name in reversed([*enumerate(last.slots if last else ())])}
    found = []
    for name in report.nodes:
        doing = out.get(name)
        if doing is None and name in places:
            slot = places[name]
            low, high = slot * nproc, slot * nproc + nproc - 1
            ranks = f"rank {low}" if low == high else f"ranks {low}–{high}"
            doing = f"{'training' if stepping else 'starting'}, {ranks}" if going else f"had {ranks}"
        here = None if counts is None else dict(counts.get(name, {}))
        if doing is not None and doing.startswith("had ") and here and here.get("rank"):
            doing = f"still runs {doing.removeprefix('had ')}, without a supervisor"
        found.append(NodeStatus(name, doing or ("spare" if last else "not used yet"), here))
    return found


def _started_from(report: RunReport) -> str:
    for e in report.events:
        if e["kind"] == "origin":
            return f"{e['origin']}, step {e['step']}"
    asked = report.spec.origin if report.spec else ""
    return f"{asked}, not copied yet" if asked else ""


def _waits(report: RunReport) -> dict[str, Any] | None:
    """The record of a run that waits for a person now; None where it does not."""
    for e in reversed(report.events):
        if e["kind"] in ("attempt", "made_sure", "status"):
            return None
        if e["kind"] == "waiting":
            return e
    return None


def _hint(s: RunStatus, report: RunReport) -> str:
    """The next action, as an imperative sentence; '' where there is none."""
    command = same_command(report)
    at = f"In {report.cwd}: " if report.cwd else ""
    left = sum(sum((n.processes or {}).values()) for n in s.nodes)
    if s.status == "new":
        return f"Start it. {at}{command}"
    if s.status == "abandoned":
        still = (
            f"{left} of its processes still run: ranks end when their lease expires, the rest waits a while. "
            if left
            else ""
        )
        return f"{still}Give the same command again: it takes over or restarts. {at}{command}"
    if s.status == "stopped" and s.step < 0:
        return f"Fix the cause, then give the same command again; {_OTHERS}. {at}{command}"
    origin = describe_goes_on(report, s.disk_step is not None)
    if s.status == "stopped":
        return (
            f"Fix the cause, then give the same command again: it goes on {origin}; {_OTHERS}. {at}{command}"
        )
    if s.status == "interrupted":
        return f"Give the same command again: it goes on {origin}. {at}{command}"
    if s.status == "running" and s.supervisor is not None and s.supervisor.stopped:
        return (
            f"Continue its supervisor (kill -CONT {s.supervisor.pid}), or give the same command again: it takes over. "
            "Until then nobody supervises, and the ranks stop when their lease expires."
        )
    if s.status == "running" and (wait := _waits(report)):
        return str(wait["todo"])
    if s.status in ("running", "unknown") and s.trouble:
        return f"{s.trouble}. Make it take files again: what waits is written then, and the run goes on by itself."
    if s.status == "unknown" and s.supervisor is not None:
        return (
            f"Ask on {s.supervisor.host}: whether process {s.supervisor.pid} lives cannot be known from here."
        )
    return ""
