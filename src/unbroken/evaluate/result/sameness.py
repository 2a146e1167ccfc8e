"""Fast answers against those in the harness's own batches: which samples are asked both ways, and whether scores differ.

Two ways of batching change the last digits of what a model computes. That may change a text, or which choice is likelier; what
matters is whether a score moves, and by more than chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import EvaluationError
from ..contracts import Answer, Check, Json, Metric, PreparedTask, Request, Sample, Score, digest
from ..suite.asking import most_tokens
from ..suite.staged import read_samples, write_samples
from .results import compare

SUFFIX = "--exact"
"""Behind a task's name: its samples that are asked in the harness's own batches."""
LEAST, MOST, SHARE = 4, 16, 8
"""An eighth of a task's samples is asked both ways, at least 4 and at most 16."""
ROUNDING = 0.02
"""Log-probabilities (by their size, at least 1) that differ by less are the same: in 16 bits a sum of a hundred is no nearer."""
SMALL = 0.02
"""A difference of less than so much of the score's own standard error is nothing, however regular it is."""


TOKENS = 2048
"""Where answers are long, no more samples than have so many new tokens: 16 answers of 256 in the harness's own batches take as
long as hundreds in the fast way."""


LONGEST = 4096
"""Tokens of an answer at most that is asked both ways: in the harness's own batches one of 16,384 takes minutes."""


def chosen(samples: int, tokens: int = 0) -> list[int]:
    """The ids of the samples that are asked both ways, evenly over the task; `tokens`: what an answer may have."""
    return spread(samples, min(samples, max(LEAST, min(MOST, samples // SHARE, TOKENS // max(1, tokens)))))


def spread(samples: int, n: int) -> list[int]:
    """The ids of `n` samples, evenly over the task."""
    return [(2 * i + 1) * samples // (2 * n) for i in range(n)]


def check_of(prepared: PreparedTask) -> PreparedTask:
    """The task of these samples alone, in one block; writes its requests beside those of the whole.

    Raises EvaluationError where answers may be so long that asking a few of them twice would outlast the evaluation.
    """
    first = read_samples(Path(prepared.folder), range(1))[0]
    limit = max((most_tokens(r) for r in first.requests), default=0)
    if limit > LONGEST:
        raise EvaluationError(
            f"answers of up to {limit:,} tokens are not asked twice",
            hint="--exact asks all of them in the harness's own batches",
        )
    ids = chosen(prepared.samples, sum(most_tokens(r) for r in first.requests))
    folder = Path(prepared.folder) / "exact"
    found = [read_samples(Path(prepared.folder), range(i, i + 1))[0] for i in ids]
    rows = [Sample(n, s.requests, s.prompt_hash, s.document) for n, s in enumerate(found)]
    write_samples(folder, rows, block=max(1, len(rows)))
    return replace(
        prepared, task=replace(prepared.task, name=prepared.task.name + SUFFIX), samples=len(rows), block=max(1, len(rows)),
        folder=str(folder), prompt_hash=digest([s.prompt_hash for s in rows]), weights=(), combine=None, exact=True,
    )  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """The two answers of each sample that was asked both ways."""

    task: str
    ids: tuple[int, ...]
    differ: tuple[int, ...]
    largest: float
    drawn: bool = False


def compare_answers(
    prepared: PreparedTask, fast: Mapping[int, Answer], exact: Mapping[int, Answer]
) -> Compared:
    """What differs; a sample without an answer on either side, or with one that was cut short, is not counted."""
    both = sorted(
        i for i in exact if i in fast and not any(x.problem or x.partial for x in (exact[i], fast[i]))
    )
    differ, largest, drawn = [], 0.0, False
    for i in both:
        requests = read_samples(Path(prepared.folder), range(i, i + 1))[0].requests
        drawn = drawn or any(_is_drawn(r) for r in requests)
        other, off = _differ(requests, fast[i].outputs, exact[i].outputs)
        largest = max(largest, off)
        if other:
            differ.append(i)
    return Compared(prepared.task.name, tuple(both), tuple(differ), largest, drawn)


def _is_drawn(r: Request) -> bool:
    given = r.arguments[1] if r.kind == "generate_until" and len(r.arguments) > 1 else None
    settings = given if isinstance(given, dict) else {}
    return bool(settings.get("do_sample", float(settings.get("temperature") or 0) > 0))


def _differ(requests: Sequence[Request], a: Sequence[Json], b: Sequence[Json]) -> tuple[bool, float]:
    """(whether two answers to one sample differ by more than rounding, the largest difference of log-probabilities)."""
    first, second = [_logprob(x) for x in a], [_logprob(x) for x in b]
    pairs = [(x, y) for x, y in zip(first, second, strict=True) if x is not None and y is not None]
    off = max((abs(x - y) / max(1.0, abs(y)) for x, y in pairs if x != y), default=0.0)
    if len(pairs) < len(a):
        return list(a) != list(b), off
    flags = [x[1] for x in a if isinstance(x, list) and len(x) > 1] != [
        x[1] for x in b if isinstance(x, list) and len(x) > 1
    ]
    choice = len(pairs) > 1 and _argmax([x for x, _ in pairs]) != _argmax([y for _, y in pairs])
    return flags or choice or off > ROUNDING, off


def _logprob(output: Json) -> float | None:
    value = output[0] if isinstance(output, list) and output else output
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda i: values[i])


def checks(
    compared: Sequence[Compared],
    fast: Mapping[str, Score],
    exact: Mapping[str, Score],
    errors: Mapping[str, str],
) -> tuple[Check, ...]:
    """One for each task. `exact`: by task, its score with the answers of the other way in place of those samples' own; not for
    tasks where nothing differs. `errors`: why a task was not compared."""
    pairs = {c.task: (c, fast[c.task], exact[c.task]) for c in compared if c.task in fast and c.task in exact}
    few = {t: (_only(c.ids, a), _only(c.ids, b)) for t, (c, a, b) in pairs.items()}
    found = {d.task: d for d in compare([b for _, b in few.values()], [a for a, _ in few.values()])}
    out = []
    for c in compared:
        check = Check(c.task, len(c.ids), c.differ, c.drawn, c.largest)
        if not c.differ:
            check = replace(
                check, metric=fast[c.task].metrics[0].name if c.task in fast and fast[c.task].metrics else ""
            )
        elif (d := found.get(c.task)) is not None and not math.isnan(d.after) and d.p is not None:
            own = pairs[c.task][1].metrics[0].stderr
            material = own is None or not math.isfinite(own) or abs(d.after - d.before) > SMALL * own
            check = replace(
                check, metric=d.metric, fast=d.after, exact=d.before, stderr=d.stderr, p=d.p,
                beyond_chance=d.verdict in ("better", "worse") and material,
            )  # fmt: skip
        elif c.task in pairs:
            check = replace(check, why="its score is no mean over samples")
        else:
            check = replace(check, why=errors.get(c.task, "it has no score"))
        out.append(check)
    known = {c.task for c in compared}
    out += [Check(t, 0, why=why) for t, why in errors.items() if t not in known]
    return tuple(sorted(out, key=lambda c: c.task))


def _only(ids: Sequence[int], score: Score) -> Score:
    """The score of these samples alone: its headline's mean over their own numbers."""
    name = score.metrics[0].name if score.metrics else ""
    values = score.of(name)
    kept = set(ids)
    own = tuple(v if i in kept else None for i, v in enumerate(values))
    there = [v for v in own if v is not None]
    mean = math.fsum(there) / len(there) if there else math.nan
    return Score(
        score.task.removesuffix(SUFFIX), (Metric(name, mean, None, score.metrics[0].higher_is_better if score.metrics else True),),
        score.samples, score.scored, prompt_hash="both", values={name: own} if there else {},
    )  # fmt: skip
