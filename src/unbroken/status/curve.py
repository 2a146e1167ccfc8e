"""The steps of a run as columns: read from steps.jsonl, reduced to each step's last execution, thinned for a page."""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_LINES = 20_000
"""Lines that are parsed at once."""


@dataclass(frozen=True)
class Steps:
    """Executions of steps in the order in which they happened, so that `attempt` never falls; all columns have the
    same length.

    `time` is seconds since the epoch, `loss` may be NaN, `attempt` the attempt's number, `took` the seconds since
    the execution before it in the same attempt (for an attempt's first one the median of the run, because its own
    computing cannot be told from starting and restoring).
    """

    step: Ints
    loss: Floats
    tokens: Ints
    time: Floats
    attempt: Ints
    took: Floats

    def __len__(self) -> int:
        return len(self.step)

    def only(self, mask: NDArray[np.bool_] | NDArray[np.int64] | slice) -> Steps:
        """The executions that a mask, an index or a slice selects."""
        return Steps(
            self.step[mask], self.loss[mask], self.tokens[mask], self.time[mask], self.attempt[mask],
            self.took[mask],
        )  # fmt: skip


@dataclass(frozen=True)
class Executions:
    """All executions of a run, and which of them count: the last one of each step. `damaged` counts lines of
    steps.jsonl that could not be read."""

    all: Steps
    counts: NDArray[np.bool_]
    damaged: int = 0
    first_s: float = 0.0
    """Seconds that the first executions of all attempts count with, which lie inside the starts."""

    @cached_property
    def last(self) -> Steps:
        """Each step's last execution, by rising step."""
        return self.all.only(self.counts)

    @property
    def productive_s(self) -> float:
        """Seconds in which a step's last execution ran."""
        return float(self.all.took[self.counts].sum())

    @property
    def replayed_s(self) -> float:
        """Seconds spent on executions that were lost and done again."""
        return float(self.all.took[~self.counts].sum())


def read_executions(files: Sequence[tuple[int, Path]]) -> Executions:
    """The executions of all attempts, given as (attempt, its steps.jsonl) with the oldest attempt first.

    An execution counts unless a later one has the same step or a lower one: from there the run was done again.
    A missing file is an attempt without steps. Raises OSError where a file cannot be read.
    """
    columns: list[tuple[int, Ints, Floats, Ints, Floats]] = []
    damaged = 0
    for attempt, path in files:
        rows = _read_columns(path)
        damaged += rows.damaged
        if rows.step:
            columns.append(
                (
                    attempt,
                    np.frombuffer(rows.step, np.int64),
                    np.frombuffer(rows.loss, np.float64),
                    np.frombuffer(rows.tokens, np.int64),
                    np.frombuffer(rows.time, np.float64),
                )
            )
    if not columns:
        none_i, none_f = np.zeros(0, np.int64), np.zeros(0, np.float64)
        empty = Steps(none_i, none_f, none_i, none_f, none_i, none_f)
        return Executions(empty, np.zeros(0, np.bool_), damaged)
    steps = np.concatenate([c[1] for c in columns])
    times = np.concatenate([c[4] for c in columns])
    attempts = np.concatenate([np.full(len(c[1]), c[0], np.int64) for c in columns])
    took = np.full(len(steps), np.nan)
    follows = (attempts[1:] == attempts[:-1]) & (steps[1:] > steps[:-1])
    took[1:][follows] = np.maximum(times[1:] - times[:-1], 0.0)[follows]
    first = np.isnan(took)
    usual = float(np.median(took[~first])) if not first.all() else 0.0
    took[first] = usual
    later = np.full(len(steps), np.iinfo(np.int64).max)
    later[:-1] = np.minimum.accumulate(steps[::-1])[::-1][1:]
    every = Steps(
        steps,
        np.concatenate([c[2] for c in columns]),
        np.concatenate([c[3] for c in columns]),
        times,
        attempts,
        took,
    )
    return Executions(every, steps < later, damaged, usual * float(first.sum()))


@dataclass
class _Columns:
    """The rows of one file; numbers lie in arrays, since a run may have millions of steps."""

    step: array[int] = field(default_factory=lambda: array("q"))
    loss: array[float] = field(default_factory=lambda: array("d"))
    tokens: array[int] = field(default_factory=lambda: array("q"))
    time: array[float] = field(default_factory=lambda: array("d"))
    damaged: int = 0

    def add(self, row: tuple[int, float, int, float]) -> None:
        if not -(2**63) <= row[2] < 2**63 or not -(2**63) <= row[0] < 2**63:
            raise OverflowError("a number of steps or tokens that no run has")
        self.step.append(row[0])
        self.loss.append(row[1])
        self.tokens.append(row[2])
        self.time.append(row[3])


def _read_columns(path: Path) -> _Columns:
    """Step, loss, tokens and time of each line, and how many lines were damaged; a torn last line is neither."""
    columns = _Columns()
    try:
        file = open(path, "rb")  # noqa: SIM115  closed below
    except FileNotFoundError:
        return columns
    with file:
        while lines := list(itertools.islice(file, _LINES)):
            if not lines[-1].endswith(b"\n"):
                lines.pop()
            _take(lines, columns)
    return columns


def _take(lines: list[bytes], columns: _Columns) -> None:
    try:
        # One parse for many lines is several times faster than one each; only a damaged piece goes line by line.
        rows = [_row(r) for r in json.loads(b"[" + b",".join(lines) + b"]")]
    except (ValueError, KeyError, TypeError, OverflowError):
        rows = []
        for line in lines:
            try:
                rows.append(_row(json.loads(line)))
            except (ValueError, KeyError, TypeError, OverflowError):
                columns.damaged += 1
    for row in rows:
        try:
            columns.add(row)
        except OverflowError:
            columns.damaged += 1


def _row(r: dict[str, object]) -> tuple[int, float, int, float]:
    step, loss, tokens, when = r["step"], r["loss"], r["tokens"], r["t"]
    if not (isinstance(step, int) and isinstance(loss, str) and isinstance(tokens, int)):
        raise TypeError("not a step")
    return step, float.fromhex(loss), tokens, float(when)  # type: ignore[arg-type]


def thin(steps: Steps, points: int) -> Steps:
    """At most about `points` of the steps, with the first and last of the whole and the lowest and highest loss of
    each window; executions without a loss are left out."""
    have = steps.only(~np.isnan(steps.loss))
    if len(have) <= points:
        return have
    edges = np.linspace(0, len(have), max(2, points // 2) + 1).astype(np.int64)
    keep = {0, len(have) - 1}
    for low, high in itertools.pairwise(edges):
        if high > low:
            part = have.loss[low:high]
            keep.add(int(low + part.argmin()))
            keep.add(int(low + part.argmax()))
    return have.only(np.array(sorted(keep), dtype=np.int64))
