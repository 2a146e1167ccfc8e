"""Reads a run directory into the data of a report, also while it is being written or where parts are damaged.

Tolerant on purpose: a report is wanted most when something is broken. What cannot be read is left out and said in
`RunReport.problems`; only a folder that is no run directory is an error.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from ..checkpoint.catalogue.contents import listing
from ..checkpoint.storage import quick_storage
from ..cluster.local import name_node
from ..errors import ContractError, UnbrokenError
from ..progress import RunDir, RunSpec, Term, places, read_journal, read_spec, read_terms
from ..progress.records.incident import Incident
from ..units import plural
from .curve import Executions, read_executions
from .data import AttemptRecord, AttemptSpan, CheckpointRecord, Record, RunReport

T = TypeVar("T")


def gather(run_dir: RunDir, *, now: float | None = None, with_steps: bool = True) -> RunReport:
    """The report of a run directory as it is now, also while it is being written or where parts are damaged.

    Without steps it is quick for a run of any length, and has no loss, no ETTR and no times of steps. Raises InputError where the folder is no run directory.
    """
    problems: list[str] = []
    if not run_dir.spec.exists():
        read_spec(run_dir.spec)  # raises the InputError that says so
    spec = _tolerant(problems, "run.toml", lambda: read_spec(run_dir.spec))
    moment = time.time() if now is None else now
    terms = _tolerant(problems, "the terms", lambda: tuple(read_terms(run_dir))) or ()
    text = _tolerant(problems, "the journal", lambda: read_journal(run_dir))
    records = _sane(text.records if text else [])
    if text and text.damaged:
        problems.append(
            f"{plural(text.damaged, 'line')} of the journal {'does' if text.damaged == 1 else 'do'} not check and {'was' if text.damaged == 1 else 'were'} left out"
        )
    numbers = run_dir.attempt_numbers() if with_steps else []
    executions = _tolerant(
        problems, "the steps", lambda: read_executions([(n, run_dir.steps(n)) for n in numbers])
    ) or read_executions([])
    if executions.damaged:
        problems.append(
            f"{plural(executions.damaged, 'line')} of steps.jsonl cannot be read and {'was' if executions.damaged == 1 else 'were'} left out"
        )
    incidents = tuple(_counted(_read_incidents(run_dir, problems), records, problems))
    status, why = status_of(records, terms)
    started, ended = _extent(records, executions, terms, status, moment)
    attempts = tuple(_attempts(records, executions, status, ended))
    incidents = tuple(_with_last_sign(incidents, attempts))
    seals = {r["attempt"]: tuple(r["checkpoints"]) for r in records if r["kind"] == "seal"}
    problems += passed_over(records)
    lying: list[CheckpointRecord] = []
    for place in places(run_dir, records):
        read = partial(_checkpoints, place, str(run_dir.checkpoints), seals, records)
        lying += _tolerant(problems, f"the checkpoints in {place}", read) or ()
    checkpoints = tuple(sorted(lying, key=lambda c: (c.attempt, c.step), reverse=True))
    return RunReport(
        run_dir=run_dir, now=moment, spec=spec, status=status, why=why,
        cwd=next((str(r.get("cwd", "")) for r in records if r["kind"] == "run"), ""),
        started=started, ended=ended, spans=tuple(_spans(records, attempts, incidents, status, ended)),
        attempts=attempts, incidents=incidents, checkpoints=checkpoints, executions=executions,
        terms=terms, nodes=_nodes(spec, records), events=tuple(records), total_steps=_total(records),
        problems=tuple(problems),
    )  # fmt: skip


def passed_over(records: Iterable[Record]) -> list[str]:
    """Checkpoints that a start found unusable, in words; each once."""
    said: dict[str, str] = {}
    for r in records:
        if r["kind"] == "restored" and r.get("skipped"):
            instead = f"step {r['step']}" if r.get("step") is not None else "nothing"
            for name, why in r["skipped"]:
                said[str(name)] = (
                    f"{name} was passed over when attempt {r.get('attempt')} started, which restored {instead}: {why}"
                )
    return list(said.values())


def status_of(records: Iterable[Record], terms: Iterable[Term]) -> tuple[str, str]:
    """(status, why) as of the journal; a run whose supervisor is provably gone is abandoned."""
    status, why = "new", ""
    for r in records:
        if r["kind"] == "epoch" and status != "completed":
            status, why = "running", ""
        elif r["kind"] == "status":
            status, why = str(r["status"]), str(r.get("why", ""))
    newest = list(terms)[-1:]
    if status in ("new", "running") and newest and newest[0].supervisor_is_gone():
        return "abandoned", "its supervisor is gone"
    return status, why


def _read_incidents(run_dir: RunDir, problems: list[str]) -> list[Incident]:
    """The incidents, oldest first; a file that cannot be read is left out and named in `problems`."""
    found = []
    for path in sorted(run_dir.incidents.glob("[0-9]*.json")):
        try:
            found.append(Incident.from_json(json.loads(path.read_bytes())))
        except (OSError, ValueError, ContractError) as e:
            problems.append(f"{path.relative_to(run_dir.path)} cannot be read: {e}")
    return found


def _counted(incidents: list[Incident], records: list[Record], problems: list[str]) -> list[Incident]:
    """Without those that the record does not know: a supervisor that was superseded meanwhile wrote them, or one that was
    killed, or is about to write them down. A run whose record cannot be read, or is an older tool's, shows all."""
    known = {int(r["incident"]) for r in records if r["kind"] == "incident" and "incident" in r}
    if not any(r["kind"] == "epoch" for r in records):
        return incidents
    for number in sorted({i.number for i in incidents} - known):
        if number < max(known, default=0):  # a higher one may be on its way into the record
            problems.append(f"incident {number} is not in the run's record and was left out")
    return [i for i in incidents if i.number in known]


def _with_last_sign(incidents: Iterable[Incident], attempts: Iterable[AttemptRecord]) -> list[Incident]:
    """A supervisor that follows a dead one cannot know when its predecessor's ranks last stepped; the steps do."""
    last = {a.number: a.last_step_at for a in attempts if a.last_step_at is not None}
    return [
        replace(i, last_sign=min(i.last_sign, last.get(i.attempt, i.last_sign)))
        if i.kind == "supervisor_lost" and i.ended_attempt
        else i
        for i in incidents
    ]


def _sane(records: list[Record]) -> list[Record]:
    """The records that have what every record has; a checksum says that a line is whole, not what is in it."""
    needs = {
        "attempt": ("attempt", "slots"), "ended": ("attempt",), "seal": ("attempt", "checkpoints"),
        "status": ("status",), "lost": ("node",), "returned": ("node",), "cordon": ("node",),
        "resized": ("had", "nodes"), "own_checkpoint": ("path",),
    }  # fmt: skip
    return [
        r
        for r in records
        if isinstance(r.get("t"), (int, float)) and all(k in r for k in needs.get(str(r.get("kind")), ()))
    ]


def _extent(
    records: list[Record], executions: Executions, terms: tuple[Term, ...], status: str, now: float
) -> tuple[float, float]:
    """When the run started and when it ended; of a run that goes on, now; of an abandoned one, its last sign."""
    times = [float(r["t"]) for r in records]
    steps = executions.all.time
    started = times[0] if times else terms[0].claimed if terms else now
    if status in ("running", "new"):
        return started, max(now, started)
    last = times[-1] if times else started
    if status == "abandoned" and len(steps):
        last = max(last, float(steps[-1]))
    return started, max(last, started)


def _attempts(
    records: list[Record], executions: Executions, status: str, ended: float
) -> list[AttemptRecord]:
    ends = {r["attempt"]: r for r in records if r["kind"] == "ended"}
    starts = [r for r in records if r["kind"] == "attempt"]
    own = {r.get("attempt"): str(r["path"]) for r in records if r["kind"] == "own_checkpoint"}
    every, counts = executions.all, executions.counts
    stories = []
    floor = -1
    for i, r in enumerate(starts):
        number = int(r["attempt"])
        mine = slice(*np.searchsorted(every.attempt, (number, number + 1)))
        steps = every.only(mine)
        above = (steps.step > floor).nonzero()[0]
        end = ends.get(number)
        if end is not None:
            how, stopped = str(end.get("how", "ended")), float(end["t"])
        elif i + 1 < len(starts) or status not in ("running", "new"):
            how, stopped = "cut off", float(starts[i + 1]["t"]) if i + 1 < len(starts) else ended
        else:
            how, stopped = "running", None
        stories.append(
            AttemptRecord(
                number=number,
                slots=tuple(str(s) for s in r["slots"]),
                launched=float(r["t"]),
                ended=stopped,
                how=how,
                origin=_origin(r, own.get(number)),
                first_step=int(steps.step[0]) if len(steps) else -1,
                first_step_at=float(steps.time[0]) if len(steps) else None,
                caught_up_at=float(steps.time[above[0]]) if len(above) else None,
                last_step=int(steps.step[-1]) if len(steps) else -1,
                last_step_at=float(steps.time[-1]) if len(steps) else None,
                lost=int((~counts[mine]).sum()),
            )
        )
        floor = max(floor, int(steps.step.max()) if len(steps) else -1)
    return stories


def _origin(record: Record, own: str | None = None) -> str:
    candidates = record.get("candidates") or []
    if not candidates:
        return f"the script's own {Path(own).name}" if own else "the beginning"
    best = candidates[0]
    # Journals of earlier versions hold a table of who holds which rank, later ones how many ranks are in memory.
    memory = best["in_memory"] if "in_memory" in best else len(best.get("memory") or {})
    source = "disk" if not memory else "memory" if best.get("name") is None else "memory or disk"
    return f"step {best.get('step')}, {source}"


def _spans(
    records: list[Record],
    attempts: tuple[AttemptRecord, ...],
    incidents: tuple[Incident, ...],
    status: str,
    ended: float,
) -> list[AttemptSpan]:
    """The run's time from its first attempt on, cut into windows; they do not overlap."""
    pauses = _pauses(records)
    detected = {i.attempt: i for i in incidents if i.ended_attempt}
    spans: list[AttemptSpan] = []

    def add(kind: str, start: float, end: float, attempt: int) -> None:
        begin = max(start, spans[-1].end) if spans else start
        if end > begin:
            spans.append(AttemptSpan(kind, begin, end, attempt))

    if attempts and records:
        add("setup", float(records[0]["t"]), attempts[0].launched, 0)
    for i, a in enumerate(attempts):
        nxt = attempts[i + 1].launched if i + 1 < len(attempts) else ended
        stop = min(nxt, a.ended if a.ended is not None else nxt)
        incident = detected.get(a.number)
        noticed = min(incident.detected, nxt) if incident else stop
        if a.first_step_at is None or a.last_step_at is None:
            add("starting", a.launched, noticed, a.number)
        else:
            add("starting", a.launched, a.first_step_at, a.number)
            add("replayed", a.first_step_at, a.caught_up_at or a.last_step_at, a.number)
            live = a.ended is None and status == "running"
            add("training", a.first_step_at, stop if live else a.last_step_at, a.number)
            if incident:
                add("unnoticed", a.last_step_at, noticed, a.number)
            else:
                noticed = min(stop, a.last_step_at)
        kind = "down" if incident or a.how not in ("completed", "interrupted") else "finishing"
        for began, over in pauses:
            if stop <= over and began < nxt:
                add(kind, noticed, began, a.number)
                add("paused", began, min(over, nxt), a.number)
                kind = "down"
        if a.ended is not None:
            add(kind, noticed, nxt, a.number)
    return spans


def _pauses(records: list[Record]) -> list[tuple[float, float]]:
    """(from, to) of each time in which the run was stopped and nobody had given its command again."""
    pauses = []
    since: float | None = None
    for r in records:
        if r["kind"] == "status" and r["status"] in ("stopped", "interrupted"):
            since = float(r["t"])
        elif r["kind"] == "epoch" and since is not None:
            pauses.append((since, float(r["t"])))
            since = None
    return pauses


def _checkpoints(
    place: str, own: str, seals: dict[int, tuple[str, ...]], records: list[Record]
) -> tuple[CheckpointRecord, ...]:
    brought = {
        n
        for r in records
        if r["kind"] == "accepted" and (r["place"] or own) == place
        for n in r["checkpoints"]
    }
    return tuple(
        CheckpointRecord(
            f.name, f.step, f.attempt, f.status, f.bytes, f.time,
            f.committed and (f.name in brought or f.name in seals.get(f.attempt, (f.name,))), f.why, place,
        )
        for f in listing(quick_storage(place))
    )  # fmt: skip


def _nodes(spec: RunSpec | None, records: list[Record]) -> tuple[str, ...]:
    """The nodes of the run, those that train first, then the spares and whatever else the journal names."""
    names: dict[str, None] = {}
    for r in records:
        if r["kind"] == "attempt":
            names.update(dict.fromkeys(str(s) for s in r["slots"]))
        elif r["kind"] in ("lost", "returned", "cordon"):
            names[str(r["node"])] = None
    if spec is not None and spec.cluster.name == "local":
        names.update(dict.fromkeys(name_node(i) for i in range(spec.nodes + spec.spares)))
    return tuple(sorted(names))


def _total(records: list[Record]) -> int | None:
    return next((int(r["total_steps"]) for r in reversed(records) if r.get("total_steps")), None)


def _tolerant(problems: list[str], what: str, read: Callable[[], T]) -> T | None:
    try:
        return read()
    except (OSError, ValueError, KeyError, TypeError, UnbrokenError) as e:
        problems.append(f"{what} cannot be read: {e}")
        return None
