"""What a report shows, as frozen data: the run, its attempts, incidents, checkpoints and windows of time."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..progress import RunDir, RunSpec, Term
from ..progress.records.amendment import describe_amendment, describe_resize
from ..progress.records.incident import Incident
from ..progress.records.own_checkpoint import describe_own
from ..units import Duration
from .curve import Executions
from .effective import measure

Record = dict[str, Any]
PHASES = ("detect", "stop", "diagnose", "schedule", "start", "restore_and_first_step", "replay")
"""The phases of one recovery, in order (see `progress.records.incident.Incident`)."""


@dataclass(frozen=True)
class AttemptSpan:
    """A window of time of one attempt, in seconds since the epoch. `kind`: setup (before the first attempt, whose
    number is then 0), starting, replayed, training, unnoticed (from the last sign of life until something was noticed), down, finishing, paused."""

    kind: str
    start: float
    end: float
    attempt: int

    @property
    def seconds(self) -> float:
        return max(0.0, self.end - self.start)


@dataclass(frozen=True)
class AttemptRecord:
    """One attempt. Times are seconds since the epoch; steps are -1 where there is none; `origin` says what it was
    to restore ('the beginning', 'step 40, memory')."""

    number: int
    slots: tuple[str, ...]
    launched: float
    ended: float | None
    how: str
    origin: str
    first_step: int = -1
    first_step_at: float | None = None
    caught_up_at: float | None = None
    last_step: int = -1
    last_step_at: float | None = None
    lost: int = 0


def describe_incident(i: Incident, run_dir: RunDir) -> Record:
    """An incident in the JSON of `unbroken status` and `unbroken report`: names that scripts read do not follow renames."""
    return {
        "number": i.number, "attempt": i.attempt, "kind": i.kind, "at": i.last_sign, "detected": i.detected, "step": i.step,
        "verdict": i.verdict.as_json() if i.verdict is not None else {}, "action": i.action, "why": i.why, "nodes": i.nodes,
        "phases": i.phases, "resumed": i.resumed, "steps_lost": i.steps_lost, "next_attempt": i.next_attempt,
        "evidence": has_stacks(i, run_dir),
    }  # fmt: skip


def has_stacks(i: Incident, run_dir: RunDir) -> bool:
    """Whether stacks were collected for an incident."""
    return run_dir.evidence(i.number).is_dir()


@dataclass(frozen=True)
class CheckpointRecord:
    """One folder of the checkpoints. `counts`: it is committed and, if its attempt was sealed, accepted by the
    seal. `time` is seconds since the epoch."""

    name: str
    step: int
    attempt: int
    status: str
    bytes: int
    time: float
    counts: bool
    why: str = ""
    place: str = ""
    """The folder or address in which it lies."""


@dataclass(frozen=True)
class RunSize:
    """The newest attempt has `nodes` of the `asked` ones; for `reduced_s` attempts had fewer than were asked for, of `attempts_s`
    altogether. `changes` says each change in words, oldest first."""

    nodes: int
    asked: int
    reduced_s: float
    attempts_s: float
    changes: tuple[str, ...]

    def describe(self) -> str:
        """In a line; "" of a run that always had all of its nodes."""
        if not self.reduced_s:
            return ""
        share = f"{self.reduced_s / self.attempts_s:.0%} of its attempts"
        return f"{self.nodes} of {self.asked} nodes; {seconds_text(self.reduced_s)} with fewer than asked for, {share}"


@dataclass(frozen=True)
class RunReport:
    """A run as it stands at `now` (seconds since the epoch). `status` is new, running, completed, stopped,
    interrupted, or abandoned: its journal says running, and its supervisor is gone."""

    run_dir: RunDir
    now: float
    spec: RunSpec | None
    status: str
    why: str
    cwd: str
    started: float
    ended: float
    spans: tuple[AttemptSpan, ...]
    attempts: tuple[AttemptRecord, ...]
    incidents: tuple[Incident, ...]
    checkpoints: tuple[CheckpointRecord, ...]
    executions: Executions
    terms: tuple[Term, ...]
    nodes: tuple[str, ...]
    events: tuple[Record, ...]
    total_steps: int | None = None
    problems: tuple[str, ...] = ()

    @property
    def amendments(self) -> list[str]:
        """What was changed of the run in between, oldest first."""
        return [describe_amendment(r) for r in self.events if r["kind"] == "amended"]

    @cached_property
    def size(self) -> RunSize:
        """With how many nodes it goes on, and for how long it had fewer than it was asked for (--min-nodes)."""
        ends = {a.number: self.ended if a.ended is None else a.ended for a in self.attempts}
        asked = nodes = 0
        reduced = whole = 0.0
        for e in self.events:
            if e["kind"] in ("run", "amended") and "nodes" in e:
                asked = int(e["nodes"])
            elif e["kind"] == "attempt":
                nodes, lasted = len(e["slots"]), max(0.0, ends.get(int(e["attempt"]), 0.0) - float(e["t"]))
                whole += lasted
                reduced += lasted if nodes < asked else 0.0
        # Written again where the attempt could not be launched: the last one is what came of it.
        resized = {e.get("before"): e for e in self.events if e["kind"] == "resized"}
        changes = tuple(
            describe_resize(e) for e in resized.values() if e.get("without") or e["nodes"] != e["had"]
        )
        return RunSize(nodes, asked, reduced, whole, changes)

    @property
    def paused_s(self) -> float:
        """Seconds between a stop (on request or by a verdict) and the next call of the command."""
        return sum(s.seconds for s in self._pauses)

    @property
    def wall_s(self) -> float:
        """Seconds from start to end, less the pauses."""
        return max(0.0, self.ended - self.started - self.paused_s)

    @cached_property
    def _pauses(self) -> tuple[AttemptSpan, ...]:
        return tuple(s for s in self.spans if s.kind == "paused")

    def own_time(self, when: float) -> float:
        """Seconds of the run's own time at a moment: since its start, without its pauses."""
        paused = sum(min(when, s.end) - s.start for s in self._pauses if when > s.start)
        return max(0.0, when - self.started - paused)

    @property
    def ettr(self) -> float | None:
        """Effective training time ratio: time of each step's last execution over wall time; None before a step."""
        if not len(self.executions.all) or self.wall_s <= 0:
            return None
        return min(1.0, self.executions.productive_s / self.wall_s)

    @property
    def effective(self) -> dict[str, Any] | None:
        """Both published forms of ETTR with their inputs, losses by cause and phase, the budget of an incident; None without
        an incident that ended an attempt and was got over."""
        over = [(i.reason, i.phases) for i in self.incidents if i.ended_attempt and i.resumed is not None]
        return measure(self.executions.productive_s, over)

    @property
    def interventions_avoided(self) -> int:
        """Incidents after which the run went on by itself: each of them would have waited for a person."""
        return sum(i.resumed is not None for i in self.incidents)

    @property
    def innocent_node_hours(self) -> float:
        """How long nodes were out of use that returned with nothing found."""
        return (
            sum(float(e["seconds"]) for e in self.events if e["kind"] == "cleared" and e.get("innocent"))
            / 3600
        )

    @property
    def node_faults(self) -> int:
        """How often a node was lost, or put out of use."""
        return sum(e["kind"] in ("lost", "cordon") for e in self.events)

    @property
    def step(self) -> int:
        """The newest step of the line of steps that counts, -1 before the first."""
        last = self.executions.last
        return int(last.step[-1]) if len(last) else -1

    @property
    def loss(self) -> float | None:
        """The newest loss that counts, None where none was told."""
        told = self.executions.last.loss
        told = told[~np.isnan(told)]
        return float(told[-1]) if len(told) else None

    @property
    def name(self) -> str:
        """What to call the run: its script or module."""
        if self.spec is None:
            return self.run_dir.path.name
        words = self.spec.command
        if words[0] == "-m" and len(words) > 1:
            return words[1]
        return next((w for w in words if w.endswith(".py")), words[0])


def same_command(report: RunReport) -> str:
    """The command that goes on with the run, as to be typed in its working directory."""
    spec = report.spec
    if spec is None:
        return f"unbroken run --run-dir {shlex.quote(str(report.run_dir.path))} ..."
    words = ["unbroken", "run", "--run-dir", str(report.run_dir.path), "--nodes", str(spec.nodes)]
    words += ["--nproc", str(spec.nproc)]
    if spec.spares:
        words += ["--spares", str(spec.spares)]
    return shlex.join([*words, "--", *spec.command])


def find_own(report: RunReport) -> str:
    """The script's own newest checkpoint as it was last looked for; "" for none."""
    return next((str(e["path"]) for e in reversed(report.events) if e["kind"] == "own_checkpoint"), "")


def describe_goes_on(report: RunReport, saved: bool) -> str:
    """What the same command goes on from: `saved` says whether there is a checkpoint that counts."""
    spec, own = report.spec, find_own(report)
    if saved:
        return "from the last checkpoint"
    if not own and any(e["kind"] == "restored" for e in report.events):
        return "without a checkpoint: none was saved"
    if not own and spec is not None and spec.resume_from:
        return f"from the script's own newest checkpoint in {spec.resume_from}, where one is whole"
    return describe_own(own, spec is not None and bool(spec.resume_arg or spec.resume_from))


def seconds_text(seconds: float | None) -> str:
    """Seconds for a table: '0.84 s', '12.3 s', '4m10s'; a dash for None."""
    if seconds is None or math.isnan(seconds):
        return "–"
    if seconds < 10:
        return f"{seconds:.2f} s"
    return f"{seconds:.1f} s" if seconds < 60 else str(Duration(seconds))
