"""One piece of a wide table's text, counted: every number is parsed together with all others of the piece.

A handful of integer operations on eight characters at once, after Lemire's eight-digit trick ("Quickly parsing eight
digits", 2022); numbers that are longer, negative or in exponent form take a slower way and are as exact.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

PIECE = 1 << 17
"""Bytes of a piece: its arrays stay in a core's cache."""
LINEAR = 1 << 22
"""Thousandths below this have a bin each; above, bins are 2^-12 of the value wide."""
_COMMA, _NEWLINE, _SLASH = 44, 10, 47
_SCALES = np.array([1000, 100, 10, 1, 0, 0, 0, 0], dtype=np.uint64)
_EMPTY = np.empty(0, dtype=np.uint32)


@dataclass
class Part:
    """What one piece adds to the counts."""

    rows: int
    missing: int
    ragged: int
    unreadable: int
    first: str
    last: str
    small: NDArray[np.uint32]
    """Thousandths in the linear range, `surplus` zeros among them stand for odd cells."""
    extra: list[int]
    """More of them."""
    surplus: int
    large: list[float]
    """Other thousandths."""
    sums: NDArray[np.float64]
    valid: NDArray[np.int64]


def pieces(fd: int, start: int, size: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of pieces between two line starts that end at line ends."""
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


def count_piece(fd: int, start: int, length: int, width: int) -> Part:
    """Counts the whole lines at (offset, length); a row has `width` cells, the first of them a time."""
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
        return Part(0, 0, ragged, 0, "", "", _EMPTY, [], 0, [], zeros(width - 1, float), zeros(width - 1))
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
    small, surplus = values.astype(np.uint32), len(odd)
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
    return Part(rows, missing, ragged, unreadable, first, last, small, extra, surplus, rest, sums, valid)


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


def zeros(n: int, kind: type = int) -> Any:
    """An array of `n` zeros: float64 or int64."""
    return np.zeros(n, dtype=np.float64 if kind is float else np.int64)
