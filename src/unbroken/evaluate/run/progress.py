"""Where an evaluation stands, for whoever watches it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..contracts import Assignment, Score
from ..engines.live import EvaluationProgress, Watcher, WorkerLink
from ..plan.dispatch import Dispatcher
from .state import EvaluationRun, TaskTable
from .tasks.preparation import Preparation

EVERY_S = 0.25


class Display:
    """Reports progress to a watcher, not more often than it can be read."""

    def __init__(self, watcher: Watcher | None) -> None:
        self._watcher = watcher
        self._last = 0.0

    def show(self, progress: Callable[[], EvaluationProgress], *, now: bool = False) -> None:
        """Reports it, if the last time was long enough ago, or at once."""
        at = time.monotonic()
        if self._watcher is not None and (now or at - self._last >= EVERY_S):
            self._last = at
            self._watcher(progress())


def of_checks(preparation: Preparation, data_there: bool, errors: dict[str, str]) -> EvaluationProgress:
    """Before the model is there."""
    phase = "looking up the tasks"
    if data_there:
        phase = "fetching the model"
    elif preparation.to_look:
        phase = f"looking at the data: {preparation.looked} of {preparation.to_look} tasks"
    return EvaluationProgress(phase, time.time(), 0.0, {}, {}, 0.0, 0.0, dict(errors))


@dataclass(frozen=True)
class ProgressView:
    """What the progress of a running evaluation is read from."""

    run: EvaluationRun
    dispatcher: Dispatcher
    links: dict[str, WorkerLink]
    scores: dict[str, Score]

    def progress(self, *, staffed: bool, prepared: bool) -> EvaluationProgress:
        """`staffed`: every worker was started; `prepared`: no task's prompts are still being built."""
        observed, table = self.run.observed, self.run.table
        phase = "preparing"
        if table.finished:
            phase = "finished" if observed.gpu_end else "checking"
        elif observed.gpu_end:
            phase = "scoring"
        elif self.links or (staffed and prepared):
            phase = "running"
        left = self.dispatcher.remaining_s()
        able = sum(1 for link in self.links.values() if link.ready) or len(self.run.settings.slots) or 1
        return EvaluationProgress(phase, time.time(), observed.started, self._tasks(table), self._workers(), left, left / able,
                        dict(table.errors))  # fmt: skip

    def _tasks(self, table: TaskTable) -> dict[str, dict[str, object]]:
        found: dict[str, dict[str, object]] = {}
        for name, state in table.states.items():
            p, score = table.prepared.get(name), self.scores.get(name)
            blocks = p.blocks if p else 0
            done = blocks - self.dispatcher.remaining_blocks(name)
            missing = score.samples - score.scored if score else 0
            found[name] = {"state": state, "blocks": blocks, "done": done, "missing": missing}
        return found

    def _workers(self) -> dict[str, dict[str, object]]:
        observed, found = self.run.observed, {}
        span = max(time.time() - observed.started, 1e-6) if observed.started else 1.0
        for link in self.links.values():
            known = self.dispatcher.workers.get(link.name)
            queue = known.queue if known else []
            state = (
                "leaving" if link.leaving else "loading" if not link.ready else "busy" if queue else "idle"
            )
            found[link.name] = {
                "node": link.node, "gpus": list(link.gpus), "state": state, "task": queue[0][0] if queue else "",
                "busy": round(_busy_s(link, observed.assignments) / span, 3),
            }  # fmt: skip
        return found


def _busy_s(link: WorkerLink, assignments: Iterable[Assignment]) -> float:
    ended = sum(t.busy_s for t in assignments if t.worker == link.name)
    return ended + sum(a.busy_s for a in link.assignments.values())
