"""What a sandbox prints may be written by the program inside: it is told, never raised, and speaks for its task alone."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.evaluate.contracts import Metric, PreparedTask, Score, ScoreJob
from unbroken.evaluate.scoring import pool as module
from unbroken.evaluate.scoring import sandbox, sandboxed
from unbroken.evaluate.scoring.pool import PoolLimits, open_pool
from unbroken.evaluate.scoring.sandbox import CommandEnd, SandboxLimits
from unbroken.journal import codec

from ..fuzzing import fuzz
from ..hostile import NESTED, bodies, mutated
from .evaluating import fake_task

TASK = PreparedTask(fake_task("a"), "1", 4, 2, "/nonexistent", "hash")
JOB = ScoreJob(TASK, "/nonexistent/answers.jsonl", "/nonexistent/score.json", "c0ffee")
RIGHT: dict[str, Any] = codec.encode(
    Score("a", (Metric("acc", 0.5, 0.1),), 4, 4, version="1", prompt_hash="hash", checkpoint="c0ffee")
)


def read(stdout: bytes, status: str = "done", code: int = 0) -> tuple[Any, str, int | None]:
    return sandboxed.read_answer(JOB, CommandEnd(status, code, stdout, b"\x1b[2J", 1.0))


def line(answer: Any) -> bytes:
    return b"unbroken-score " + json.dumps(answer).encode() + b"\n"


def test_a_right_score_is_read() -> None:
    answer, why, sample = read(b"unbroken-at 3\n" + line({"score": RIGHT}))
    assert (codec.decode(Score, answer["score"]), why, sample) == (codec.decode(Score, RIGHT), "", None)
    answer, _, _ = read(line({"error": {}, "text": "the scorer raised"}))
    assert answer == {"error": {}, "text": "the scorer raised"}


@pytest.mark.parametrize(
    "forged",
    [
        b"unbroken-score {\n", b"unbroken-score \n", b"unbroken-score []\n", b"unbroken-score " + NESTED + b"\n",
        line({}), line({"score": None}), line({"score": {"task": "a"}}), line({"score": {**RIGHT, "task": "other"}}),
        line({"score": {**RIGHT, "prompt_hash": "x"}}), line({"score": {**RIGHT, "samples": 1}}),
        line({"score": {**RIGHT, "scored": 10**9}}), line({"score": {**RIGHT, "metrics": [{"name": "acc", "value": "1"}]}}),
        line({"score": {**RIGHT, "metrics": [{"name": "acc", "value": 10**4000}]}}), line({"score": {**RIGHT, "more": 1}}),
        b"unbroken-score \xff\xfe\n",
    ],
)  # fmt: skip
def test_forged_scores_are_told(forged: bytes) -> None:
    answer, why, sample = read(forged)
    assert "makes no sense" in answer["text"] and (why, sample) == ("", None)


@pytest.mark.parametrize("said", [b"99999999999999999999", b"x", b"4", b"-7", b"1.5", b"", b"9" * 5000])
def test_forged_samples_are_no_samples(said: bytes) -> None:
    answer, why, sample = read(b"unbroken-at " + said + b"\n", "timeout", -9)
    assert (answer, why, sample) == (None, "took too long", None)
    assert read(b"unbroken-at 2\n", "killed", -9)[2] == 2


def test_words_of_the_sandbox_cannot_move_a_terminal() -> None:
    answer, _, _ = read(line({"text": "\x1b[2J\u202eerror" + "x" * 100_000}))
    assert answer["text"].isprintable() and len(answer["text"]) <= 4000


@pytest.mark.parametrize(
    "forged", [b"unbroken-score 5\n", line({"score": {"task": "a"}}), b"unbroken-score [1]\n"]
)
def test_a_pool_goes_on_after_a_forged_answer(
    tmp_path: Path, forged: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_sandboxed", lambda job: True)
    monkeypatch.setattr(sandboxed, "run", lambda *a, **k: CommandEnd("done", 0, forged, b"", 0.1))
    monkeypatch.setattr(sandboxed, "_task_folders", lambda job: [])
    pool = open_pool(1, PoolLimits())
    try:
        pool.submit(ScoreJob(TASK, str(tmp_path / "answers"), str(tmp_path / "score.json"), "c0ffee"))
        while not (done := pool.collect()):
            time.sleep(0.01)
    finally:
        pool.close()
    assert done[0].score is None and "makes no sense" in done[0].error
    assert not (tmp_path / "score.json").exists()


def test_a_program_that_forges_in_a_real_sandbox_is_told() -> None:
    if sandbox.sandbox_kind().startswith("none"):
        pytest.skip("no sandbox works here")
    import sys

    code = "import os\nos.write(1, b'unbroken-at 99\\nunbroken-score {\"score\": [[[')\nos._exit(0)"
    out = sandbox.run([sys.executable, "-I", "-S", "-c", code], SandboxLimits(wall_s=30.0))
    answer, _, _ = sandboxed.read_answer(JOB, out)
    assert "makes no sense" in answer["text"]


@fuzz(80)
@given(
    parts=st.lists(
        st.one_of(
            bodies, bodies.map(lambda b: b"unbroken-score " + b), bodies.map(lambda b: b"unbroken-at " + b),
            mutated([{"op": "", **RIGHT}]).map(lambda m: line({"score": {k: v for k, v in m.items() if k != "op"}})),
            mutated([{"op": "", "score": RIGHT, "text": "t"}]).map(line),
        ),
        max_size=4,
    ),
    status=st.sampled_from(["done", "timeout", "memory", "killed"]),
)  # fmt: skip
def test_whatever_is_printed(parts: list[bytes], status: str) -> None:
    answer, why, sample = read(b"\n".join(parts), status)
    assert sample is None or 0 <= sample < 4
    if answer is None:
        assert why
    elif "score" in answer:
        assert codec.decode(Score, answer["score"]).task == "a"
    else:
        assert isinstance(answer["text"], str)
