"""Several answers to each prompt (`--samples`): what is asked, and what their scores make together.

Each prompt that asks for a text is asked so many times; the task's own scoring sees one answer at a time, as if there were no
other. From the scores of all: their mean (pass@1), pass@k, and the score of the answer that most of them gave.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...errors import InputError
from ..contracts import Json, Metric, Request, Score
from ..scoring.code import pass_at_k
from .requests import generation_settings

PASS, MAJORITY = " pass@", " majority@"
"""Between a metric's name and a number."""


def count_of(requests: Sequence[Sequence[Request]], asked: int, task: str) -> int:
    """How many answers each sample of the task gets: `asked`, or 1 where it asks for anything but texts.

    Raises InputError where texts are greedy: all answers to a prompt would be the same.
    """
    if asked < 2 or any(r.kind != "generate_until" for some in requests for r in some):
        return 1
    for some in requests:
        for r in some:
            if not generation_settings(dict(r.arguments[1]))["do_sample"]:
                raise InputError(
                    f"{asked} answers to each prompt of task '{task}' would all be the same: its texts are not drawn at random",
                    where=task, hint="Say --gen temperature=0.8 beside --samples, or leave --samples out",
                )  # fmt: skip
    return asked


def repeat(requests: Sequence[Request], count: int) -> tuple[Request, ...]:
    """Each request so many times, one after the other."""
    return tuple(r for r in requests for _ in range(count))


def summarize(values: Sequence[float], votes: Sequence[Any]) -> dict[str, float]:
    """By the end of a metric's name, what one sample's values of all its answers come to; `votes`: what each answered.

    The mean, as the metric itself; pass@k for k = 2, 4, ... and the number of answers, where all values are 0 or 1 (Chen et al.
    2021, equation 1); the value of the answer that came most often, of several the one that came first.
    """
    n = len(values)
    found = {"": math.fsum(values) / n}
    if all(v in (0.0, 1.0) for v in values):
        found |= {f"{PASS}{k}": pass_at_k(n, round(sum(values)), k) for k in _some(n)}
    counted = [json.dumps(v, sort_keys=True, default=str) for v in votes]
    winner = Counter(counted).most_common(1)[0][0]
    return found | {f"{MAJORITY}{n}": values[counted.index(winner)]}


def name_of(metric: str, end: str) -> str:
    """The metric's name with this end, before the filter that lm_eval names behind a comma."""
    first, comma, rest = metric.partition(",")
    return f"{first}{end}{comma}{rest}"


def is_summary(name: str) -> bool:
    """Whether a metric is one that `summarize` has added."""
    return PASS in name or MAJORITY in name


def score_of(draws: Sequence[Score], votes: Sequence[Mapping[str, Sequence[Json]]]) -> Score:
    """One score from those of each draw; `votes`: of each draw, by metric, what each sample answered.

    A sample that has no verdict in one of the draws has none. A metric that is no mean over samples becomes the mean of the
    draws', without a standard error.
    """
    first = draws[0]
    notes = {n.sample: n for s in reversed(draws) for n in s.notes}
    metrics: list[Metric] = []
    values: dict[str, tuple[float | None, ...]] = {}
    for m in first.metrics:
        columns = [s.values.get(m.name, ()) for s in draws]
        if not all(columns):
            same = [x.value for s in draws for x in s.metrics if x.name == m.name]
            metrics.append(replace(m, value=math.fsum(same) / len(same), stderr=None))
            continue
        rows: list[dict[str, float] | None] = []
        for i, own in enumerate(zip(*columns, strict=True)):
            there = [v for v in own if v is not None]
            said = [v[m.name][i] for v in votes]
            rows.append(summarize(there, said) if len(there) == len(draws) and i not in notes else None)
        scored = [r for r in rows if r is not None]
        for end in scored[0] if scored else ():
            if all(end in r for r in scored):
                name = name_of(m.name, end)
                metrics.append(_mean(name, [r[end] for r in scored], m.higher_is_better))
                values[name] = tuple(None if r is None else r[end] for r in rows)
    return replace(
        first, metrics=tuple(metrics), values=values, notes=tuple(notes[i] for i in sorted(notes)), scored=first.samples - len(notes),
        per_sample=values.get(metrics[0].name, ()) if metrics and first.per_sample else (), seconds=sum(s.seconds for s in draws),
    )  # fmt: skip


def _mean(name: str, values: Sequence[float], higher: bool) -> Metric:
    """With the standard error over samples: the answers to one prompt are not independent of each other."""
    n = len(values)
    mean = math.fsum(values) / n
    stderr = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n) if n > 1 else None
    return Metric(name, mean, stderr, higher)


def _some(n: int) -> list[int]:
    """2, 4, ... and n."""
    powers = [2**i for i in range(1, n.bit_length()) if 2**i < n]
    return [*powers, n]
