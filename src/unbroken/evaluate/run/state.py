"""What a running evaluation knows: its tasks' states, what was measured, its journal; and one that has begun, as a whole."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..contracts import Assignment, PreparedTask, ScoreDone, WorkerSeen
from ..model.locate import Located
from ..plan.outcome import BlockTime
from ..plan.priors import Expected, measured_on
from ..result.journal import EvaluationJournal
from .control import Control
from .job import Job, Launchers
from .settings import Settings


@dataclass
class TaskTable:
    """Every task with its state."""

    states: dict[str, str] = field(default_factory=dict)
    """By task, in the suite's order: 'waiting', 'running', 'landed', 'scored' or 'failed'."""
    prepared: dict[str, PreparedTask] = field(default_factory=dict)
    expected: dict[str, Expected] = field(default_factory=dict)
    """What each prepared task was expected to take."""
    errors: dict[str, str] = field(default_factory=dict)
    """Why a task or a group has no score."""
    checks: dict[str, PreparedTask] = field(default_factory=dict)
    """What is asked in the harness's own batches, to compare with: by the name that the dispatcher knows it by."""

    def find(self, task: str) -> PreparedTask:
        """A prepared task, or a check of one."""
        return self.checks.get(task) or self.prepared[task]

    @property
    def every(self) -> Mapping[str, PreparedTask]:
        """Whatever workers answer."""
        return ChainMap(self.prepared, self.checks)

    def fail(self, task: str, why: str) -> None:
        """The task will have no score."""
        self.errors[task], self.states[task] = why, "failed"

    @property
    def finished(self) -> bool:
        """Whether every task has a score, or will have none."""
        return bool(self.states) and all(s in ("scored", "failed") for s in self.states.values())


@dataclass
class Observed:
    """What was measured so far; the report is made of it."""

    started: float = 0.0
    """When the first worker was started, or joined; 0: none yet."""
    gpu_end: float = 0.0
    """When the last answer was here; 0: some are missing."""
    assignments: list[Assignment] = field(default_factory=list)
    blocks: list[BlockTime] = field(default_factory=list)
    scorings: list[ScoreDone] = field(default_factory=list)
    workers: list[WorkerSeen] = field(default_factory=list)
    """Those that are gone."""
    gaps: list[float] = field(default_factory=list)
    """Seconds that workers waited between two shards."""
    reused: int = 0
    """Samples that an earlier command had answered."""


class EventLog:
    """The journal while the evaluation runs; a disk that is full ends the run instead of whoever writes."""

    def __init__(self, path: Path, control: Control) -> None:
        self._journal: EvaluationJournal | None = EvaluationJournal(path)
        self._control = control

    def note(self, event: str, **fields: Any) -> None:
        """Appends an event; after the end nothing is written."""
        if self._journal is None:
            return
        try:
            self._journal.write(event, **fields)
        except OSError as e:
            self._control.abort(self._control.unwritable(e))

    def close(self) -> None:
        """Nothing is written from now on."""
        if self._journal is not None:
            journal, self._journal = self._journal, None
            journal.close()


@dataclass(frozen=True)
class EvaluationRun:
    """One evaluation that has begun: what it is, what runs it, where it writes what happens."""

    job: Job
    launchers: Launchers
    settings: Settings
    located: Located
    control: Control
    log: EventLog
    observed: Observed
    table: TaskTable

    @property
    def measured_on(self) -> str:
        """Under which name its run times are remembered."""
        return measured_on(self.settings.device, self.job.spec.backend, exact=self.job.spec.exact)
