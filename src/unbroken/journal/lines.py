"""Journals: one JSON object a line, each with its own checksum, appended by one writer and read by anybody.

A line is `{"sum":"<16 hex digits>",` and the rest of the object; the sum is xxh3_64 of `{` and that rest. What does not
check is never believed: at the end of a file it is a torn write, elsewhere it is damage.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from . import codec
from .checksummed import digest

T = TypeVar("T")
_HEAD = b'{"sum":"'
_PREFIX = len('{"sum":"0123456789abcdef",')


def encode(record: Mapping[str, Any]) -> bytes:
    """One line, with its checksum and newline. The record may not be empty."""
    body = json.dumps(record, separators=(",", ":")).encode()
    return b'%b%b",%b\n' % (_HEAD, digest(body).encode(), body[1:])


def decode(line: bytes) -> dict[str, Any] | None:
    """The record of one line, or None where it does not check."""
    if not line.endswith(b"\n"):
        return None
    if line.startswith(_HEAD) and line[24:_PREFIX] == b'",':
        body, right = b"{" + line[_PREFIX:-1], line[8:24]
        if digest(body).encode() != right:
            return None
    elif line[8:10] == b" {":
        # So evaluations wrote until the end of November 2026: 8 hex digits of CRC-32, a space, the object.
        body = line[9:-1]
        if b"%08x" % zlib.crc32(body) != line[:8]:
            return None
    else:
        return None
    try:
        record = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


@dataclass(frozen=True)
class JournalLine:
    """A line of a journal: where it lies in its file, and its record, None where it does not check."""

    offset: int
    length: int
    record: dict[str, Any] | None
    torn: bool = False
    """The last one, without a newline: whoever wrote it was cut short, or is still writing."""

    @property
    def end(self) -> int:
        """Where the next one begins."""
        return self.offset + self.length


def read(path: Path, limit: int | None = None) -> Iterator[JournalLine]:
    """The lines of a journal, up to `limit` bytes of it; none of a file that is not there."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed by the with below
    except FileNotFoundError:
        return
    with file:
        offset = 0
        for line in file:
            if limit is not None:
                line = line[: max(0, limit - offset)]
            if not line:
                return
            yield JournalLine(offset, len(line), decode(line), not line.endswith(b"\n"))
            offset += len(line)


def records(path: Path) -> Iterator[dict[str, Any]]:
    """What checks, in order."""
    return (line.record for line in read(path) if line.record is not None)


def read_as(path: Path, kind: type[T]) -> Iterator[T]:
    """What checks, as such dataclasses; keys that these do not know are passed over. Raises InputError where a field is wrong."""
    return (codec.decode(kind, record, where=str(path), newer=True) for record in records(path))


def record_at(path: Path, offset: int, length: int) -> dict[str, Any] | None:
    """The record of one line, by the place that `append` or `read` gave."""
    with open(path, "rb") as f:
        f.seek(offset)
        return decode(f.read(length))


class Appender:
    """Appends to one journal, as its only writer. After a torn line of an earlier writer a new one begins.

    With `new` the file may not be there yet: raises FileExistsError. Raises OSError as the system gives it.
    """

    def __init__(self, path: Path, *, new: bool = False) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (os.O_EXCL if new else 0)
        self._fd = os.open(path, flags, 0o644)
        try:
            size = os.fstat(self._fd).st_size
            if size and os.pread(self._fd, 1, size - 1) != b"\n":
                os.write(self._fd, b"\n")
        except OSError:
            os.close(self._fd)
            raise

    def append(self, record: Mapping[str, Any], *, durable: bool = False) -> tuple[int, int]:
        """Writes one record; returns its offset and length. With `durable` it is on disk then, else in the kernel's hands.

        Raises OSError when it cannot be written whole (a full disk): nothing of it is left, and nobody must act on it.
        """
        data = encode(record)
        start = os.fstat(self._fd).st_size
        try:
            if os.write(self._fd, data) != len(data):
                raise OSError(28, "No space left on device", str(self.path))
            if durable:
                os.fsync(self._fd)
        except OSError:
            # A half-written line would spoil the next one: cut it off again.
            os.ftruncate(self._fd, start)
            raise
        return start, len(data)

    def sync(self) -> None:
        """Makes what was appended durable."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Closes the file; syncs nothing."""
        os.close(self._fd)
