"""Runs one evaluation: checks, prepares, plans, feeds workers, keeps what they answer, hands it to scoring.

One process, one event loop, the only writer of the evaluation's files. It may be killed at any instant: answers that
reached it are on disk, the same command goes on with the rest. Workers may join and leave while it runs.

    job.py, settings.py   what is evaluated, what runs it, how
    control.py            whether it goes on
    loop.py               from the first worker to the last score
    tasks/                each task's way: checked, prepared, planned, scored
    workers/              the engine's workers, the port, what they send and get
    state.py              what all of these know together
    finish.py             the report
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable
from typing import Any

from ..contracts import Report
from ..engines.live import EvaluationProgress, Watcher, WorkerLink
from ..model.locate import Located, beside, locate
from ..preparation.prepare import Preparers
from ..result.answers import AnswerStore
from ..result.folder import FULL
from ..result.journal import events
from ..suite.registry import check_options
from . import progress
from .control import Control
from .finish import note_end, save_estimates, write_report
from .job import Job, Launchers
from .loop import TICK_S, Loop
from .settings import Abort, Settings
from .state import EvaluationRun, EventLog, Observed, TaskTable
from .tasks.checks import Checked, check_tasks, stand_by
from .tasks.preparation import Preparation
from .tasks.scoring_queue import ScoringQueue


class Coordinator:
    """One evaluation by one process."""

    def __init__(
        self,
        job: Job,
        launchers: Launchers,
        settings: Settings = Settings(),
        *,
        watcher: Watcher | None = None,
    ) -> None:
        self.job = job
        self.launchers = launchers
        self.settings = settings
        self.control = Control(job.folder.root)
        self.table = TaskTable()
        self.observed = Observed()
        self.links: dict[str, WorkerLink] = {}
        """Workers that are connected, by name."""
        self._display = progress.Display(watcher)

    def run(self) -> Report:
        """Evaluates, and returns the report that is also in the folder. Raises UnbrokenError."""
        check_options(self.job.spec)
        try:
            with self.job.folder.lock():
                return asyncio.run(self._run())
        except Abort as e:
            raise e.error from None
        except OSError as e:
            if e.errno not in FULL:
                raise
            raise self.control.unwritable(e) from e

    def stop(self, why: str) -> None:
        """Ends the run as soon as it can: workers are asked to stop after their block. For signal handlers."""
        self.control.stop(why)

    async def _run(self) -> Report:
        job, settings, loop = self.job, self.settings, asyncio.get_running_loop()
        incarnation = 1 + sum(1 for e in events(job.folder.journal) if e["event"] == "begin")
        preparers = Preparers(settings.prepare_workers, job.folder.log("prepare"), self.launchers.imports)
        preparation = Preparation(
            job.suite, job.spec, job.folder, preparers, self.table.errors, keep_going=settings.keep_going
        )
        data_there = asyncio.Event()
        standing_by = asyncio.create_task(stand_by(job, self.launchers, settings, data_there))
        checking = asyncio.create_task(check_tasks(job, preparation, data_there))
        finding = loop.run_in_executor(None, self._locate)
        try:
            await self._unless_ended(
                {checking, finding},
                lambda: progress.of_checks(preparation, data_there.is_set(), self.table.errors),
            )
            return await self._evaluate(
                incarnation, checking.result(), finding.result(), preparation, standing_by
            )
        finally:
            self.control.fetches_end.set()
            checking.cancel()
            standing_by.cancel()
            preparers.close()
            await loop.run_in_executor(None, self.launchers.engine.close)  # who stood by for nothing
            _, found = await asyncio.gather(checking, finding, return_exceptions=True)
            if isinstance(found, Located) and found.held is not None:
                found.held.release()

    def _locate(self) -> Located:
        return locate(self.job.spec, cache=self.settings.cache, places=self.settings.places, remote=self.launchers.engine.remote,
                      checkpoint=self.job.checkpoint, halt=self.control.fetches_end)  # fmt: skip

    async def _unless_ended(
        self, doing: set[asyncio.Future[Any]], shown: Callable[[], EvaluationProgress]
    ) -> None:
        """Waits for all of them; raises what the first of them raises, or the end of the run if that comes before."""
        while doing:
            self.control.check()
            self._display.show(shown)
            done, doing = await asyncio.wait(doing, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()

    async def _evaluate(
        self, incarnation: int, checked: Checked, located: Located, preparation: Preparation, standing_by: asyncio.Task[None]
    ) -> Report:  # fmt: skip
        """From the first worker to the report."""
        job, settings, table = self.job, self.settings, self.table
        files = await asyncio.get_running_loop().run_in_executor(None, beside, job.spec)
        key = job.spec.key(located.checkpoint, files)
        job.folder.claim({**job.question(), "checkpoint": located.checkpoint})
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(contextlib.closing(EventLog(job.folder.journal, self.control)))
            run = EvaluationRun(
                job, self.launchers, settings, located, self.control, log, self.observed, table
            )
            log.note("begin", incarnation=incarnation, key=key, checkpoint=located.checkpoint, tasks=len(checked.tasks))  # fmt: skip
            for why in checked.weaknesses:
                log.note("sandbox", why=why)
            table.states.update(
                (t.name, "failed" if t.name in table.errors else "waiting") for t in checked.tasks
            )
            with contextlib.closing(AnswerStore(job.folder.answers(key), incarnation)) as store:
                pool = functools.partial(self.launchers.open_scoring, settings.cpu_workers)
                with contextlib.closing(
                    ScoringQueue(job.folder, key, located.checkpoint, store, pool, self.control.wake)
                ) as scoring:
                    loop = Loop(run, checked, store, scoring, self.links, standing_by)
                    await loop.evaluate(preparation, self._display)
            prepared = [table.prepared[t] for t in table.states if t in table.prepared]
            groups = await preparation.combine(prepared, scoring.scores)
            found = write_report(
                run, scoring.scores, groups, preparation.seconds, loop.expected_s, scoring.checks
            )
            save_estimates(run)
            self._display.show(loop.progress, now=True)
            note_end(run, found)
            return found
