"""The distribution of a wide utilisation table, straight from its text, at the speed of the disk.

The released tables have a row every 15 seconds and a column for each server or GPU: 80 GB. To draw their
distributions no reading need be stored: the text is cut into pieces at line ends, every number is parsed with a
handful of integer operations on eight characters at once, for all numbers of a piece together, and counted. Counts
are exact to 0.001 (the release has three decimals) below 4,194.304 and to 1/4096 of the value above.

The parsing follows Lemire's eight-digit trick ("Quickly parsing eight digits", 2022); numbers that are longer,
negative or in exponent form take a slower way and are as exact.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

PIECE = 1 << 17
"""Bytes of a piece: its arrays stay in a core's cache."""
SEVERAL_FROM = 64_000_000
"""Bytes from which on helpers are worth their start."""
MOST_PROCESSES = 12
"""However many cores there are: each takes about 100 MB, and 2 GiB are promised."""
LINEAR = 1 << 22
"""Thousandths below this have a bin each; above, bins are 2^-12 of the value wide."""
_SHIFT = 52 - 12
_COMMA, _NEWLINE, _SLASH = 44, 10, 47
_SCALES = np.array([1000, 100, 10, 1, 0, 0, 0, 0], dtype=np.uint64)
_EMPTY = np.empty(0, dtype=np.uint32)


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
    linear: NDArray[np.int64] = field(default_factory=lambda: _zeros(1), repr=False)
    large: dict[int, int] = field(default_factory=dict)
    """Bin number (the upper bits of the float) and count, for values above the linear range or below zero."""
    sums: NDArray[np.float64] = field(default_factory=lambda: _zeros(0))
    """Of each column, for its mean."""
    valid: NDArray[np.int64] = field(default_factory=lambda: _zeros(0))
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

    def _add_stretch(self, fd: int, start: int, stop: int, width: int) -> None:
        for at, length in _pieces(fd, start, stop):
            self._add(_count_piece(fd, at, length, width))

    def _merge(self, later: Counts) -> None:
        """Adds the counts of a stretch that follows."""
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

    def _add(self, part: _Part) -> None:
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
        self.linear[0] -= part.zeros
        if self._waiting >= LINEAR:
            self._flush()
        if part.large:
            bins = np.array(part.large).view(np.int64) >> _SHIFT
            for number, n in zip(*np.unique(bins, return_counts=True), strict=True):
                self.large[int(number)] = self.large.get(int(number), 0) + int(n)
        self.sums += part.sums
        self.valid += part.valid


@dataclass
class _Part:
    rows: int
    missing: int
    ragged: int
    unreadable: int
    first: str
    last: str
    small: NDArray[np.uint32]
    """Thousandths in the linear range, `zeros` of them too many zeros."""
    extra: list[int]
    """More of them."""
    zeros: int
    large: list[float]
    """Other thousandths."""
    sums: NDArray[np.float64]
    valid: NDArray[np.int64]


def count(path: Path, *, processes: int = 2) -> Counts:
    """Counts a wide table: a header, then rows of a time and a number for each column.

    A large table is counted by `processes` at once (`MOST_PROCESSES` at most), this one and helpers that each take a
    stretch of the file: the steps are too short for threads, which would wait for the interpreter's lock. Takes less
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
            counts.sums, counts.valid = _zeros(len(names) - 1, float), _zeros(len(names) - 1)
            several = min(processes, MOST_PROCESSES) if size >= SEVERAL_FROM else 1
            bounds = [len(head), *_stretches(f.fileno(), len(head), size, several), size]
            with _Helpers(path, len(names), list(pairwise(bounds))[1:]) as helpers:
                counts._add_stretch(f.fileno(), bounds[0], bounds[1], len(names))
                for stretch, found in helpers.results():
                    if found is not None:
                        counts._merge(found)
                    else:  # a helper was killed, or could not be started: its work is done here
                        counts._add_stretch(f.fileno(), *stretch, len(names))
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"the table cannot be read: {e}", where=str(path)) from e
    if counts.rows == 0:
        raise InputError("the table has no row of the header's width", where=str(path))
    return counts


class _Helpers:
    """A process of its own for each stretch (from, to); all are gone when the block is left.

    They are plain commands, and no pool of multiprocessing's, because that would import the caller's script again.
    """

    def __init__(self, path: Path, width: int, stretches: list[tuple[int, int]]) -> None:
        places = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
        # -P: what lies in the folder that the user stands in is none of ours.
        python = [sys.executable, "-P", "-m", __name__, str(path.absolute())]
        self._stretches = stretches
        self._processes: list[subprocess.Popen[bytes] | None] = []
        for start, stop in stretches:
            command = [*python, str(start), str(stop), str(width)]
            try:
                process = subprocess.Popen(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )  # fmt: skip
            except OSError:
                process = None
            self._processes.append(process)

    def results(self) -> Iterator[tuple[tuple[int, int], Counts | None]]:
        """Each stretch and what was counted there; None where the helper failed."""
        for stretch, process in zip(self._stretches, self._processes, strict=True):
            found = None
            if process is not None:
                told = process.communicate()[0]
                if process.returncode == 0:
                    found = pickle.loads(told)  # written by our own child
            yield stretch, found

    def __enter__(self) -> _Helpers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process is not None and process.poll() is None:
                process.kill()
                process.communicate()


def _stretches(fd: int, start: int, size: int, several: int) -> list[int]:
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


def _pieces(fd: int, start: int, size: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of pieces that end at line ends."""
    while start < size:
        want = PIECE
        while True:
            stop = min(size, start + want)
            if stop == size:
                break
            back = min(stop - start, 1 << 16)
            tail = os.pread(fd, back, stop - back)
            at = tail.rfind(b"\n")
            if at >= 0:
                stop = stop - back + at + 1
                break
            if back == stop - start or want > 1 << 28:
                want *= 2  # one line is longer than a piece
                continue
            full = os.pread(fd, stop - start, start)
            at = full.rfind(b"\n")
            if at >= 0:
                stop = start + at + 1
                break
            want *= 2
        yield start, stop - start
        start = stop


class _Scratch(threading.local):
    """Arrays that a thread uses again for every piece: fresh ones would cost more than the arithmetic on them."""

    def __init__(self) -> None:
        self.text = np.zeros(8 + PIECE + 1, dtype=np.uint8)
        self.mask = np.empty(0, dtype=np.bool_)
        self.arrays: list[NDArray[np.uint64]] = []

    def bytes_of(self, fd: int, start: int, length: int) -> NDArray[np.uint8]:
        """The piece behind eight zeros, ended by a newline."""
        if len(self.text) < 8 + length + 1:
            self.text = np.zeros(8 + length + 1, dtype=np.uint8)
        at = 0
        while at < length:
            got = os.preadv(fd, [self.text.data[8 + at : 8 + length]], start + at)
            if got == 0:
                raise OSError("the file became shorter while it was read")
            at += got
        end = 8 + length
        if self.text[end - 1] != _NEWLINE:
            self.text[end] = _NEWLINE
            end += 1
        return self.text[:end]

    def words(self, count: int, size: int) -> list[NDArray[np.uint64]]:
        """`count` arrays of `size` integers, with anything in them."""
        while len(self.arrays) < count:
            self.arrays.append(np.empty(0, dtype=np.uint64))
        for i in range(count):
            if len(self.arrays[i]) < size:
                self.arrays[i] = np.empty(size + size // 8, dtype=np.uint64)
        return [a[:size] for a in self.arrays[:count]]


_scratch = _Scratch()


def _count_piece(fd: int, start: int, length: int, width: int) -> _Part:
    text = _scratch.bytes_of(fd, start, length)
    line_ends = np.flatnonzero(text[8:] == _NEWLINE) + 8
    if len(_scratch.mask) < len(text):
        _scratch.mask = np.empty(len(text), dtype=np.bool_)
    separator = np.equal(text, _COMMA, out=_scratch.mask[: len(text)])
    separator[line_ends] = True
    ends = np.flatnonzero(separator)
    rows, ragged = len(line_ends), 0
    firsts = np.concatenate([[8], line_ends[:-1] + 1])
    if len(ends) != rows * width or not np.array_equal(ends[width - 1 :: width], line_ends):
        cells = np.diff(np.searchsorted(ends, line_ends), prepend=-1)
        regular = cells == width
        blank = (cells == 1) & (np.diff(line_ends, prepend=7) <= 2)
        ragged, rows = int((~regular & ~blank).sum()), int(regular.sum())
        firsts, ends = firsts[regular], ends[np.repeat(regular, cells)]
    if rows == 0:
        return _Part(0, 0, ragged, 0, "", "", _EMPTY, [], 0, [], _zeros(width - 1, float), _zeros(width - 1))
    table = ends.reshape(rows, width)
    table[:, -1] -= text[table[:, -1] - 1] == 13  # lines that end with CR LF
    e = np.ascontiguousarray(table[:, 1:]).ravel()
    # A cell begins behind the separator before it: the length is the distance less one.
    gap = (table[:, 1:] - table[:, :-1]).ravel()
    values, odd = _parse(text, e, gap)
    slow, unreadable, missing = _parse_odd(text, e, gap, odd)
    shape = (rows, width - 1)
    sums = values.reshape(shape).sum(0) / 1000
    valid = rows - np.bincount(odd % (width - 1), minlength=width - 1)
    rest: list[float] = []
    if values.max() >= LINEAR:
        rest = values[values >= LINEAR].astype(float).tolist()
        values = values[values < LINEAR]
    # What stands for an odd cell is counted as zero for now: taking them out would cost more than correcting it.
    small, zeros = values.astype(np.uint32), len(odd)
    extra: list[int] = []
    for index, value in slow:
        column = index % (width - 1)
        sums[column] += value
        valid[column] += 1
        if 0 <= value * 1000 < LINEAR - 1:
            extra.append(round(value * 1000))
        else:
            rest.append(value * 1000)
    first, last = (bytes(text[firsts[i] : table[i, 0]]).decode(errors="replace") for i in (0, -1))
    return _Part(rows, missing, ragged, unreadable, first, last, small, extra, zeros, rest, sums, valid)


def _parse(
    text: NDArray[np.uint8], e: NDArray[np.int64], gap: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """(thousandths, indices of cells that are no plain numbers) of cells that end before `e`; `gap` is length + 1.

    Plain are 1-8 characters with at most three decimals and no point at the end. What is not plain is looked for in
    all cells of a piece at once, and cell by cell only where something was found: every pass over the cells costs.
    """
    u = np.uint64
    w, x, front, bits = _scratch.words(4, len(e))
    # The eight characters that end a cell as one integer: the last character is its highest byte.
    words = np.ndarray(shape=(len(text) - 7,), dtype=np.uint64, buffer=text, strides=(1,))
    np.subtract(e, 8, out=x.view(np.int64))
    np.take(words, x.view(np.int64), out=w, mode="clip")
    w ^= u(0x3030303030303030)  # digits are 0-9 now, a point is 0x1E
    np.subtract(9, gap, out=bits.view(np.int64))
    odd = np.flatnonzero(bits >= u(8))  # no length of 1 to 8: such have wrapped around or are 8 themselves
    bits <<= u(3)
    w >>= bits  # characters before the cell become zeros in front of the number
    w <<= bits
    w[odd] = 0
    # The first byte with bit 4 must be the point; it becomes a zero.
    np.bitwise_and(w, u(0x1010101010101010), out=x)
    x >>= u(4)
    np.negative(x, out=front)
    x &= front
    np.multiply(x, u(0x1E), out=bits)
    w -= bits
    np.add(w, u(0x7676767676767676), out=front)
    front |= w
    wrong = int(np.bitwise_or.reduce(front)) & 0x8080808080808080
    if (
        wrong or (text == _SLASH).any()
    ):  # a slash in a point's place is the one character that would look like a digit
        bad = (front & u(0x8080808080808080)) != 0
        bad |= (w & (x * u(0xFF))) != 0
        odd = _more(odd, bad, w, x)
    np.multiply(
        x, u(0x0706050403020100), out=bits
    )  # the highest byte is the number of digits behind the point
    bits >>= u(56)
    if bits.max() > 3 or x.max() >= u(1 << 56):
        odd = _more(odd, (bits > u(3)) | (x >= u(1 << 56)), w, x)
        bits[odd] = 0
    # The digits before the point move up by one, onto it: bytes below it, times 256, less themselves.
    np.minimum(x, u(1), out=front)
    np.subtract(x, front, out=front)
    front &= w
    front *= u(0xFF)
    w += front
    w *= u(2561)
    w >>= u(8)
    w &= u(0x00FF00FF00FF00FF)
    w *= u(6553601)
    w >>= u(16)
    w &= u(0x0000FFFF0000FFFF)
    w *= u(42949672960001)
    w >>= u(32)
    np.take(_SCALES, bits.view(np.int64), out=front, mode="clip")
    w *= front
    return w, odd


def _more(
    odd: NDArray[np.int64], bad: NDArray[np.bool_], w: NDArray[np.uint64], x: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """The odd cells with those that are bad too; these count as zeros from here on."""
    bad[odd] = True
    w[bad] = 0
    x[bad] = 0
    return np.flatnonzero(bad)


def _parse_odd(
    text: NDArray[np.uint8], e: NDArray[np.int64], gap: NDArray[np.int64], odd: NDArray[np.int64]
) -> tuple[list[tuple[int, float]], int, int]:
    """((index, value) of the other numbers, cells that are none, missing cells)."""
    empty = gap[odd] == 1
    missing = int(empty.sum())
    unreadable = 0
    values: list[tuple[int, float]] = []
    for i in odd[~empty].tolist():
        cell = bytes(text[e[i] - gap[i] + 1 : e[i]]).strip().strip(b'"')
        try:
            value = float(cell or b"nan")
        except ValueError:
            if cell.lower() in (b"null", b"none", b"na", b"n/a"):
                missing += 1
            else:
                unreadable += 1
            continue
        if value != value or value in (float("inf"), float("-inf")):
            missing += 1
        else:
            values.append((i, value))
    return values, unreadable, missing


def _zeros(n: int, kind: type = int) -> Any:
    return np.zeros(n, dtype=np.float64 if kind is float else np.int64)


def _help(path: str, start: str, stop: str, width: str) -> None:
    """What a helper does: counts a stretch and writes it, pickled, to its standard output."""
    counts = Counts(())
    counts.sums, counts.valid = _zeros(int(width) - 1, float), _zeros(int(width) - 1)
    with open(path, "rb") as f:
        counts._add_stretch(f.fileno(), int(start), int(stop), int(width))
    counts._flush()
    sys.stdout.buffer.write(pickle.dumps(counts, protocol=5))


if __name__ == "__main__":
    # Under the module's own name, so that the pickle can be read by who asked.
    from unbroken.telemetry.wide import _help as help_

    help_(*sys.argv[1:])
