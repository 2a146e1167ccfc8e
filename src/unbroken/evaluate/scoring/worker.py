"""A scoring worker: one job a line on stdin, one answer a line on stdout, until stdin ends.

    {"job": ScoreJob, "skip": {"17": "why"}, "watch": path}  ->  {"score": Score} or {"error": {...}}
    {..., "part": [0, 900], "for_s": 2.0, "parts": folder}   ->  {"upto": 120, "seconds": 2.0, "start_s": 0.1}; its verdicts
                                                                 lie in the folder; {"score": ...} where that was all
    {..., "parts": folder}                                   ->  {"score": ...} from the verdicts in the folder

Run as `python -m unbroken.evaluate.scoring.worker`, or forked from a process that has imported it. What the scorer prints goes to stderr. It imports a harness
once and keeps it, so that the next job of the same harness starts at once.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from ... import atomic
from ...errors import EvaluationError, UnbrokenError
from ...journal import codec
from ..contracts import Answer, Harness, Json, PreparedTask, Score, ScoreJob, ScoresInParts
from ..preparation import reads, reads_of_score
from ..result.folder import unwritable
from ..suite import staged
from ..suite.registry import get_harness, in_parts
from . import watch


def main(argv: list[str]) -> int:
    """Serves jobs until stdin ends, or the pool dies."""
    _die_with_parent()
    pipe = os.dup(1)
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
            with _writing(Path(order["watch"])):
                watch.open_watch(Path(order["watch"]))
        name = job.prepared.task.harness
        if name not in harnesses:
            harnesses[name] = get_harness(name)
        skip = {int(k): str(v) for k, v in order.get("skip", {}).items()}
        harness = harnesses[name]
        score: Score | None
        own = [job.prepared.folder, str(Path(job.answers).parent), str(Path(job.result).parent)]
        first = order.get("part", [0 if "parts" not in order else -1])[0] == 0
        with reads.recording(own) as recorder:
            if order.get("parts") and (apart := in_parts(harness)) is not None:
                answer, score = _in_parts(job, apart, skip, order)
                if score is None:
                    _note_reads(job, recorder, first)
                    return answer
            else:
                score = score_job(job, harness, skip)
        if order.get("write", True):
            _note_reads(job, recorder, first)
            with _writing(Path(job.result)):
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


def _note_reads(job: ScoreJob, recorder: reads.ReadsRecorder, first: bool) -> None:
    """Keeps beside the score what scoring it read, for the next command. `first`: of the parts of a task."""
    with _writing(Path(job.result)):
        reads_of_score.note(Path(job.result), recorder, first=first)


@contextlib.contextmanager
def _writing(what: Path) -> Iterator[None]:
    """A full disk is not the scorer's fault, and is told as everywhere else."""
    try:
        yield
    except OSError as e:
        raise unwritable(e, what) from e


def score_job(job: ScoreJob, harness: Harness, skip: Mapping[int, str]) -> Score:
    """The score of a job; samples in `skip` count as crashed, for the reason given there.

    Raises EvaluationError where the answers are not exactly those of the task's samples.
    """
    answers = _answers(job, skip)
    return _complete(job, harness.score(job.prepared, answers), answers)


def _answers(job: ScoreJob, skip: Mapping[int, str]) -> list[Answer]:
    answers = check_answers(job.prepared, staged.read_answers(Path(job.answers)), where=job.answers)
    for i, why in skip.items():
        answers[i] = replace(answers[i], outputs=(), problem=f"crashed: {why}")
    return answers


def _complete(job: ScoreJob, score: Score, answers: Sequence[Answer]) -> Score:
    p = job.prepared
    return replace(score, partial=tuple(a.sample for a in answers if a.partial), checkpoint=job.checkpoint, conditions=job.conditions or score.conditions, documents=p.documents,
                   inputs=p.inputs)  # fmt: skip


def _in_parts(
    job: ScoreJob, harness: ScoresInParts, skip: Mapping[int, str], order: Mapping[str, Json]
) -> tuple[Json, Score | None]:
    """What to say, or the score where it is all there. Raises EvaluationError where verdicts are missing."""
    began, folder = time.monotonic(), Path(order["parts"])
    if "part" not in order:
        return None, _score_of(job, harness, folder, skip)
    start, stop = order["part"]
    found = harness.score_part(
        job.prepared, _answers(job, skip), range(start, stop), float(order.get("for_s") or math.inf)
    )
    if found is None:
        return None, score_job(job, cast(Harness, harness), skip)
    verdicts, seconds = found
    upto = start + len(verdicts)
    said = {"start": start, "seconds": seconds, "verdicts": verdicts}
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write_json(folder / f"{start}.json", said)
    if start == 0 and upto == job.prepared.samples:
        return None, _score_of(job, harness, folder, skip)
    return {"upto": upto, "seconds": seconds, "start_s": time.monotonic() - began - seconds}, None


def _score_of(job: ScoreJob, harness: ScoresInParts, folder: Path, skip: Mapping[int, str]) -> Score:
    parts = sorted((json.loads(f.read_text()) for f in folder.glob("*.json")), key=lambda p: p["start"])
    verdicts: list[Json] = []
    for part in parts:
        if part["start"] != len(verdicts):
            break
        verdicts += part["verdicts"]
    else:
        if len(verdicts) == job.prepared.samples:
            score = harness.score_of_parts(job.prepared, verdicts)
            return _complete(
                job, replace(score, seconds=sum(p["seconds"] for p in parts)), _answers(job, skip)
            )
    raise EvaluationError(
        f"the verdicts on '{job.prepared.task.name}' are not one for each of its {job.prepared.samples} samples",
        where=str(folder),
        hint="This is a defect of unbroken: keep the folder and report it",
    )


def check_answers(prepared: PreparedTask, answers: list[Answer], *, where: str) -> list[Answer]:
    """The same answers, after checking that each sample is there once, in order, asked with its own prompt."""
    if [a.sample for a in answers] != list(range(prepared.samples)):
        counts: dict[int, int] = {}
        for a in answers:
            counts[a.sample] = counts.get(a.sample, 0) + 1
        missing = [i for i in range(prepared.samples) if i not in counts]
        twice = sorted(i for i, n in counts.items() if n > 1)
        unknown = sorted(i for i in counts if not 0 <= i < prepared.samples)
        said = [f"{what} {ids[:5]}" for what, ids in
                (("missing", missing), ("more than once", twice), ("unknown", unknown)) if ids]  # fmt: skip
        raise EvaluationError(
            f"the answers of '{prepared.task.name}' are not each of its {prepared.samples} samples once: "
            + ("; ".join(said) or "out of order"),
            where=where,
            hint="This is a defect of unbroken: keep the folder and report it",
        )
    for answer, expected in zip(answers, staged.read_hashes(Path(prepared.folder)), strict=True):
        if answer.prompt_hash != expected:
            raise EvaluationError(
                f"sample {answer.sample} of '{prepared.task.name}' was answered for another prompt",
                where=where,
                hint="Start the evaluation in a new folder",
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
    sys.exit(main([]))
