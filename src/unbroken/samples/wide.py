"""The distribution of a wide utilisation table, straight from its text, at the speed of the disk.

The released tables have a row every 15 seconds and a column for each server or GPU: 80 GB. To draw their
distributions no reading need be stored: the text is cut into pieces at line ends (piece.py), and its numbers are
counted. Counts are exact to 0.001 (the release has three decimals) below 4,194.304 and to 1/4096 of the value above.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InputError
from .piece import LINEAR, Part, count_piece, pieces, zeros

if TYPE_CHECKING:
    from numpy.typing import NDArray

SEVERAL_FROM = 64_000_000
"""Bytes from which on helpers are worth their start."""
MOST_PROCESSES = 12
"""However many cores there are: each takes about 100 MB, and 2 GiB are promised."""
_SHIFT = 52 - 12


@dataclass
class Counts:
    """How often each value occurred, and the sum of every column."""

    columns: tuple[str, ...]
    rows: int = 0
    missing: int = 0
    """Empty and not-a-number cells."""
    ragged: int = 0
    """Rows with another number of cells than the header: left out."""
    unreadable: int = 0
    """Cells that are no numbers: left out."""
    first: str = ""
    last: str = ""
    """Times of the first and last row, as they stand there."""
    linear: NDArray[np.int64] = field(default_factory=lambda: zeros(1), repr=False)
    large: dict[int, int] = field(default_factory=dict)
    """Bin number (the upper bits of the float) and count, for values above the linear range or below zero."""
    sums: NDArray[np.float64] = field(default_factory=lambda: zeros(0))
    """Of each column, for its mean."""
    valid: NDArray[np.int64] = field(default_factory=lambda: zeros(0))
    _small: list[NDArray[np.uint32]] = field(default_factory=list, repr=False)
    _waiting: int = 0

    @property
    def count(self) -> int:
        """Readings counted."""
        return int(self.valid.sum())

    @property
    def mean(self) -> float:
        """Mean of all readings; not a number without any."""
        return float(self.sums.sum()) / self.count if self.count else float("nan")

    def means(self) -> dict[str, float]:
        """The mean of each column that has readings."""
        return {c: float(s / n) for c, s, n in zip(self.columns, self.sums, self.valid, strict=True) if n}

    def quantiles(self, shares: list[float]) -> list[float]:
        """The values below which these shares of the readings lie, between neighbours linearly, as numpy does."""
        values, counts = self._values()
        if not len(values):
            return [float("nan")] * len(shares)
        ends = np.cumsum(counts)
        out = []
        for share in shares:
            rank = share * (self.count - 1)
            low, high = (
                values[np.searchsorted(ends, k, side="right")] for k in (int(rank), -int(-rank // 1))
            )
            out.append(float(low + (high - low) * (rank - int(rank))))
        return out

    def share_below(self, values: list[float]) -> list[float]:
        """The share of readings that are at most each value: points of the distribution function."""
        known, counts = self._values()
        ends = np.concatenate([[0], np.cumsum(counts)])
        return [
            float(ends[np.searchsorted(known, v + 5e-4, side="right")]) / max(1, self.count) for v in values
        ]

    def _flush(self) -> None:
        """Counts what waits: seldom and much at once, because the bins are many."""
        if self._small:
            found = np.bincount(np.concatenate(self._small))
            if len(found) > len(self.linear):
                found[: len(self.linear)] += self.linear
                self.linear = found
            else:
                self.linear[: len(found)] += found
            self._small.clear()
            self._waiting = 0

    def _values(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        self._flush()
        at = np.flatnonzero(self.linear)
        numbers = np.array(sorted(self.large), dtype=np.int64)
        # the middle of a bin
        large = (
            ((numbers << _SHIFT) | (1 << (_SHIFT - 1))).view(np.float64) / 1000
            if len(numbers)
            else np.empty(0)
        )
        values = np.concatenate([at / 1000, large])
        counts = np.concatenate(
            [self.linear[at], np.array([self.large[int(n)] for n in numbers], dtype=np.int64)]
        )
        order = np.argsort(values, kind="stable")
        return values[order], counts[order]

    def _add_window(self, fd: int, start: int, stop: int, width: int) -> None:
        for at, length in pieces(fd, start, stop):
            self._add(count_piece(fd, at, length, width))

    def _merge(self, later: Counts) -> None:
        """Adds the counts of a window that follows."""
        self._flush()
        for name in ("rows", "missing", "ragged", "unreadable"):
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.first, self.last = self.first or later.first, later.last or self.last
        short, long = sorted((self.linear, later.linear), key=len)
        self.linear = long.copy()
        self.linear[: len(short)] += short
        for number, n in later.large.items():
            self.large[number] = self.large.get(number, 0) + n
        self.sums = self.sums + later.sums
        self.valid = self.valid + later.valid

    def _add(self, part: Part) -> None:
        self.rows += part.rows
        self.missing += part.missing
        self.ragged += part.ragged
        self.unreadable += part.unreadable
        self.first = self.first or part.first
        self.last = part.last or self.last
        self._small.append(part.small)
        if part.extra:
            self._small.append(np.array(part.extra, dtype=np.uint32))
        self._waiting += len(part.small)
        self.linear[0] -= part.surplus
        if self._waiting >= LINEAR:
            self._flush()
        if part.large:
            bins = np.array(part.large).view(np.int64) >> _SHIFT
            for number, n in zip(*np.unique(bins, return_counts=True), strict=True):
                self.large[int(number)] = self.large.get(int(number), 0) + int(n)
        self.sums += part.sums
        self.valid += part.valid


def count(path: Path, *, processes: int = 2) -> Counts:
    """Counts a wide table: a header, then rows of a time and a number for each column.

    A large table is counted by `processes` at once (`MOST_PROCESSES` at most), this one and helpers that each take a
    window of the file: the steps are too short for threads, which would wait for the interpreter's lock. Takes less
    than 150 MB in each, whatever the size. Raises InputError for another table.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as f:
            head = f.readline(1 << 24)
            names = head.decode("utf-8-sig").rstrip("\r\n").split(",")
            if len(names) < 2 or not head.endswith(b"\n"):
                raise InputError("this is no wide table: its first line names no columns", where=str(path))
            counts = Counts(tuple(n.strip().strip('"') for n in names[1:]))
            counts.sums, counts.valid = zeros(len(names) - 1, float), zeros(len(names) - 1)
            several = min(processes, MOST_PROCESSES) if size >= SEVERAL_FROM else 1
            bounds = [len(head), *_windows(f.fileno(), len(head), size, several), size]
            with _Helpers(path, len(names), list(pairwise(bounds))[1:]) as helpers:
                counts._add_window(f.fileno(), bounds[0], bounds[1], len(names))
                for window, found in helpers.results():
                    if found is not None:
                        counts._merge(found)
                    else:  # a helper was killed, or could not be started: its work is done here
                        counts._add_window(f.fileno(), *window, len(names))
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"the table cannot be read: {e}", where=str(path)) from e
    if counts.rows == 0:
        raise InputError("the table has no row of the header's width", where=str(path))
    return counts


class _Helpers:
    """A process of its own for each window (from, to); all are gone when the block is left.

    They are plain commands, and no pool of multiprocessing's, because that would import the caller's script again.
    """

    def __init__(self, path: Path, width: int, windows: list[tuple[int, int]]) -> None:
        places = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
        # -P: what lies in the folder that the user stands in is none of ours.
        python = [sys.executable, "-P", "-m", __name__, str(path.absolute())]
        self._windows = windows
        self._processes: list[subprocess.Popen[bytes] | None] = []
        for start, stop in windows:
            command = [*python, str(start), str(stop), str(width)]
            try:
                process = subprocess.Popen(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )  # fmt: skip
            except OSError:
                process = None
            self._processes.append(process)

    def results(self) -> Iterator[tuple[tuple[int, int], Counts | None]]:
        """Each window and what was counted there; None where the helper failed."""
        for window, process in zip(self._windows, self._processes, strict=True):
            found = None
            if process is not None:
                told = process.communicate()[0]
                if process.returncode == 0:
                    found = pickle.loads(told)  # written by our own child
            yield window, found

    def __enter__(self) -> _Helpers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process is not None and process.poll() is None:
                process.kill()
                process.communicate()


def _windows(fd: int, start: int, size: int, several: int) -> list[int]:
    """Line starts that cut the rest of the file into about equal parts."""
    found = []
    for i in range(1, several):
        at = start + (size - start) * i // several
        while at < size:
            text = os.pread(fd, 1 << 16, at)
            end = text.find(b"\n")
            at += end + 1 if end >= 0 else len(text)
            if end >= 0 or not text:
                break
        if start < at < size and at not in found:
            found.append(at)
    return found


def _help(path: str, start: str, stop: str, width: str) -> None:
    """What a helper does: counts a window and writes it, pickled, to its standard output."""
    counts = Counts(())
    counts.sums, counts.valid = zeros(int(width) - 1, float), zeros(int(width) - 1)
    with open(path, "rb") as f:
        counts._add_window(f.fileno(), int(start), int(stop), int(width))
    counts._flush()
    sys.stdout.buffer.write(pickle.dumps(counts, protocol=5))


if __name__ == "__main__":
    # Under the module's own name, so that the pickle can be read by who asked.
    from unbroken.samples.wide import _help as help_

    help_(*sys.argv[1:])
