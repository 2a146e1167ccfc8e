"""The loop of an evaluation that has begun: tasks prepared, workers started and watched, until every task is scored."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from ...errors import EvaluationError
from ..contracts import Task
from ..engines.live import EvaluationProgress, WorkerLink
from ..plan.dispatch import Dispatcher
from ..plan.planner import SIMULATED_BUNDLES, Costs
from ..plan.priors import PriorBook, load_book
from ..result.answers import AnswerStore
from .control import as_user_error
from .progress import Display, ProgressView
from .settings import Abort
from .state import EvaluationRun
from .tasks.checks import Checked
from .tasks.preparation import Preparation
from .tasks.scoring_queue import ScoringQueue
from .tasks.tasks import Tasks
from .workers.feeding import Feeder
from .workers.server import listening
from .workers.workers import Workers

TICK_S = 0.05
SWITCH_S = 0.005
"""What a worker is expected to need from one task to the next."""


class Loop:
    """Runs one evaluation to its last score."""

    def __init__(
        self, run: EvaluationRun, checked: Checked, store: AnswerStore, scoring: ScoringQueue, links: dict[str, WorkerLink],
        standing_by: asyncio.Task[None],
    ) -> None:  # fmt: skip
        settings = run.settings
        book = load_book(settings.priors) if settings.priors else PriorBook()
        load_s = settings.load_s
        if load_s is None:
            load_s = book.start_s(run.located.model_b, run.measured_on)
        costs = Costs(load_s, SWITCH_S, settings.cpu_workers)
        self.widths = [max(1, slot.width) for slot in settings.slots] or [run.job.spec.gpus]
        self.dispatcher = Dispatcher((), self.widths, costs, stealing=settings.stealing)
        self.run = run
        self.checked = checked
        self.waiting = tuple(
            t for t in checked.tasks if t.name not in checked.prepared and t.name not in run.table.errors
        )
        self.tasks = Tasks(run, self.dispatcher, store, scoring, book, len(self.waiting))
        self.workers = Workers(run, self.dispatcher, links, standing_by)
        self.feeder = Feeder(run, self.dispatcher, self.tasks, self.workers, links)
        self.view = ProgressView(run, self.dispatcher, links, scoring.scores)

    @property
    def expected_s(self) -> float:
        """The makespan of the first plan."""
        return self.dispatcher.plan.makespan_s

    def progress(self) -> EvaluationProgress:
        """Where it stands."""
        return self.view.progress(staffed=self.workers.staffed, prepared=self.tasks.waiting == 0)

    async def evaluate(self, preparation: Preparation, display: Display) -> None:
        """Returns when every task is scored or has failed. Raises Abort."""
        self.tasks.add(list(self.checked.prepared.values()), budget=SIMULATED_BUNDLES)
        self.tasks.add_checks()
        needed = not self.tasks.answered
        self._check_widths(self.checked.tasks)
        async with contextlib.AsyncExitStack() as stack:
            doing: list[asyncio.Task[None]] = []
            if needed:
                await stack.enter_async_context(listening(self.run, self.feeder))
                order = sorted(self.waiting, key=lambda t: -self.tasks.guess_s(t))
                doing = [asyncio.create_task(self._prepare(t, preparation)) for t in order]
                doing.append(asyncio.create_task(self.workers.begin(stack)))
                for d in doing:
                    d.add_done_callback(self._abort_if_failed)
            try:
                await self._until_scored(display)
            finally:
                self.run.control.fetches_end.set()
                for d in (self.workers.standing_by, *doing):
                    d.cancel()
                self.feeder.stop_all(self.run.control.stopping or "done")
                self.workers.end_unconnected()
                if needed:
                    close = self.run.launchers.engine.close
                    await asyncio.get_running_loop().run_in_executor(None, close)
                    await self.feeder.wait_until_gone(5.0)

    def _add_checks(self) -> None:
        known = len(self.run.table.checks)
        self.tasks.add_checks()
        if len(self.run.table.checks) > known:
            self.feeder.feed_all()

    def _check_widths(self, tasks: Sequence[Task]) -> None:
        widest = max(self.widths)
        for t in tasks:
            if self.run.settings.slots and t.gpus > widest:
                raise Abort(EvaluationError(f"task '{t.name}' needs a worker with {t.gpus} GPUs, the widest has {widest}",
                                            where=self.run.job.suite.name, hint=f"Give --gpus-per-worker {t.gpus}"))  # fmt: skip

    async def _prepare(self, task: Task, preparation: Preparation) -> None:
        await self.tasks.prepare(task, preparation)
        self.feeder.feed_all()

    def _abort_if_failed(self, done: asyncio.Task[None]) -> None:
        """What nobody caught ends the run; the fetch that nobody needs any more may fail."""
        if done.cancelled() or (e := done.exception()) is None:
            return
        if not self.run.observed.gpu_end:
            self.run.control.abort(as_user_error(e, str(self.run.job.folder.root)))

    async def _until_scored(self, display: Display) -> None:
        control, observed = self.run.control, self.run.observed
        while True:
            control.check()
            self._add_checks()
            answered = self.tasks.answered
            if answered and not observed.gpu_end:
                observed.gpu_end = time.time()
                control.fetches_end.set()  # whoever joined was faster than the fetch here
                self.feeder.stop_all("every answer is here")
            self.tasks.collect()
            if answered and self.tasks.scoring.idle:
                self.tasks.collect()  # what ended since the call above
                return
            if not answered:
                self.workers.watch()
            display.show(self.progress)
            await control.wait(TICK_S)
