"""What a report shows, as frozen data: the run, its attempts, incidents, checkpoints and windows of time."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..progress import RunDir, RunSpec, Term
from ..units import Duration
from .curve import Executions

Record = dict[str, Any]
PHASES = ("detect", "stop", "diagnose", "schedule", "start", "restore_and_first_step", "replay")
"""The phases of one recovery, in order (see `progress.records.incident.Incident`)."""


@dataclass(frozen=True)
class Span:
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
    executed: int = 0
    lost: int = 0


@dataclass(frozen=True)
class IncidentRecord:
    """One incident, in the words of incidents/NNNN.json; `at` is the last sign of life before it, in seconds
    since the epoch, `verdict` the verdict's JSON form."""

    number: int
    attempt: int
    kind: str
    at: float
    detected: float
    step: int
    verdict: Record = field(default_factory=dict)
    action: str = ""
    why: str = ""
    nodes: dict[str, str] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    resumed: float | None = None
    steps_lost: int | None = None
    next_attempt: int | None = None
    evidence: bool = False

    @property
    def ended_attempt(self) -> bool:
        """Whether the incident ended its attempt; a supervisor that is succeeded in time ends none."""
        return self.next_attempt != self.attempt

    @property
    def reason(self) -> str:
        """The verdict's reason; where nothing failed, the outcome."""
        if not self.ended_attempt:
            return "SupervisorLost"
        return str(self.verdict.get("reason") or self.verdict.get("outcome") or self.kind)

    @property
    def detected_s(self) -> float:
        """Seconds from the last sign of life until the incident was noticed."""
        return max(0.0, self.phases.get("detect", 0.0), self.detected - self.at)

    @property
    def resumed_s(self) -> float | None:
        """Seconds from noticing until the first step above the highest one before; None where that never came."""
        return None if self.resumed is None else max(0.0, self.resumed - self.detected)

    @property
    def node(self) -> str | None:
        """The node at fault, as far as it is known."""
        faulty = self.verdict.get("faulty") or {}
        root = self.verdict.get("root") or {}
        return faulty.get("node") or root.get("node") or next(iter(self.nodes), None)

    @property
    def rank(self) -> int | None:
        """The rank at fault, as far as it is known."""
        for part in (self.verdict.get("faulty"), self.verdict.get("root")):
            if part and part.get("rank") is not None:
                return int(part["rank"])
        return None


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


@dataclass(frozen=True)
class Report:
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
    spans: tuple[Span, ...]
    attempts: tuple[AttemptRecord, ...]
    incidents: tuple[IncidentRecord, ...]
    checkpoints: tuple[CheckpointRecord, ...]
    executions: Executions
    terms: tuple[Term, ...]
    nodes: tuple[str, ...]
    events: tuple[Record, ...]
    total_steps: int | None = None
    problems: tuple[str, ...] = ()

    @property
    def paused_s(self) -> float:
        """Seconds between a stop (on request or by a verdict) and the next call of the command."""
        return sum(s.seconds for s in self._pauses)

    @property
    def wall_s(self) -> float:
        """Seconds from start to end, less the pauses."""
        return max(0.0, self.ended - self.started - self.paused_s)

    @cached_property
    def _pauses(self) -> tuple[Span, ...]:
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


def same_command(report: Report) -> str:
    """The command that goes on with the run, as to be typed in its working directory."""
    spec = report.spec
    if spec is None:
        return f"unbroken run --run-dir {shlex.quote(str(report.run_dir.path))} ..."
    words = ["unbroken", "run", "--run-dir", str(report.run_dir.path), "--nodes", str(spec.nodes)]
    words += ["--nproc", str(spec.nproc)]
    if spec.spares:
        words += ["--spares", str(spec.spares)]
    return shlex.join([*words, "--", *spec.command])


def seconds_text(seconds: float | None) -> str:
    """Seconds for a table: '0.84 s', '12.3 s', '4m10s'; a dash for None."""
    if seconds is None or math.isnan(seconds):
        return "–"
    if seconds < 10:
        return f"{seconds:.2f} s"
    return f"{seconds:.1f} s" if seconds < 60 else str(Duration(seconds))
