"""CPU workers that score while GPUs go on.

One process a worker, one CPU a process: never more workers than CPUs, and libraries inside are held to one thread.
A task whose first samples show that it will take long is shared out to all workers, where its harness can score samples
apart: a long metric would else be all that everybody waits for at the end. A worker that dies or hangs on a sample
loses that sample, not the task: the sample is noted as crashed and its part runs again without it. Tasks whose metric runs generated code are scored in the sandbox (sandbox.py).
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import select
import shutil
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ... import atomic
from ...errors import MissingExtra
from ...journal import codec
from ...machine import usable_cpus, usable_memory
from ...units import plural
from ..contracts import Json, Score, ScoreDone, ScoreJob, Task
from ..processes.imports import Imports, Process, end_piped, start_piped
from ..result.folder import unwritable
from ..suite.registry import get_harness, in_parts
from .watch import read_watch

ONE_THREAD = dict.fromkeys(
    (
        "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS",
        "RAYON_NUM_THREADS", "POLARS_MAX_THREADS", "ARROW_NUM_THREADS",
    ),
    "1",
) | {"TOKENIZERS_PARALLELISM": "false", "DISABLE_MULTIPROC": "1", "TQDM_DISABLE": "1"}  # fmt: skip


FIRST_S = 2.0
"""So long a task is scored by one worker before it is shared out."""
PART_S = 1.0
"""No part is made that would take less."""


@dataclass(frozen=True)
class PoolLimits:
    """What a scorer may take before its sample counts as crashed."""

    sample_s: float = 120.0
    """Wall time of one sample, where the harness says which one it is at; ten times as much for code and judges."""
    memory: int = 0
    """Resident bytes of a worker and its children; 0: 60 % of the machine's memory, shared by the workers."""
    start_s: float = 60.0
    """Wall time in which a harness must have loaded in the sandbox, and may aggregate at the end."""
    crashes: int = 20
    """So many samples may take the scorer down before the task is given up."""


def open_pool(workers: int, limits: PoolLimits | None = None, imports: Imports | None = None) -> Pool:
    """A pool of at most `workers` processes, never more than this machine has CPUs for us.

    `imports`: a fork server that has the harnesses, which may outlive the pool.
    """
    return Pool(max(1, min(workers, usable_cpus())), limits or PoolLimits(), imports)


@dataclass
class _Process:
    process: Process
    answers: int
    """The descriptor that its answers come from."""
    said: bytes = b""
    jobs: int = 0


@dataclass
class _End:
    """How one attempt at an order ended: an answer, or the death of its process."""

    answer: Json = None
    why: str = ""
    sample: int | None = None


@dataclass
class _Task:
    """A job, and how far it is."""

    job: ScoreJob
    parts: Path
    """Where the verdicts on its parts are collected."""
    left: int = 1
    """Parts that are not done."""
    skip: dict[int, str] = field(default_factory=dict)
    """Samples that took the scorer down, and how."""
    bars: list[tuple[str, float, float]] = field(default_factory=list)
    error: str = ""
    reported: bool = False
    guard: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class _Part:
    """Samples [start, stop) of a task; without `stop` as many as there is time for, to see how long they take."""

    task: _Task
    start: int = 0
    stop: int | None = None


class Pool:
    """See the module; `contracts.ScoringPool` is what the coordinator knows of it."""

    def __init__(self, workers: int, limits: PoolLimits, imports: Imports | None = None) -> None:
        self.workers = workers
        self._imports = imports
        self._limits = limits
        self._memory = limits.memory or int(0.6 * usable_memory()) // workers
        self._parts: queue.Queue[_Part | None] = queue.Queue()
        self._open = 0
        """Parts that wait or are being scored."""
        self._guard = threading.Lock()
        self._done: queue.Queue[ScoreDone] = queue.Queue()
        self._pending = 0
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def submit(self, job: ScoreJob) -> None:
        """Queues a job; returns at once. Workers start when there is work for them."""
        self._pending += 1
        result = Path(job.result)
        parts = result.with_name(f".{result.name}.parts")
        shutil.rmtree(parts, ignore_errors=True)  # of a pool that was killed: nobody knows of which answers
        self._put([_Part(_Task(job, parts))])

    def _put(self, parts: Sequence[_Part]) -> None:
        with self._guard:
            self._open += len(parts)
            for part in parts:
                self._parts.put(part)
            while len(self._threads) < min(self.workers, self._open) and not self._closing.is_set():
                name = f"cpu-{len(self._threads)}"
                thread = threading.Thread(
                    target=self._work, args=(name,), name=f"scoring {name}", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def collect(self) -> list[ScoreDone]:
        """What has ended since the last call."""
        out = []
        while True:
            try:
                out.append(self._done.get_nowait())
            except queue.Empty:
                self._pending -= len(out)
                return out

    @property
    def pending(self) -> int:
        """Jobs submitted and not yet collected."""
        return self._pending

    def close(self) -> None:
        """Ends the workers and their children; jobs not yet done are dropped."""
        self._closing.set()
        with self._guard:
            threads = list(self._threads)
        for _ in threads:
            self._parts.put(None)
        for thread in threads:
            thread.join(timeout=10)

    # ------------------------------------------------------------------ one worker's thread

    def _work(self, name: str) -> None:
        running: _Process | None = None
        try:
            while not self._closing.is_set():
                part = self._parts.get()
                if part is None:
                    return
                started = time.time()
                try:
                    running = self._score(part, name, started, running)
                except Exception as e:  # noqa: BLE001  no processes, no disk, ours: whoever waits must hear of it
                    self._tell(
                        part.task, name, started, None, f"it could not be scored: {type(e).__name__}: {e}"
                    )
                with self._guard:
                    self._open -= 1
        finally:
            _stop(running)

    def _score(self, part: _Part, name: str, started: float, running: _Process | None) -> _Process | None:
        """Scores a part; shares out what is left of the task, or ends it where this was the last one."""
        task, job = part.task, part.task.job
        order: dict[str, Json] = {}
        # One process keeps to a judge's rate.
        if not (_sandboxed(job) or job.prepared.task.metric == "judge"):
            order = {
                "part": [part.start, part.stop or job.prepared.samples],
                "for_s": FIRST_S if part.stop is None else None,
                "parts": str(task.parts),
            }
        answer: Json = None
        if not task.error:  # of another part: then there will be no score
            running, answer = self._try(task, order, running)
        rest: list[_Part] = []
        with task.guard:
            task.left -= 1
            if not task.error and part.stop is None and "upto" in answer:
                rest = [_Part(task, a, b) for a, b in self._shares(job.prepared.samples, answer)]
                task.left = len(rest)
            last = task.left == 0
            if not last:
                task.bars.append((name, started, time.time()))
        if rest:
            self._put(rest)
        if last:
            if not task.error and "score" not in answer:
                running, answer = self._try(task, {"parts": str(task.parts)}, running)
            score = None if task.error else codec.decode(Score, answer["score"], where=job.result)
            self._tell(task, name, started, score, task.error)
        return running

    def _tell(self, task: _Task, name: str, started: float, score: Score | None, error: str) -> None:
        """The end of a task, told once."""
        ended = time.time()
        shutil.rmtree(task.parts, ignore_errors=True)
        with task.guard:
            if task.reported:
                return
            task.reported, task.error = True, error
            bars = sorted([*task.bars, (name, started, ended)], key=lambda bar: bar[1])
        if not self._closing.is_set():
            first = bars[0]
            parts = tuple(bars) if len(bars) > 1 else ()
            self._done.put(
                ScoreDone(task.job.prepared.task.name, first[0], first[1], ended, score, error, parts)
            )

    def _shares(self, samples: int, first: Json) -> list[tuple[int, int]]:
        """What is left after the first part, cut for all workers; no finer than is worth its start."""
        upto = int(first["upto"])
        left_s = float(first["seconds"]) / upto * (samples - upto)
        worth = max(PART_S, 2 * float(first["start_s"]))
        count = max(1, min(2 * self.workers, int(left_s / worth), samples - upto))
        cuts = [upto + (samples - upto) * i // count for i in range(count + 1)]
        return list(itertools.pairwise(cuts))

    def _try(
        self, task: _Task, order: Mapping[str, Json], running: _Process | None
    ) -> tuple[_Process | None, Json]:
        """What a scorer answers to an order; it starts again without the samples that took it down. An error is noted
        in the task, and the answer is None."""
        job, lost = task.job, 0
        at = order["part"][0] if "part" in order else "all"
        watched = task.parts.with_name(f"{task.parts.name.removesuffix('.parts')}.{at}.at")
        try:
            while not (self._closing.is_set() or task.error):
                with task.guard:
                    skip = dict(task.skip)
                if _sandboxed(job):
                    end = _in_sandbox(job, skip, self._memory, self._limits)
                else:
                    if running is None or running.process.poll() is not None:
                        _stop(running)
                        running = _start(self._imports)
                    end = self._ask(
                        running, task, {**order, "skip": {str(k): v for k, v in skip.items()}}, watched
                    )
                    if end.answer is None:
                        _stop(running)
                        running = None
                if end.answer is not None and "text" not in end.answer:
                    return running, end.answer
                if end.answer is not None:
                    why = str(end.answer["text"])
                    break
                if end.sample is None or end.sample in skip:
                    lost += 1
                    if lost < 2:
                        continue
                    why = f"the scorer {end.why}, twice, outside any sample"
                    break
                with task.guard:
                    task.skip[end.sample] = end.why
                    deaths = len(task.skip)
                if deaths > self._limits.crashes:
                    why = f"the scorer died on {plural(deaths, 'sample')}; it {end.why} on the last"
                    break
            else:
                why = "the pool was closed"
            with task.guard:
                task.error = task.error or why
            return running, None
        finally:
            watched.unlink(missing_ok=True)

    def _ask(self, running: _Process, task: _Task, order: Mapping[str, Json], watched: Path) -> _End:
        job = task.job
        watched.unlink(missing_ok=True)
        order = {**order, "job": codec.encode(job), "watch": str(watched)}
        stdin = running.process.stdin
        assert stdin is not None
        try:
            stdin.write((json.dumps(order) + "\n").encode())
            stdin.flush()
        except BrokenPipeError:
            pass  # it is dead; found below
        while not (self._closing.is_set() or task.error):
            ready, _, _ = select.select([running.answers], [], [], 0.2)
            if ready:
                piece = os.read(running.answers, 1 << 16)
                if not piece:
                    return _End(why=_death(running.process.wait()), sample=_sample(watched))
                running.said += piece
                if running.said.endswith(b"\n"):
                    line, running.said = running.said, b""
                    return _End(answer=json.loads(line))
                continue
            at = read_watch(watched)
            # Twenty programs with limits of their own, or a judge that is asked six times, are not stuck.
            patience = self._limits.sample_s * (10 if job.prepared.task.metric in ("code", "judge") else 1)
            if at is not None and at[1] > patience:
                return _End(why=f"took longer than {patience:g} s", sample=at[0])
            if _resident(running.process.pid) > self._memory:
                return _End(
                    why=f"took more than {self._memory / 2**30:.1f} GiB of memory", sample=_sample(watched)
                )
        return _End(why="was stopped")


def count_parts(task: Task, score_s: float, workers: int) -> int:
    """By how many workers at once a metric of so many seconds is going to be scored."""
    if score_s <= FIRST_S or task.metric == "judge":
        return 1
    try:
        shared = not _runs_programs(task) and in_parts(get_harness(task.harness)) is not None
    except MissingExtra:
        return 1
    return max(1, min(workers, int(score_s / PART_S))) if shared else 1


def _sandboxed(job: ScoreJob) -> bool:
    """Whether the whole job is put into the sandbox: where the harness runs generated code in its own process."""
    return _runs_programs(job.prepared.task)


def _runs_programs(task: Task) -> bool:
    return task.metric == "code" and bool(getattr(get_harness(task.harness), "runs_code_itself", False))


def _sample(watched: Path) -> int | None:
    at = read_watch(watched)
    return at[0] if at else None


def _death(code: int) -> str:
    return f"died of signal {-code}" if code < 0 else f"ended its process with code {code}"


def _start(imports: Imports | None = None) -> _Process:
    """A worker process in its own session; its answers come from its output."""
    env = {**os.environ, **ONE_THREAD}
    env["PYTHONPATH"] = os.pathsep.join([p for p in sys.path if p])
    process = start_piped(imports, ["unbroken.evaluate.scoring.worker"], env, None)
    assert process.stdout is not None
    return _Process(process, process.stdout.fileno())


def _stop(running: _Process | None) -> None:
    """Kills a worker and what it started, and waits for it; again does nothing."""
    if running is not None:
        end_piped(running.process)


def _resident(pid: int) -> int:
    """Resident bytes of a process and its descendants."""
    import psutil

    total = 0
    try:
        root = psutil.Process(pid)
        for p in [root, *root.children(recursive=True)]:
            try:
                total += p.memory_info().rss
            except psutil.NoSuchProcess:
                continue
    except psutil.NoSuchProcess:
        return 0
    return total


def _in_sandbox(job: ScoreJob, skip: Mapping[int, str], memory: int, limits: PoolLimits) -> _End:
    """The job in a sandbox of its own; the score comes back on its stdout and is written here."""
    from .sandboxed import score_in_sandbox

    answer, why, sample = score_in_sandbox(job, skip, memory, limits.sample_s, limits.start_s)
    if answer is not None and "score" in answer:
        try:
            atomic.write_json(Path(job.result), answer["score"])
        except OSError as e:
            return _End({"text": str(unwritable(e, Path(job.result)))})
    return _End(answer, why, sample)
