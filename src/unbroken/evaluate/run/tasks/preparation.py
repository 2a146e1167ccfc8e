"""From the tasks of a suite to prepared ones: groups expanded, data checked before a GPU is taken, prompts built."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ....errors import EvaluationError, UnbrokenError
from ....journal.codec import decode, encode
from ...contracts import ModelSpec, PreparedTask, Score, Suite, Task
from ...preparation.prepare import Preparers, fingerprint, read_prepared, remember
from ...preparation.reads import Stamp
from ...result.folder import EvalDir
from ..settings import Abort

PATIENCE_S = 10.0
"""How long others are waited for once a task cannot run: without a network each of them may take half a minute."""


class Preparation:
    """The tasks of one evaluation on their way in. What cannot run is in `errors`, or ends it all."""

    def __init__(
        self,
        suite: Suite,
        spec: ModelSpec,
        folder: EvalDir,
        preparers: Preparers,
        errors: dict[str, str],
        *,
        keep_going: bool,
    ) -> None:
        self.suite = suite
        self.spec = spec
        self.folder = folder
        self.preparers = preparers
        self.errors = errors
        self.keep_going = keep_going
        self.seconds: dict[str, float] = {}
        """What preparing took, by task; those of an earlier command are not in it."""
        self.looked, self.to_look = 0, 0
        """Tasks whose data have been looked at, of those that have to be."""
        self._marks: dict[str, str] = {}
        self._files: Path | None = None

    async def expand(self) -> list[Task]:
        """The leaf tasks. Raises Abort for an unknown one."""
        asked = [self.preparers.ask("expand", self.suite, task=encode(t)) for t in self.suite.tasks]
        found = await asyncio.gather(*asked, return_exceptions=True)
        self._raise_all(self.suite.tasks, found, self.suite.tasks)
        tasks: dict[str, Task] = {}
        for answer in found:
            for value in answer if not isinstance(answer, BaseException) else ():
                task = decode(Task, value)
                if task.name in tasks:
                    raise Abort(EvaluationError(f"two tasks of the suite are called '{task.name}'", where=self.suite.name,
                                                hint="A group holds it already: take it out of the suite"))  # fmt: skip
                tasks[task.name] = task
        return list(tasks.values())

    async def check(self, tasks: Sequence[Task], model_files: Path | None) -> dict[str, PreparedTask]:
        """Tasks that are prepared already, from an earlier command. Raises Abort if data are missing."""
        self._files = model_files
        own = self.folder.shared.absolute()
        self._marks = {t.name: fingerprint(t, self.suite, self.spec, model_files, own) for t in tasks}
        known: dict[str, PreparedTask] = {}
        seen: dict[str, Stamp] = {}
        for t in tasks:
            before = read_prepared(self.folder, t, self._marks[t.name], seen)
            if before is not None:
                known[t.name] = replace(before, task=replace(before.task, headline=t.headline))
        rest = [t for t in tasks if t.name not in known]
        self.to_look = len(rest)
        found = await self._all([self.preparers.ask("check", self.suite, task=encode(t)) for t in rest])
        self._raise_all(rest, found, tasks)
        # A harness that cannot check has its tasks prepared before a GPU is taken.
        blind = [t for t, ok in zip(rest, found, strict=True) if ok is False]
        made = await self._all([self.prepare(t) for t in blind])
        self._raise_all(blind, made, tasks)
        return known | {p.task.name: p for p in made if isinstance(p, PreparedTask)}

    async def _all(self, jobs: Sequence[Coroutine[Any, Any, object]]) -> list[object]:
        """What each of them gave or raised; None where it was not waited for, since another task cannot run."""
        asked = [asyncio.create_task(job) for job in jobs]
        for one in asked:
            one.add_done_callback(
                lambda t: t.cancelled() or t.exception()
            )  # which nobody may come to ask for
        left: set[asyncio.Task[object]] = set(asked)
        until: float | None = None
        try:
            while left and (until is None or time.monotonic() < until):
                wait = None if until is None else until - time.monotonic()
                done, left = await asyncio.wait(left, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                bad = any(d.exception() for d in done)
                self.looked += sum(1 for d in done if d.exception() or d.result() is not False)
                if until is None and bad and not self.keep_going:
                    until = time.monotonic() + PATIENCE_S
        finally:
            for one in left:
                one.cancel()
        return [None if one in left else one.exception() or one.result() for one in asked]

    async def prepare(self, task: Task) -> PreparedTask:
        """One prepared task. Raises UnbrokenError."""
        began = time.time()
        folder = self.folder.task(task.name).absolute()  # joiners were started elsewhere
        folder.mkdir(parents=True, exist_ok=True)
        value = await self.preparers.ask("prepare", self.suite, task=encode(task), spec=encode(self.spec),
                                         model_files=str(self._files) if self._files else None, folder=str(folder))  # fmt: skip
        prepared = decode(PreparedTask, value["prepared"])
        remember(self.folder, prepared, self._marks[task.name], value["reads"])
        self.seconds[task.name] = time.time() - began
        return prepared

    async def combine(self, prepared: Sequence[PreparedTask], scores: dict[str, Score]) -> list[Score]:
        """Scores of groups from those of their leaves, in the suite's order; a group with a leaf missing is an error."""
        groups: dict[tuple[str, str], list[PreparedTask]] = {}
        for p in prepared:
            if p.task.group:
                groups.setdefault((p.task.harness, p.task.group), []).append(p)
        found = []
        for (_, group), leaves in groups.items():
            if not all(p.task.name in scores for p in leaves):
                self.errors[group] = "some of its tasks have no score"
                continue
            try:
                value = await self.preparers.ask("combine", self.suite, group=group, prepared=[encode(p) for p in leaves],
                                                 scores=[encode(scores[p.task.name]) for p in leaves])  # fmt: skip
            except UnbrokenError as e:
                self.errors[group] = str(e)
                continue
            if value is not None:
                found.append(decode(Score, value))
        return found

    def _raise_all(self, tasks: Sequence[Task], results: Sequence[object], every: Sequence[Task]) -> None:
        """Raises the first error and names the others, or notes them all where we are to go on with the rest of `every`."""
        bad = [(t, r) for t, r in zip(tasks, results, strict=True) if isinstance(r, BaseException)]
        for task, error in bad:
            if not isinstance(error, UnbrokenError):
                raise error
            self.errors[task.name] = str(error)
        if bad and not (self.keep_going and any(t.name not in self.errors for t in every)):
            first = bad[0][1]
            assert isinstance(first, UnbrokenError)  # anything else was raised above
            if len(bad) > 1:
                first.message += (
                    f"; {len(bad) - 1} more tasks cannot run: {', '.join(t.name for t, _ in bad[1:6])}"
                )
            if unseen := sum(1 for r in results if r is None):
                first.message += f"; {unseen} not looked at"
            raise Abort(first)
