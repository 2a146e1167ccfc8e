"""A harness, a model and a scoring pool for tests of evaluations: no torch, no data set, faults on demand.

    harness = "unbroken.testing.evaluation:FakeHarness"      backend = "unbroken.testing.evaluation:TimedBackend"

Options of a task: `samples`, `requests` (per sample), `seconds` (per sample, slept), `score_s`, `missing` (its dataset
is not there), `kill` {sample: file} (the worker that answers this sample kills itself, unless the file exists, which
it then creates; "" kills it every time), `raise` {sample: file} (likewise, raises), `problem` {sample: file}.
Options of a model: `load_s`, `broken`, `fits` (largest batch before OutOfMemory).
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import atomic
from ..errors import DatasetMissing, ModelDoesNotLoad, OutOfMemory, UnknownTask
from ..evaluate.contracts import (
    Answer,
    Conditions,
    Json,
    Metric,
    Model,
    ModelSpec,
    PreparedTask,
    Request,
    Sample,
    SampleNote,
    Score,
    ScoreDone,
    ScoreJob,
    Suite,
    Task,
    digest,
)
from ..evaluate.suite.staged import read_answers, read_block, run_requests, write_samples
from ..journal.codec import encode

HARNESS = "unbroken.testing.evaluation:FakeHarness"
BACKEND = "unbroken.testing.evaluation:TimedBackend"


class FakeHarness:
    """Knows any task whose name does not start with 'unknown'; its accuracy is a function of the answers."""

    def list_tasks(self, suite: Suite) -> Sequence[str]:
        """The suite's own."""
        return [t.harness_name for t in suite.tasks if not t.harness_name.startswith("unknown")]

    def expand(self, task: Task, suite: Suite) -> Sequence[Task]:
        """A task with option `leaves` is a group."""
        if task.harness_name.startswith("unknown"):
            raise UnknownTask(task.harness_name, ["known_task", "other"], where=suite.name)
        leaves = int(task.options.get("leaves", 0))
        if not leaves:
            return [task]
        options = {k: v for k, v in task.options.items() if k != "leaves"}
        return [
            Task(f"{task.name}_{i}", task.harness, group=task.name, options=options) for i in range(leaves)
        ]

    def check(self, task: Task, suite: Suite) -> None:
        """Takes `check_s`, and raises where option `missing` says so."""
        time.sleep(float(task.options.get("check_s", 0.0)))
        if task.options.get("missing"):
            raise DatasetMissing(
                f"the dataset of '{task.name}' is not on this machine", where="/data", hint="Stage it"
            )

    def prepare(
        self, task: Task, suite: Suite, spec: ModelSpec, model_files: Path | None, folder: Path
    ) -> PreparedTask:
        """Prompts that name task, sample and request."""
        n = int(task.options.get("samples", 10)) if task.limit is None else int(task.limit)
        faults: dict[str, dict[str, str]] = {
            f: dict(task.options.get(f, {})) for f in ("kill", "raise", "problem")
        }
        seconds = float(task.options.get("seconds", 0.0))
        rows = []
        for i in range(n):
            what: dict[str, Json] = {"seconds": seconds}
            what |= {name: at[str(i)] for name, at in faults.items() if str(i) in at}
            k = int(task.options.get("requests", 1))
            rows.append([Request("fake", (f"{task.name}/{i}/{j}", what if j == 0 else {})) for j in range(k)])
        staged = write_samples(folder, rows, block=spec.block)
        version = f"fake/{task.options.get('version', 1)}"
        return PreparedTask(
            task, version, n, spec.block, str(folder), staged.prompt_hash, staged.weights, staged.prompt_chars
        )

    def build_requests(self, prepared: PreparedTask, block: int) -> list[Sample]:
        """From the staged file."""
        return read_block(prepared, block)

    def run(self, model: Model, prepared: PreparedTask, samples: Sequence[Sample]) -> list[Answer]:
        """Injects the faults, then answers."""
        answers = run_requests(model, samples)
        out = []
        for s, a in zip(samples, answers, strict=True):
            marker = s.requests[0].arguments[1].get("problem")
            bad = marker is not None and _first_time(marker)
            out.append(Answer(a.sample, a.prompt_hash, (), "the endpoint said 500") if bad else a)
        return out

    def score(self, prepared: PreparedTask, answers: Sequence[Answer]) -> Score:
        """The share of answers whose first digit is even, its standard error, and a checksum over all of them."""
        time.sleep(float(prepared.task.options.get("score_s", 0.0)))
        good = [a for a in answers if not a.problem]
        values = [1.0 - int(str(a.outputs[0])[0], 16) % 2 for a in good]
        mean = statistics.fmean(values) if values else 0.0
        stderr = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
        check = int(digest([[a.sample, list(a.outputs)] for a in good])[:12], 16) / 16**12
        notes = tuple(SampleNote(a.sample, "unanswered", a.problem) for a in answers if a.problem)
        metrics = (Metric("acc", mean, stderr), Metric("checksum", check))
        return Score(
            prepared.task.name,
            metrics,
            prepared.samples,
            len(good),
            notes,
            per_sample=tuple(values) if not notes else (),
        )

    def combine(self, group: str, prepared: Sequence[PreparedTask], scores: Sequence[Score]) -> Score | None:
        """The mean over leaves."""
        mean = statistics.fmean(s.metrics[0].value for s in scores)
        return Score(
            group, (Metric("acc", mean),), sum(s.samples for s in scores), sum(s.scored for s in scores)
        )


class TimedBackend:
    """Answers with the hash of the prompt and the weights."""

    needs_weights = True

    def fingerprint(self, spec: ModelSpec) -> str | None:
        """Hash the files."""
        return None

    def warm(self) -> None:
        """Says so in the worker's log."""
        _line(f"warm {os.getpid()}")

    def warm_devices(self, devices: Sequence[int]) -> None:
        """Says so in the worker's log."""
        _line(f"devices {os.getpid()}")

    def load(self, spec: ModelSpec, folder: Path | None, devices: Sequence[int]) -> TimedModel:
        """Reads the weights, sleeps, or refuses."""
        time.sleep(float(spec.options.get("load_s", 0.0)))
        if spec.options.get("broken") or os.environ.get("UNBROKEN_FAKE_BROKEN"):
            raise ModelDoesNotLoad(
                "the weights have the wrong shape", where=str(folder), hint="Give the right ones"
            )
        weights = (
            b"".join(p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file() and p.name[0] != ".")
            if folder
            else b""
        )
        return TimedModel(
            digest(weights.hex()),
            spec.batch_size,
            int(spec.options.get("fits", 1 << 30)),
            str(spec.options.get("log", "")),
        )


class TimedModel:
    """Sleeps as long as its requests say."""

    def __init__(self, weights: str, batch_size: int, fits: int, log: str) -> None:
        self.weights = weights
        self.asked = self.batch_size = batch_size
        self.fits = fits
        self.log = log
        if log:
            _append(log, "load")

    def respond(self, requests: Sequence[Request]) -> list[Json]:
        """One hash each. Raises OutOfMemory, RuntimeError, or dies, as asked."""
        if self.batch_size > self.fits:
            raise OutOfMemory(f"a batch of {self.batch_size} does not fit")
        for r in requests:
            what: dict[str, Any] = r.arguments[1]
            time.sleep(float(what.get("seconds", 0.0)))
            if "kill" in what and _first_time(what["kill"]):
                os.kill(os.getpid(), signal.SIGKILL)
            if "raise" in what and _first_time(what["raise"]):
                raise RuntimeError("a kernel failed")
        return [digest([self.weights, r.arguments[0]]) for r in requests]

    def halve(self) -> bool:
        """Half the batch."""
        if self.batch_size == 1:
            return False
        self.batch_size //= 2
        return True

    def restore(self) -> None:
        """The whole batch."""
        self.batch_size = self.asked

    @property
    def conditions(self) -> Conditions:
        """As asked."""
        return Conditions("fake 1", "cpu", "float32", self.batch_size, "none")

    def close(self) -> None:
        """Nothing to free."""


class ThreadScoring:
    """Scores in threads of this process, with the task's own harness."""

    def __init__(self, workers: int) -> None:
        self._done: list[ScoreDone] = []
        self._pending = 0
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(workers)

    def submit(self, job: ScoreJob) -> None:
        """Starts a thread."""
        with self._lock:
            self._pending += 1
        threading.Thread(target=self._score, args=(job,), daemon=True).start()

    def _score(self, job: ScoreJob) -> None:
        from dataclasses import replace

        from ..evaluate.suite.registry import get_harness

        with self._slots:
            began = time.time()
            try:
                score = get_harness(job.prepared.task.harness).score(
                    job.prepared, read_answers(Path(job.answers))
                )
                score = replace(
                    score,
                    version=job.prepared.version,
                    checkpoint=job.checkpoint,
                    prompt_hash=job.prepared.prompt_hash,
                    conditions=job.conditions,
                    documents=job.prepared.documents,
                    inputs=job.prepared.inputs,
                )
                atomic.write_json(Path(job.result), encode(score))
                done = ScoreDone(job.prepared.task.name, "cpu0", began, time.time(), score)
            except Exception as e:  # noqa: BLE001  a scorer may raise anything; the pool reports it
                done = ScoreDone(
                    job.prepared.task.name, "cpu0", began, time.time(), None, f"{type(e).__name__}: {e}"
                )
        with self._lock:
            self._done.append(done)

    def collect(self) -> list[ScoreDone]:
        """What has ended."""
        with self._lock:
            done, self._done = self._done, []
            self._pending -= len(done)
        return done

    @property
    def pending(self) -> int:
        """Not yet collected."""
        return self._pending

    def close(self) -> None:
        """Threads end by themselves."""


def fake_model(folder: Path, content: bytes = b"weights") -> Path:
    """A folder that passes for a model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text("{}")
    return folder


def _line(words: str) -> None:
    """In one write: two threads may say something at once."""
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def _first_time(marker: str) -> bool:
    """Whether a fault is due: always without a marker file, else once."""
    if not marker:
        return True
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _append(path: str, text: str) -> None:
    with open(path, "a") as f:
        f.write(f"{text} {os.getpid()}\n")
