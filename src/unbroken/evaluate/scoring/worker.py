"""A scoring worker: one job a line on stdin, one answer a line on its own pipe, until stdin ends.

    {"job": ScoreJob, "skip": {"17": "why"}, "watch": path}  ->  {"score": Score} or {"error": {...}}

Run as `python -m unbroken.evaluate.scoring.worker FD`. What the scorer prints goes to stderr. It imports a harness
once and keeps it, so that the next job of the same harness starts at once.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ... import atomic
from ...errors import EvaluationError, UnbrokenError
from .. import codec, staged
from ..contracts import Answer, Harness, Json, PreparedTask, Score, ScoreJob
from ..registry import get_harness
from . import watch


def main(argv: list[str]) -> int:
    """Serves jobs until stdin ends, or the pool dies."""
    _die_with_parent()
    pipe = int(argv[0])
    os.set_inheritable(pipe, False)
    os.dup2(2, 1)
    harnesses: dict[str, Harness] = {}
    for line in sys.stdin:
        os.write(pipe, (json.dumps(serve(json.loads(line), harnesses)) + "\n").encode())
    return 0


def serve(order: Mapping[str, Json], harnesses: dict[str, Harness]) -> Json:
    """One job, from the order to what is said about it; errors are answers, never raised."""
    try:
        job = codec.decode(ScoreJob, order["job"], where="job")
        if order.get("watch"):
            watch.open_watch(Path(order["watch"]))
        name = job.prepared.task.harness
        if name not in harnesses:
            harnesses[name] = get_harness(name)
        skip = {int(k): str(v) for k, v in order.get("skip", {}).items()}
        score = score_job(job, harnesses[name], skip)
        if order.get("write", True):
            atomic.write_json(Path(job.result), codec.encode(score))
        return {"score": codec.encode(score)}
    except UnbrokenError as e:
        return {**e.as_json(), "text": str(e)}
    except Exception as e:  # noqa: BLE001  the scorer is the user's code
        traceback.print_exc()
        last = traceback.extract_tb(e.__traceback__)[-1]
        return {
            "error": {},
            "text": f"the scorer raised {type(e).__name__}: {e} ({last.filename}:{last.lineno})",
        }
    finally:
        watch.close_watch()


def score_job(job: ScoreJob, harness: Harness, skip: Mapping[int, str]) -> Score:
    """The score of a job; samples in `skip` count as crashed, for the reason given there.

    Raises EvaluationError where the answers are not exactly those of the task's samples.
    """
    answers = check_answers(job.prepared, staged.read_answers(Path(job.answers)), where=job.answers)
    for i, why in skip.items():
        answers[i] = replace(answers[i], outputs=(), problem=f"crashed: {why}")
    score = harness.score(job.prepared, answers)
    return replace(score, checkpoint=job.checkpoint, conditions=job.conditions or score.conditions)


def check_answers(prepared: PreparedTask, answers: list[Answer], *, where: str) -> list[Answer]:
    """The same answers, after checking that each sample is there once, in order, asked with its own prompt."""
    if [a.sample for a in answers] != list(range(prepared.samples)):
        counts: dict[int, int] = {}
        for a in answers:
            counts[a.sample] = counts.get(a.sample, 0) + 1
        missing = [i for i in range(prepared.samples) if i not in counts]
        twice = sorted(i for i, n in counts.items() if n > 1)
        foreign = sorted(i for i in counts if not 0 <= i < prepared.samples)
        said = [f"{what} {ids[:5]}" for what, ids in
                (("missing", missing), ("more than once", twice), ("unknown", foreign)) if ids]  # fmt: skip
        raise EvaluationError(
            f"the answers of '{prepared.task.name}' are not each of its {prepared.samples} samples once: "
            + ("; ".join(said) or "out of order"),
            where=where,
            todo="This is a defect of unbroken: keep the folder and report it",
        )
    for answer, expected in zip(answers, staged.read_hashes(Path(prepared.folder)), strict=True):
        if answer.prompt_hash != expected:
            raise EvaluationError(
                f"sample {answer.sample} of '{prepared.task.name}' was answered for another prompt",
                where=where,
                todo="Start the evaluation in a new folder",
            )
    return answers


def _die_with_parent() -> None:
    """Asks Linux to kill this process when the pool is killed in the middle of a job; elsewhere stdin's end must do."""
    import ctypes
    import signal

    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    except AttributeError:
        return
    if os.getppid() == 1:
        sys.exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
