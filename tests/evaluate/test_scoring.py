"""CPU workers: scores as soon as answers are there, and a scorer that dies or hangs costs one sample."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.evaluate.test_plain import RIGHT, SUMS, run, write_task
from unbroken.errors import EvaluationError
from unbroken.evaluate.contracts import (
    Answer,
    Conditions,
    ModelSpec,
    PreparedTask,
    Score,
    ScoreDone,
    ScoreJob,
    Suite,
    Task,
)
from unbroken.evaluate.harness.plain import PlainHarness
from unbroken.evaluate.scoring import pool as pool_module
from unbroken.evaluate.scoring import sandboxed
from unbroken.evaluate.scoring.pool import ONE_THREAD, Pool, PoolLimits, open_pool
from unbroken.evaluate.scoring.sandbox import sandbox_kind
from unbroken.evaluate.scoring.worker import check_answers, score_job, serve
from unbroken.evaluate.suite import staged
from unbroken.evaluate.suite.registry import get_harness, in_parts
from unbroken.journal import codec
from unbroken.machine import usable_cpus
from unbroken.testing.evaluation import HARNESS, FakeHarness

FAKE = Conditions("fake 1", "cpu", "auto", 8)


@pytest.fixture
def pools() -> Iterator[Callable[..., Pool]]:
    made: list[Pool] = []

    def make(workers: int = 1, **limits: float) -> Pool:
        made.append(Pool(workers, PoolLimits(**limits)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def job_of(folder: Path, score: str = RIGHT, infer: str = SUMS, rows: int = 10) -> ScoreJob:
    """A job whose answers are on disk."""
    prepared, answers, _ = run(write_task(folder, infer, RIGHT, rows), folder / "prepared")
    (folder / "sums" / "score.py").write_text(score)
    (folder / "answers.jsonl").write_text("".join(staged.encode_answer(a) + "\n" for a in answers))
    return ScoreJob(prepared, str(folder / "answers.jsonl"), str(folder / "score.json"), "c0ffee", (FAKE,))


def wait(pool: Pool, jobs: int, within: float = 60.0) -> list[ScoreDone]:
    done: list[ScoreDone] = []
    deadline = time.monotonic() + within
    while len(done) < jobs:
        assert time.monotonic() < deadline, "no score in time"
        done += pool.collect()
        time.sleep(0.02)
    assert pool.pending == 0
    return done


def test_a_score_is_written_and_told(tmp_path: Path, pools: Callable[..., Pool]) -> None:
    job = job_of(tmp_path)
    pool = pools()
    before = time.time()
    pool.submit(job)
    assert pool.pending == 1
    (done,) = wait(pool, 1)
    assert done.error == ""
    assert done.score is not None
    assert (done.score.checkpoint, done.score.conditions) == ("c0ffee", (FAKE,))
    assert done.score == codec.decode(Score, json.loads(Path(job.result).read_text()))
    assert before <= done.started <= done.ended <= time.time()
    assert done.worker == "cpu-0"
    assert not list(tmp_path.glob(".*.at"))


def test_a_sample_that_kills_the_scorer_is_reported_and_the_rest_is_scored(
    tmp_path: Path, pools: Callable[..., Pool]
) -> None:
    deadly = (
        "import os, time\n"
        "def score(row, output):\n"
        "    if row['a'] == 3: os.kill(os.getpid(), 11)\n"
        "    if row['a'] == 5: time.sleep(600)\n"
        "    if row['a'] == 7: os._exit(0)\n"
        "    return 1.0\n"
    )
    pool = pools(sample_s=1.0)
    pool.submit(job_of(tmp_path, deadly))
    (done,) = wait(pool, 1)
    assert done.score is not None, done.error
    assert [(n.sample, n.status, n.why) for n in done.score.notes] == [
        (3, "crashed", "died of signal 11"),
        (5, "crashed", "took longer than 1 s"),
        (7, "crashed", "ended its process with code 0"),
    ]
    assert (done.score.scored, done.score.metrics[0].value) == (7, 1.0)


def test_a_scorer_that_eats_memory_costs_its_sample(tmp_path: Path, pools: Callable[..., Pool]) -> None:
    greedy = (
        "import time\ndef score(row, output):\n    if row['a'] == 2:\n        x = bytearray(700 << 20)\n"
        "        time.sleep(60)\n    return 1.0\n"
    )
    pool = pools(memory=400 << 20)
    pool.submit(job_of(tmp_path, greedy))
    (done,) = wait(pool, 1)
    assert done.score is not None, done.error
    assert [(n.sample, n.status) for n in done.score.notes] == [(2, "crashed")]
    assert "memory" in done.score.notes[0].why


def test_a_scorer_that_always_dies_is_given_up(tmp_path: Path, pools: Callable[..., Pool]) -> None:
    pool = pools(crashes=2)
    pool.submit(job_of(tmp_path, "import os\ndef score(row, output):\n    os.abort()\n"))
    pool.submit(job_of(tmp_path / "next"))
    first, second = wait(pool, 2)
    assert first.score is None
    assert "died on 3 samples" in first.error
    assert "signal 6" in first.error
    assert second.score is not None, "the worker goes on with the next job"


def test_what_a_scorer_as_a_whole_does_wrong_is_an_error_of_its_task(
    tmp_path: Path, pools: Callable[..., Pool]
) -> None:
    pool = pools()
    pool.submit(job_of(tmp_path, "def score(row, output):\n    return 1\nx = 1/0\n"))
    (done,) = wait(pool, 1)
    assert done.score is None
    assert "ZeroDivisionError" in done.error
    assert "score.py" in done.error


def test_a_scorer_may_print_what_it_likes(tmp_path: Path, pools: Callable[..., Pool]) -> None:
    pool = pools()
    noisy = "import os\ndef score(row, output):\n    print('{\"score\": 1}'); os.write(1, b'x' * 9000)\n    return 1\n"
    pool.submit(job_of(tmp_path, noisy))
    (done,) = wait(pool, 1)
    assert done.score is not None, done.error


def test_workers_are_processes_of_one_thread_and_never_more_than_cpus(
    tmp_path: Path, pools: Callable[..., Pool]
) -> None:
    assert open_pool(10_000).workers == usable_cpus()
    says = "import os\ndef score(row, output):\n    return {k: float(os.environ[k] == '1') for k in ('OMP_NUM_THREADS', 'DISABLE_MULTIPROC')} | {'pid': os.getpid()}\n"
    pool = pools(2)
    for i in range(2):
        pool.submit(job_of(tmp_path / str(i), says))
    scores = [d.score for d in wait(pool, 2)]
    assert all(s is not None for s in scores)
    values = [{m.name: m.value for m in s.metrics} for s in scores if s]
    assert [v["OMP_NUM_THREADS"] + v["DISABLE_MULTIPROC"] for v in values] == [2.0, 2.0]
    assert "OPENBLAS_NUM_THREADS" in ONE_THREAD
    assert os.getpid() not in {int(v["pid"]) for v in values}


def test_closing_ends_workers_in_the_middle(tmp_path: Path, pools: Callable[..., Pool]) -> None:
    pid_file = tmp_path / "pid"
    pool = pools()
    sleepy = f"import os,time\ndef score(row, output):\n    open({str(pid_file)!r},'w').write(str(os.getpid()))\n    time.sleep(600)\n"
    pool.submit(job_of(tmp_path, sleepy))
    deadline = time.monotonic() + 30
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_workers_die_with_a_pool_that_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    sleepy = f"import os,time\ndef score(row, output):\n    open({str(pid_file)!r},'w').write(str(os.getpid()))\n    time.sleep(600)\n"
    job = job_of(tmp_path, sleepy)
    (tmp_path / "job.json").write_text(json.dumps(codec.encode(job)))
    program = (
        "import json, time\nfrom unbroken.journal import codec\nfrom unbroken.evaluate.contracts import ScoreJob\n"
        "from unbroken.evaluate.scoring.pool import open_pool\npool = open_pool(1)\n"
        f"pool.submit(codec.decode(ScoreJob, json.load(open({str(tmp_path / 'job.json')!r}))))\ntime.sleep(600)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    deadline = time.monotonic() + 30
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 10
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(int(pid_file.read_text()), 0)
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda a: a[:-1], r"missing \[9\]"),
        (lambda a: [*a, a[3]], r"more than once \[3\]"),
        (lambda a: [*a, replace(a[3], sample=10)], r"unknown \[10\]"),
        (lambda a: a[::-1], "out of order"),
        (lambda a: [replace(a[0], prompt_hash="0"), *a[1:]], "answered for another prompt"),
    ],
)
def test_every_sample_is_scored_exactly_once_or_not_at_all(
    tmp_path: Path, change: Callable[[list[Answer]], list[Answer]], says: str
) -> None:
    job = job_of(tmp_path)
    answers = staged.read_answers(Path(job.answers))
    assert check_answers(job.prepared, list(answers), where="x") == answers
    with pytest.raises(EvaluationError, match=says):
        check_answers(job.prepared, change(list(answers)), where="x")


SLOW = "import time\ndef score(row, output):\n    time.sleep(0.05)\n    return {'right': float(row['a'] % 3), 'odd': 0.1 * row['a']}\n"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task counts as long after a fifth of a second."""
    monkeypatch.setattr(pool_module, "FIRST_S", 0.2)
    monkeypatch.setattr(pool_module, "PART_S", 0.2)
    # Starting a process on a busy machine takes longer than these few rows are worth.
    monkeypatch.setattr(
        Pool,
        "_shares",
        lambda self, n, first, shares=Pool._shares: shares(self, n, {**first, "start_s": 0.0}),
    )


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
def test_a_long_metric_is_shared_out_to_the_workers(tmp_path: Path, pools: Callable[..., Pool]) -> None:
    job = job_of(tmp_path, SLOW, rows=60)
    alone = score_job(job, get_harness("plain"), {})
    pool = pools(3)
    pool.submit(job)
    pool.submit(job_of(tmp_path / "next"))
    done = {d.score.metrics[0].name: d for d in wait(pool, 2) if d.score is not None}
    shared = done["right"]
    assert shared.score is not None
    assert replace(shared.score, seconds=0.0) == replace(alone, seconds=0.0)
    assert shared.score == codec.decode(Score, json.loads(Path(job.result).read_text()))
    # On a busy machine one of the three may come when the others have done it.
    assert len({worker for worker, _, _ in shared.parts}) > 1
    assert shared.seconds == pytest.approx(sum(b - a for _, a, b in shared.parts))
    assert shared.score.seconds >= 60 * 0.05
    # At the same time, which one worker alone could not have done.
    overlapping = [p for p in shared.parts for q in shared.parts if q != p and q[1] <= p[1] < q[2]]
    assert overlapping
    assert not list(tmp_path.glob(".*"))
    assert done["score"].parts == ()


@pytest.mark.usefixtures("hasty")
def test_samples_that_kill_the_scorer_are_reported_from_every_part(
    tmp_path: Path, pools: Callable[..., Pool]
) -> None:
    deadly = (
        "import os, time\ndef score(row, output):\n    time.sleep(0.05)\n"
        "    if row['a'] in (1, 20, 21, 39): os.kill(os.getpid(), 11)\n    return row['a']\n"
    )
    pool = pools(2)
    pool.submit(job_of(tmp_path, deadly, rows=40))
    (done,) = wait(pool, 1)
    assert done.score is not None, done.error
    assert [(n.sample, n.status, n.why) for n in done.score.notes] == [
        (i, "crashed", "died of signal 11") for i in (1, 20, 21, 39)
    ]
    assert done.score.scored == 36
    assert done.score.per_sample[2:4] == (2.0, 3.0)


@pytest.mark.usefixtures("hasty")
@pytest.mark.slow
def test_a_part_that_fails_fails_the_task_once(tmp_path: Path, pools: Callable[..., Pool]) -> None:
    broken = "import os, time\ndef score(row, output):\n    time.sleep(0.05)\n    if row['a'] > 20: os.abort()\n    return 1\n"
    pool = pools(2, crashes=3)
    pool.submit(job_of(tmp_path, broken, rows=60))
    pool.submit(job_of(tmp_path / "next"))
    done = wait(pool, 2)
    assert sorted(d.score is None for d in done) == [False, True]
    assert "the scorer died on" in next(d.error for d in done if d.score is None)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("said", ["APART = False\n", "THREADS = 2\n"])
def test_rows_that_belong_together_are_scored_by_one_worker(
    tmp_path: Path, pools: Callable[..., Pool], said: str
) -> None:
    counting = "import os\nseen = []\ndef score(row, output):\n    seen.append(1)\n    time.sleep(0.02)\n    return os.getpid()\n"
    pool = pools(2)
    pool.submit(job_of(tmp_path, said + "import time\n" + counting, rows=40))
    (done,) = wait(pool, 1)
    assert done.score is not None, done.error
    assert len(set(done.score.per_sample)) == 1
    assert done.parts == ()


@pytest.mark.slow
def test_verdicts_that_are_missing_are_never_made_up_for(tmp_path: Path) -> None:
    job = job_of(tmp_path, rows=10)
    order = {"job": codec.encode(job), "parts": str(tmp_path / "parts")}
    harnesses: dict[str, Any] = {}
    assert serve({**order, "part": [0, 4]}, harnesses)["upto"] == 4
    assert serve({**order, "part": [5, 10]}, harnesses)["upto"] == 10
    assert "not one for each" in serve(order, harnesses)["text"]
    assert not Path(job.result).exists()
    assert serve({**order, "part": [4, 5]}, harnesses)["upto"] == 5
    assert serve(order, harnesses)["score"]["samples"] == 10


def test_parts_are_cut_for_all_workers_and_are_worth_their_start(pools: Callable[..., Pool]) -> None:
    pool = pools(4)
    first = {"upto": 100, "seconds": 2.0, "start_s": 0.1}
    assert pool._shares(1000, first) == [(100 + 900 * i // 8, 100 + 900 * (i + 1) // 8) for i in range(8)]
    assert len(pool._shares(1000, {**first, "start_s": 5.0})) == 1  # ten seconds each for eighteen of work
    assert len(pool._shares(250, first)) == 3
    assert pool._shares(101, first) == [(100, 101)]
    assert pool._shares(3, {"upto": 1, "seconds": 60.0, "start_s": 0.0}) == [(1, 2), (2, 3)]


@pytest.mark.parametrize("full", [pytest.param("score.json", marks=pytest.mark.slow), "the watch"])
def test_a_full_disk_is_not_the_scorers_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], full: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    job = job_of(tmp_path)
    with monkeypatch.context() as m:
        m.setattr(*((os, "replace", refuse) if full == "score.json" else (os, "pwrite", refuse)))
        said = serve({"job": codec.encode(job), "watch": str(tmp_path / ".watched")}, {})
    assert said["error"]["kind"] == "EvaluationError"
    assert "cannot be written: No space left" in said["text"] and "the same command" in said["text"]
    assert "Traceback" not in capfd.readouterr().err
    assert "score" in serve({"job": codec.encode(job), "watch": str(tmp_path / ".watched")}, {})


def test_where_no_process_can_be_started_nobody_waits(
    tmp_path: Path, pools: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("Resource temporarily unavailable")

    pool = pools()
    with monkeypatch.context() as m:
        m.setattr(pool_module, "_start", refuse)
        pool.submit(job_of(tmp_path))
        (done,) = wait(pool, 1)
    assert done.score is None
    assert "temporarily unavailable" in done.error
    pool.submit(job_of(tmp_path / "next"))
    assert wait(pool, 1)[0].score is not None


@pytest.mark.slow
def test_what_a_scorer_leaves_in_its_module_is_there_for_its_aggregate(
    tmp_path: Path, pools: Callable[..., Pool]
) -> None:
    """In a short task, and in a long one, which is then not shared out."""
    corpus = (
        "import time\nHELD = []\ndef score(row, output):\n    HELD.append(row['a'])\n    time.sleep(PAUSE)\n    return 1\n"
        "def aggregate(values):\n    return {'corpus': float(len(HELD))}\n"
    )
    pool = pools(2)
    pool.submit(job_of(tmp_path / "short", corpus.replace("PAUSE", "0")))
    pool.submit(job_of(tmp_path / "long", corpus.replace("PAUSE", "0.3")))
    assert [d.score and d.score.metrics[0].value for d in wait(pool, 2)] == [10.0, 10.0]


def test_a_harness_that_changes_the_score_alone_is_asked_for_the_whole() -> None:
    class Mine(PlainHarness):
        def score(self, prepared: PreparedTask, answers: Sequence[Answer]) -> Score:
            return super().score(prepared, answers)

    class Named(PlainHarness):
        def list_tasks(self, suite: Suite) -> Sequence[str]:
            return ["mine"]

    assert in_parts(Mine()) is None
    assert in_parts(Named()) is not None


@pytest.mark.slow
def test_a_first_row_that_loads_something_is_not_taken_for_the_pace(tmp_path: Path) -> None:
    loads = "import time\nheld = []\ndef score(row, output):\n    if not held:\n        held.append(time.sleep(0.5))\n    return 1\n"
    job = job_of(tmp_path, loads, rows=40)
    order = {"job": codec.encode(job), "parts": str(tmp_path / "parts"), "part": [0, 20]}
    said = serve(order, {})
    assert said["seconds"] < 0.2
    assert said["start_s"] > 0.5


def test_a_task_that_is_given_up_does_not_wait_for_its_other_parts(
    tmp_path: Path, pools: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "FIRST_S", 0.01)
    monkeypatch.setattr(Pool, "_shares", lambda self, n, first: [(int(first["upto"]), 20), (20, n)])
    odd = "import os, time\ndef score(row, output):\n    time.sleep(0.02)\n    if row['a'] > 38: os.abort()\n    if 2 < row['a'] < 20: time.sleep(60)\n    return 1\n"
    pool = pools(2, crashes=0)
    pool.submit(job_of(tmp_path, odd, rows=40))
    (done,) = wait(pool, 1, within=40)
    assert done.score is None
    assert "died on 1 sample" in done.error


@pytest.mark.skipif(sandbox_kind().startswith("none"), reason="no sandbox works on this machine")
def test_a_job_that_runs_programs_is_scored_in_the_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pools: Callable[..., Pool]
) -> None:
    """With the fakes, which import nothing large; lm_eval's own code metrics are tried in test_lm_eval.py."""
    monkeypatch.setattr(FakeHarness, "runs_code_itself", True, raising=False)
    folder = tmp_path / "prepared"
    folder.mkdir()
    task = Task("t", HARNESS, metric="code")
    prepared = FakeHarness().prepare(task, Suite("s", (task,)), ModelSpec("m", block=4), None, folder)
    samples = [s for b in range(prepared.blocks) for s in staged.read_block(prepared, b)]
    answers = [Answer(s.id, s.prompt_hash, (f"{s.id:x}",)) for s in samples]
    (tmp_path / "answers.jsonl").write_text("".join(staged.encode_answer(a) + "\n" for a in answers))
    prepared = replace(prepared, version="", prompt_hash="")  # the fakes' scores do not say them
    job = ScoreJob(prepared, str(tmp_path / "answers.jsonl"), str(tmp_path / "score.json"), "c0ffee")
    started: list[list[str]] = []
    real = sandboxed.run
    monkeypatch.setattr(
        sandboxed, "run", lambda argv, *a, **k: (started.append(argv), real(argv, *a, **k))[1]
    )
    pool = pools(1)
    pool.submit(job)
    (done,) = wait(pool, 1)
    assert done.score is not None, done.error
    assert done.score.metrics[0].value == 0.5 and done.score.checkpoint == "c0ffee"
    assert codec.decode(Score, json.loads(Path(job.result).read_text())) == done.score
    assert len(started) == 1, "and nowhere else"
