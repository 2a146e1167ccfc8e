"""What score.py says of each answer, and the metrics made of it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...contracts import Answer, Json, Metric, SampleNote
from ...scoring import watch
from ...scoring.judge import Unscored

Verdict = dict[str, float] | SampleNote


def apart(module: Any) -> bool:
    """Whether its rows may be scored by several processes; not those that wait for one judge together, nor those whose
    `aggregate` may look at what `score` has left in the module."""
    return threads(module) <= 1 and bool(getattr(module, "APART", not hasattr(module, "aggregate")))


def threads(module: Any) -> int:
    """Rows scored at once in one process."""
    return int(getattr(module, "THREADS", 1))


def score_some(
    module: Any, rows: Iterable[Json], answers: Sequence[Answer], for_s: float
) -> tuple[list[Verdict], float]:
    """Verdicts of these, one after the other, until `for_s` are over; and the seconds that they took, at the pace of
    those after the first, in which a scorer may load what it needs."""
    began = time.monotonic()
    found: list[Verdict] = []
    first = 0.0
    for row, answer in zip(rows, answers, strict=True):
        found.append(_score_one(module, row, answer, watched=True))
        took = time.monotonic() - began
        first = first or took
        if took > for_s:
            break
    rest, n = time.monotonic() - began - first, len(found)
    return found, min(first, rest / (n - 1)) + rest if n > 1 else first


def score_all(module: Any, rows: Sequence[Json], answers: Sequence[Answer]) -> list[Verdict]:
    if threads(module) <= 1:
        return score_some(module, rows, answers, math.inf)[0]
    with ThreadPoolExecutor(threads(module)) as pool:
        return list(
            pool.map(lambda ra: _score_one(module, *ra, watched=False), zip(rows, answers, strict=True))
        )


def _score_one(module: Any, row: Json, answer: Answer, *, watched: bool) -> Verdict:
    if answer.problem:
        crashed = answer.problem.removeprefix("crashed: ")
        return SampleNote(answer.sample, "crashed" if crashed != answer.problem else "unanswered", crashed)
    output = answer.outputs[0] if len(answer.outputs) == 1 else list(answer.outputs)
    if watched:
        watch.at(answer.sample)
    try:
        verdict = module.score(row, output)
        if verdict is None:
            return SampleNote(answer.sample, "unscored", "score() gave None")
        given = verdict if isinstance(verdict, Mapping) else {"score": verdict}
        return {str(k): float(v) for k, v in given.items()}
    except Unscored as e:
        return SampleNote(answer.sample, "unscored", str(e))
    except Exception as e:  # noqa: BLE001  the user's scorer may raise anything; its sample is reported
        return SampleNote(answer.sample, "crashed", f"{type(e).__name__}: {e}"[:500])
    finally:
        if watched:
            watch.at(-1)


def aggregate(module: Any, values: Mapping[str, list[float]], higher: bool) -> tuple[Metric, ...]:
    own = getattr(module, "aggregate", None)
    if own is not None and values:
        out = []
        for name, made in own({k: list(v) for k, v in values.items()}).items():
            value, stderr = made if isinstance(made, tuple | list) else (made, None)
            out.append(Metric(str(name), float(value), None if stderr is None else float(stderr), higher))
        return tuple(out)
    return tuple(Metric(k, math.fsum(v) / len(v), _stderr(v), higher) for k, v in values.items())


def _stderr(values: Sequence[float]) -> float | None:
    """Standard error of the mean, with n - 1 in the variance; None for one value."""
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)
