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
from .. import repeated

Verdict = dict[str, float] | SampleNote


def apart(module: Any) -> bool:
    """Whether its rows may be scored by several processes; not those that wait for one judge together, nor those whose
    `aggregate` may look at what `score` has left in the module."""
    return threads(module) <= 1 and bool(getattr(module, "APART", not hasattr(module, "aggregate")))


def threads(module: Any) -> int:
    """Rows scored at once in one process."""
    return int(getattr(module, "THREADS", 1))


def score_some(
    module: Any, rows: Iterable[Json], answers: Sequence[Answer], for_s: float, count: int = 1
) -> tuple[list[Verdict], float]:
    """Verdicts of these, one after the other, until `for_s` are over; and the seconds that they took, at the pace of
    those after the first, in which a scorer may load what it needs. `count`: answers to each prompt."""
    began = time.monotonic()
    found: list[Verdict] = []
    first = 0.0
    for row, answer in zip(rows, answers, strict=True):
        found.append(_score_one(module, row, answer, count, watched=True))
        took = time.monotonic() - began
        first = first or took
        if took > for_s:
            break
    rest, n = time.monotonic() - began - first, len(found)
    return found, min(first, rest / (n - 1)) + rest if n > 1 else first


def score_all(module: Any, rows: Sequence[Json], answers: Sequence[Answer], count: int = 1) -> list[Verdict]:
    if threads(module) <= 1:
        return score_some(module, rows, answers, math.inf, count)[0]
    with ThreadPoolExecutor(threads(module)) as pool:
        pairs = zip(rows, answers, strict=True)
        return list(pool.map(lambda ra: _score_one(module, ra[0], ra[1], count, watched=False), pairs))


def _score_one(module: Any, row: Json, answer: Answer, count: int, *, watched: bool) -> Verdict:
    if answer.problem:
        crashed = answer.problem.removeprefix("crashed: ")
        return SampleNote(answer.sample, "crashed" if crashed != answer.problem else "unanswered", crashed)
    if watched:
        watch.at(answer.sample)
    try:
        outputs = [_output(answer.outputs[draw::count]) for draw in range(count)]
        found = [_numbers(module.score(row, o)) for o in outputs]
        if count == 1:
            return found[0]
        vote = getattr(module, "vote", lambda row, output: output)
        votes = [vote(row, o.strip() if isinstance(o, str) else o) for o in outputs]
        return {
            f"{name}{end}": number
            for name in found[0]
            for end, number in repeated.summarize([f[name] for f in found], votes).items()
        }
    except Unscored as e:
        return SampleNote(answer.sample, "unscored", str(e))
    except Exception as e:  # noqa: BLE001  the user's scorer may raise anything; its sample is reported
        return SampleNote(answer.sample, "crashed", f"{type(e).__name__}: {e}"[:500])
    finally:
        if watched:
            watch.at(-1)


def _output(outputs: Sequence[Json]) -> Json:
    return outputs[0] if len(outputs) == 1 else list(outputs)


def _numbers(verdict: Any) -> dict[str, float]:
    """By metric. Raises Unscored where there is no verdict."""
    if verdict is None:
        raise Unscored("score() gave None")
    given = verdict if isinstance(verdict, Mapping) else {"score": verdict}
    return {str(k): float(v) for k, v in given.items()}


def aggregate(module: Any, values: Mapping[str, list[float]], higher: bool) -> tuple[Metric, ...]:
    own = getattr(module, "aggregate", None)
    if own is not None and values:
        out = []
        plain = {k: list(v) for k, v in values.items() if not repeated.is_summary(k)}
        for name, made in own(plain).items():
            value, stderr = made if isinstance(made, tuple | list) else (made, None)
            out.append(Metric(str(name), float(value), None if stderr is None else float(stderr), higher))
        values = {k: v for k, v in values.items() if k not in plain}  # of several answers: means as ever
        return (*out, *_means(values, higher))
    return _means(values, higher)


def _means(values: Mapping[str, Sequence[float]], higher: bool) -> tuple[Metric, ...]:
    return tuple(Metric(k, math.fsum(v) / len(v), _stderr(v), higher) for k, v in values.items())


def _stderr(values: Sequence[float]) -> float | None:
    """Standard error of the mean, with n - 1 in the variance; None for one value."""
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)
