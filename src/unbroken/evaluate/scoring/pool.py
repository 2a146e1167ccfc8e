"""CPU workers that score while GPUs go on.

One process a worker, one CPU a process: never more workers than CPUs, and libraries inside are held to one thread.
A worker that dies or hangs on a sample loses that sample, not the task: the sample is noted as crashed and the job
runs again without it. Tasks whose metric runs generated code are scored in the sandbox (sandbox.py).
"""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ... import atomic
from ...machine import usable_cpus, usable_memory
from .. import codec
from ..contracts import Json, Score, ScoreDone, ScoreJob
from ..registry import get_harness
from .watch import read_watch

ONE_THREAD = dict.fromkeys(
    (
        "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS",
        "RAYON_NUM_THREADS", "POLARS_MAX_THREADS", "ARROW_NUM_THREADS",
    ),
    "1",
) | {"TOKENIZERS_PARALLELISM": "false", "DISABLE_MULTIPROC": "1", "TQDM_DISABLE": "1"}  # fmt: skip


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


def open_pool(workers: int, limits: PoolLimits | None = None) -> Pool:
    """A pool of at most `workers` processes, never more than this machine has CPUs for us."""
    return Pool(max(1, min(workers, usable_cpus())), limits or PoolLimits())


@dataclass
class _Process:
    process: subprocess.Popen[str]
    answers: int
    said: bytes = b""
    jobs: int = 0


@dataclass
class _End:
    """How one attempt at a job ended: an answer, or the death of its process."""

    answer: Json = None
    why: str = ""
    sample: int | None = None


@dataclass
class _Attempt:
    skip: dict[int, str] = field(default_factory=dict)
    lost: int = 0


class Pool:
    """See the module; `contracts.ScoringPool` is what the coordinator knows of it."""

    def __init__(self, workers: int, limits: PoolLimits) -> None:
        self.workers = workers
        self._limits = limits
        self._memory = limits.memory or int(0.6 * usable_memory()) // workers
        self._jobs: queue.Queue[ScoreJob | None] = queue.Queue()
        self._done: queue.Queue[ScoreDone] = queue.Queue()
        self._pending = 0
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def submit(self, job: ScoreJob) -> None:
        """Queues a job; returns at once. Workers start when there is work for them."""
        self._pending += 1
        self._jobs.put(job)
        if len(self._threads) < min(self.workers, self._pending):
            name = f"cpu-{len(self._threads)}"
            thread = threading.Thread(target=self._work, args=(name,), name=f"scoring {name}", daemon=True)
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
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout=10)

    # ------------------------------------------------------------------ one worker's thread

    def _work(self, name: str) -> None:
        running: _Process | None = None
        try:
            while not self._closing.is_set():
                job = self._jobs.get()
                if job is None:
                    return
                started = time.time()
                running, score, error = self._score(job, running)
                if not self._closing.is_set():
                    self._done.put(
                        ScoreDone(job.prepared.task.name, name, started, time.time(), score, error)
                    )
        finally:
            _stop(running)

    def _score(self, job: ScoreJob, running: _Process | None) -> tuple[_Process | None, Score | None, str]:
        tried = _Attempt()
        # A harness that runs generated code in its own process is put into the sandbox whole; others call it.
        harness = get_harness(job.prepared.task.harness)
        sandboxed = job.prepared.task.metric == "code" and getattr(harness, "runs_code_itself", False)
        watched = Path(job.result).with_name(f".{Path(job.result).name}.at")
        try:
            while not self._closing.is_set():
                if sandboxed:
                    end = _in_sandbox(job, tried.skip, self._memory, self._limits)
                else:
                    if running is None or running.process.poll() is not None:
                        _stop(running)
                        running = _start()
                    end = self._ask(running, job, tried.skip, watched)
                    if end.answer is None:
                        _stop(running)
                        running = None
                if end.answer is not None:
                    return running, *_read(job, end.answer)
                if end.sample is None or end.sample in tried.skip:
                    tried.lost += 1
                    if tried.lost > 1:
                        return running, None, f"the scorer {end.why}, twice, outside any sample"
                else:
                    tried.skip[end.sample] = end.why
                if len(tried.skip) > self._limits.crashes:
                    return (
                        running,
                        None,
                        f"the scorer died on {len(tried.skip)} samples; it {end.why} on the last",
                    )
            return running, None, "the pool was closed"
        finally:
            watched.unlink(missing_ok=True)

    def _ask(self, running: _Process, job: ScoreJob, skip: Mapping[int, str], watched: Path) -> _End:
        watched.unlink(missing_ok=True)
        order = {
            "job": codec.encode(job),
            "skip": {str(k): v for k, v in skip.items()},
            "watch": str(watched),
        }
        stdin: IO[str] | None = running.process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(order) + "\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # it is dead; found below
        while not self._closing.is_set():
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


def _read(job: ScoreJob, answer: Json) -> tuple[Score | None, str]:
    if "score" in answer:
        return codec.decode(Score, answer["score"], where=job.result), ""
    return None, str(answer["text"])


def _sample(watched: Path) -> int | None:
    at = read_watch(watched)
    return at[0] if at else None


def _death(code: int) -> str:
    return f"died of signal {-code}" if code < 0 else f"ended its process with code {code}"


def _start() -> _Process:
    """A worker process with a pipe of its own for its answers, in its own process group."""
    answers, theirs = os.pipe()
    os.set_inheritable(theirs, True)
    env = {**os.environ, **ONE_THREAD}
    env["PYTHONPATH"] = os.pathsep.join([p for p in sys.path if p])
    process = subprocess.Popen(
        [sys.executable, "-m", "unbroken.evaluate.scoring.worker", str(theirs)],
        stdin=subprocess.PIPE,
        pass_fds=(theirs,),
        env=env,
        text=True,
        start_new_session=True,
    )
    os.close(theirs)
    return _Process(process, answers)


def _stop(running: _Process | None) -> None:
    """Kills a worker and what it started, and waits for it."""
    if running is None:
        return
    try:
        os.killpg(running.process.pid, 9)
    except ProcessLookupError:
        pass  # gone already
    if running.process.stdin:
        try:
            running.process.stdin.close()
        except BrokenPipeError:
            pass  # what it had not read is lost with it
    running.process.wait()
    os.close(running.answers)


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
        atomic.write_json(Path(job.result), answer["score"])
    return _End(answer, why, sample)
