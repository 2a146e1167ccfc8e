"""What follows a task's last answer: its exact set is written and handed to scoring, while the GPUs go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from .... import atomic
from ....errors import UnbrokenError
from ....journal.codec import decode
from ...contracts import Check, PreparedTask, Score, ScoreDone, ScoreJob, ScoringPool
from ...preparation import reads_of_score
from ...result.answers import AnswerStore
from ...result.folder import EvalDir, read_json
from ...result.sameness import SUFFIX, Compared, checks, compare_answers, spread
from ...suite.staged import encode_answer, read_answers


class ScoringQueue:
    """Tasks between their last answer and their score. Used on the event loop's thread; files are written in others."""

    def __init__(
        self, folder: EvalDir, key: str, checkpoint: str, store: AnswerStore, open_pool: Callable[[], ScoringPool], wake: Callable[[], None]
    ) -> None:  # fmt: skip
        self.folder = folder
        self.key = key
        self.checkpoint = checkpoint
        self.store = store
        self.scores: dict[str, Score] = {}
        self.failed: dict[str, str] = {}
        self.compared: dict[str, Compared] = {}
        """By task: its fast answers against those in the harness's own batches."""
        self.exact: dict[str, Score] = {}
        """By task: its score with those answers in place of the samples' own."""
        self.unchecked: dict[str, str] = {}
        """Why a task was not compared, or its other score is not there."""
        self._checks: dict[str, tuple[PreparedTask, PreparedTask]] = {}
        """Checks that wait for their task's score, by task."""
        self._headlines: dict[str, str] = {}
        self._open_pool = open_pool
        self._wake = wake
        self._pool: ScoringPool | None = None
        self._writing: set[asyncio.Task[None]] = set()

    def submit(self, prepared: PreparedTask, given_up: dict[int, str]) -> None:
        """Starts it, and returns at once. `given_up`: blocks without answers, and why."""
        job = asyncio.get_running_loop().create_task(self._submit(prepared, given_up))
        self._writing.add(job)
        job.add_done_callback(self._writing.discard)

    def collect(self) -> list[ScoreDone]:
        """Scorings that ended since the last call; their scores, or why there is none, are noted here."""
        done = self._pool.collect() if self._pool is not None else []
        for d in done:
            if d.task.endswith(SUFFIX):
                self._keep_exact(d)
            elif d.score is None:
                self.failed[d.task] = d.error
            else:
                self._keep(d.score)
        return [d for d in done if not d.task.endswith(SUFFIX)]

    def check(self, check: PreparedTask, prepared: PreparedTask, why: str | None = None) -> None:
        """Compares a task with its check, once its score is there; returns at once. `why`: there are no answers to compare."""
        task = prepared.task.name
        if why:
            self.not_checked(task, why)
        elif task in self.scores:
            self._compare(check, prepared)
        else:
            self._checks[task] = check, prepared

    def not_checked(self, task: str, why: str) -> None:
        """This task will not be compared."""
        self.unchecked[task] = why

    @property
    def checks(self) -> tuple[Check, ...]:
        """What the comparisons came to."""
        return checks(list(self.compared.values()), self.scores, self.exact, self.unchecked)

    @property
    def idle(self) -> bool:
        """Nothing is being written or scored."""
        return not self._writing and (self._pool is None or self._pool.pending == 0)

    def close(self) -> None:
        """Ends the scoring workers."""
        if self._pool is not None:
            self._pool.close()

    async def _submit(self, prepared: PreparedTask, given_up: dict[int, str]) -> None:
        try:
            job = await asyncio.get_running_loop().run_in_executor(None, self._write, prepared, given_up)
        except (UnbrokenError, OSError) as e:
            self.failed[prepared.task.name] = str(e)
        else:
            self._headlines[prepared.task.name] = prepared.task.headline
            if isinstance(job, Score):
                self._keep(job)
            else:
                self._hand_over(job)
        self._wake()

    def _compare(self, check: PreparedTask, prepared: PreparedTask) -> None:
        job = asyncio.get_running_loop().create_task(self._submit_check(check, prepared))
        self._writing.add(job)
        job.add_done_callback(self._writing.discard)

    async def _submit_check(self, check: PreparedTask, prepared: PreparedTask) -> None:
        task = prepared.task.name
        try:
            found, job = await asyncio.get_running_loop().run_in_executor(
                None, self._write_check, check, prepared
            )
        except (UnbrokenError, OSError, LookupError, ValueError) as e:
            self.not_checked(task, str(e))
        else:
            self.compared[task] = found
            if isinstance(job, Score):
                self.exact[task] = job.led_by(self._headlines.get(task, ""))
            elif job is not None:
                self._hand_over(job)
        self._wake()

    def _write_check(
        self, check: PreparedTask, prepared: PreparedTask
    ) -> tuple[Compared, ScoreJob | Score | None]:
        """The comparison; where something differs, also what is to be scored to see what that changes. In a thread."""
        target = self.folder.exact_answers(self.key, check.task.name)
        conditions = self.store.merge(check, {}, target)
        ids = spread(prepared.samples, check.samples)
        exact = {i: replace(a, sample=i) for i, a in zip(ids, read_answers(target), strict=True)}
        fast = read_answers(self.folder.exact_answers(self.key, prepared.task.name))
        found = compare_answers(prepared, {i: fast[i] for i in ids}, exact)
        if not found.differ:
            return found, None
        lines = [encode_answer(exact[a.sample] if a.sample in found.ids else a) for a in fast]
        atomic.write_text(target, "".join(line + "\n" for line in lines))
        result = self.folder.score(self.key, check.task.name)
        named = replace(prepared, task=replace(prepared.task, name=check.task.name))
        return found, ScoreJob(named, str(target), str(result), self.checkpoint, conditions)

    def _keep_exact(self, d: ScoreDone) -> None:
        task = d.task.removesuffix(SUFFIX)
        if d.score is None:
            self.not_checked(task, d.error)
            return
        try:
            self.exact[task] = d.score.led_by(self._headlines.get(task, ""))
        except KeyError as e:
            self.not_checked(task, f"no such metric in the other score: {e}")

    def _hand_over(self, job: ScoreJob) -> None:
        """On this thread: a pool is used by one thread only."""
        if self._pool is None:
            self._pool = self._open_pool()
        self._pool.submit(job)

    def _keep(self, score: Score) -> None:
        if (waiting := self._checks.pop(score.task, None)) is not None:
            self._compare(*waiting)
        headline = self._headlines.get(score.task, "")
        try:
            self.scores[score.task] = score.led_by(headline)
        except KeyError as e:
            self.failed[score.task] = (
                f"its headline '{headline}' is none of its metrics: {e.args[0]}. The answers are kept; fix the suite"
            )

    def _write(self, prepared: PreparedTask, given_up: dict[int, str]) -> ScoreJob | Score:
        """Writes the exact set; an earlier command's score of the same answers is returned as it is. In a thread."""
        task = prepared.task.name
        answers = self.folder.exact_answers(self.key, task)
        conditions = self.store.merge(prepared, given_up, answers)
        self.store.sync()
        result = self.folder.score(self.key, task)
        before = self._scored_before(result, prepared) if not given_up else None
        if before is not None:
            return before
        result.parent.mkdir(parents=True, exist_ok=True)
        return ScoreJob(prepared, str(answers), str(result), self.checkpoint, conditions)

    def _scored_before(self, path: Path, prepared: PreparedTask) -> Score | None:
        """A score that is there already, unless samples were left unscored."""
        if not path.exists():
            return None
        try:
            score = decode(Score, read_json(path), where=str(path))
        except UnbrokenError:
            return None  # damaged: the answers are there, and scored again
        same = (score.version, score.prompt_hash, score.checkpoint, score.documents, score.inputs) == (
            prepared.version,
            prepared.prompt_hash,
            self.checkpoint,
            prepared.documents,
            prepared.inputs,
        )
        same = same and reads_of_score.holds(path)
        return score if same and score.scored == score.samples == prepared.samples else None
