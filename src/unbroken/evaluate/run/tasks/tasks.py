"""The tasks of an evaluation from their preparation to their scores: planned, answered, handed to scoring."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ....errors import UnbrokenError
from ...contracts import PreparedTask, Task
from ...plan.dispatch import Dispatcher
from ...plan.planner import Work
from ...plan.priors import Expected, Features, PriorBook, features_of
from ...result.answers import AnswerStore
from ...result.lengths import block_weights, learnt_lengths
from ...result.sameness import SUFFIX, check_of
from ..control import as_user_error
from ..state import EvaluationRun
from .preparation import Preparation
from .scoring_queue import ScoringQueue

CHECK_COST = 4.0
"""What a sample takes in the harness's own batches, against the fast way: a guess, for the plan of the checks alone."""
_log = logging.getLogger(__name__)


class Tasks:
    """Moves each task on: what is prepared is planned, what is answered is scored. Used on the event loop's thread."""

    def __init__(
        self, run: EvaluationRun, dispatcher: Dispatcher, store: AnswerStore, scoring: ScoringQueue, book: PriorBook, waiting: int
    ) -> None:  # fmt: skip
        """`waiting`: so many tasks have still to be prepared; `prepare` counts them down."""
        self.run = run
        self.dispatcher = dispatcher
        self.store = store
        self.scoring = scoring
        self.book = book
        self.waiting = waiting
        self._checks_due = not run.job.spec.exact
        """The fast way is still to be checked."""

    @property
    def answered(self) -> bool:
        """Whether every block of every task is answered or given up, and of every check."""
        return self.waiting == 0 and self.dispatcher.finished and not self._checks_due

    def add_checks(self) -> None:
        """Once nothing waits any more that workers could begin: some samples of each task, to be asked in the harness's own
        batches, beside the scoring."""
        if not self._checks_due or self.waiting or self.dispatcher.waiting:
            return
        self._checks_due = False
        work = []
        for p in [self.run.table.prepared[t] for t in self.run.table.prepared]:
            try:
                check = check_of(p)
                done = self.store.scan(check)
            except (OSError, UnbrokenError, LookupError) as e:
                self.scoring.not_checked(p.task.name, str(e))
                continue
            self.run.table.checks[check.task.name] = check
            if 0 in done or not check.samples:
                self.scoring.check(check, p)
                continue
            expected = self.run.table.expected[p.task.name]
            work.append(Work(check.task.name, (max(CHECK_COST * expected.seconds * check.samples / p.samples, 1e-6),),
                             (0,), 0.0, p.task.gpus))  # fmt: skip
        self.dispatcher.add(work)

    async def prepare(self, task: Task, preparation: Preparation) -> None:
        """Prepares a task and plans it; one that fails ends the run, unless it is to go on without."""
        try:
            self.add([await preparation.prepare(task)])
        except Exception as found:  # noqa: BLE001  whatever it is, the others must not wait for this task
            e = as_user_error(found, f"task {task.name}")
            self.run.table.fail(task.name, str(e))
            self.run.log.note("task_failed", task=task.name, why=str(e))
            if not self.run.settings.keep_going:
                self.run.control.abort(e)
        finally:
            self.waiting -= 1

    def guess_s(self, task: Task) -> float:
        """Expected seconds of a task that is not prepared yet: the order in which to prepare."""
        stated = self.run.job.suite.priors.get(task.name)
        samples = stated.samples if stated and stated.samples else 1000
        model_b, device = self.run.located.model_b, self.run.measured_on
        found = self.book.expect(task.name, samples, Features(), model_b, device, stated)
        return found.seconds + found.score_s

    def add(self, found: Sequence[PreparedTask], *, budget: int | None = None) -> None:
        """Plans prepared tasks; what an earlier command answered is not asked again. `budget`: as for Dispatcher.add."""
        work, complete = [], []
        for p in found:
            name = p.task.name
            self.run.table.prepared[name] = p
            done = self.store.scan(p)
            self._log_passed_over(name)
            left = [b for b in range(p.blocks) if b not in done]
            self.run.observed.reused += sum(len(p.samples_of(b)) for b in done)
            expected = self.book.expect(
                name, p.samples, features_of(p), self.run.located.model_b, self.run.measured_on,
                self.run.job.suite.priors.get(name),
            )  # fmt: skip
            self.run.table.expected[name] = expected
            self.run.log.note("task", task=name, samples=p.samples, blocks=p.blocks, reused=len(done),
                              expected_s=expected.seconds, prior=expected.source)  # fmt: skip
            if left:
                self.run.table.states[name] = "running"
                work.append(_work(p, left, expected, self._lengths(p)))
            else:
                self.run.table.states[name] = "landed"
                complete.append(name)
        if budget is None:
            self.dispatcher.add(work)
        else:
            self.dispatcher.add(work, budget=budget)
        for name in complete:
            self.score(name)

    def _lengths(self, p: PreparedTask) -> tuple[float, ...] | None:
        folder = self.run.job.folder
        return learnt_lengths(folder.landed, self.store.folder.name, p)

    def score(self, task: str) -> None:
        """Hands a task to scoring: its last block is here."""
        self.run.table.states[task] = "landed"
        given_up = {b: why for (t, b), why in self.dispatcher.given_up.items() if t == task}
        self.scoring.submit(self.run.table.prepared[task], given_up)

    def score_if_complete(self, task: str) -> None:
        """Hands a task to scoring if no block of it is open any more, and that has not been done."""
        check = self.run.table.checks.get(task)
        if check is not None:
            if self.dispatcher.remaining_blocks(task) == 0:
                why = self.dispatcher.given_up.get((task, 0))
                self.scoring.check(check, self.run.table.prepared[task.removesuffix(SUFFIX)], why)
            return
        if self.dispatcher.remaining_blocks(task) == 0 and self.run.table.states[task] == "running":
            self.score(task)

    def collect(self) -> None:
        """Notes the scores that are there, and what could not be scored."""
        table = self.run.table
        for done in self.scoring.collect():
            self.run.observed.scorings.append(done)
            self.run.log.note("scored", task=done.task, worker=done.worker, started=done.started, ended=done.ended,
                              parts=len(done.parts) or 1, error=done.error)  # fmt: skip
        for task, why in self.scoring.failed.items():
            if table.states[task] != "failed":
                table.fail(task, why)
                self.run.log.note("task_failed", task=task, why=why)
        for task in self.scoring.scores:
            table.states[task] = "scored"

    def _log_passed_over(self, task: str) -> None:
        """Lines of earlier commands that cannot be used are no defect of this one: their blocks are asked again."""
        for where, why in self.store.passed_over(task):
            self.run.log.note("passed_over", task=task, where=where, why=why)
            _log.warning("%s: stored answers were passed over, and are asked again: %s", where, why)


def _work(
    p: PreparedTask, left: Sequence[int], expected: Expected, lengths: Sequence[float] | None = None
) -> Work:
    """The blocks of a task that are still to be answered, with their share of its expected time; `lengths`: of its answers, where
    they were learnt from another checkpoint. Then the longest blocks come first."""
    weights = p.weights or tuple(float(len(p.samples_of(b))) for b in range(p.blocks))
    order = list(left)
    if lengths is not None:
        weights = block_weights(p, lengths)
        order.sort(key=lambda b: (-weights[b], b))
    total = sum(weights) or 1.0
    times = tuple(max(expected.seconds * weights[b] / total, 1e-6) for b in order)
    return Work(p.task.name, times, tuple(order), expected.score_s, p.task.gpus)
