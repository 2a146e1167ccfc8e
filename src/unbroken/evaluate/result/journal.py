"""What happened in an evaluation: one event a line, with a checksum, appended by the coordinator alone.

A coordinator that is killed leaves at most one torn line at the end; the next one starts a new line after it, and
readers skip what does not check. Answers are not here but in answers.py, likewise checksummed.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..contracts import Json


def encode_line(value: Json) -> bytes:
    """A line with its checksum: 8 hex digits of CRC-32, a space, JSON, a newline."""
    text = json.dumps(value, separators=(",", ":")).encode()
    return b"%08x " % zlib.crc32(text) + text + b"\n"


def decode_line(line: bytes) -> Json:
    """The value of a sealed line; None if it is torn or damaged."""
    if len(line) < 10 or not line.endswith(b"\n") or line[8:9] != b" ":
        return None
    text = line[9:-1]
    try:
        if int(line[:8], 16) != zlib.crc32(text):
            return None
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_checked(path: Path) -> Iterator[tuple[int, int, Json]]:
    """(offset, length, value) of every whole line; nothing for a file that is not there."""
    return ((at, length, value) for at, length, value in read_lines(path) if value is not None)


def read_lines(path: Path) -> Iterator[tuple[int, int, Json]]:
    """As `read_checked`, with None for a line that is torn or damaged."""
    try:
        f = open(path, "rb")  # noqa: SIM115  closed by the with below
    except FileNotFoundError:
        return
    with f:
        offset = 0
        for line in f:
            yield offset, len(line), decode_line(line)
            offset += len(line)


def open_append(path: Path) -> int:
    """A descriptor to append sealed lines to, positioned after a whole line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        os.write(fd, b"\n")  # a torn line ends here
    return fd


class Journal:
    """The events of one evaluation."""

    def __init__(self, path: Path) -> None:
        self._fd = open_append(path)

    def write(self, event: str, **fields: Any) -> None:
        """Appends one event with its time."""
        os.write(self._fd, encode_line({"event": event, "at": round(time.time(), 6), **fields}))

    def sync(self) -> None:
        """Makes it durable."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Syncs and closes."""
        self.sync()
        os.close(self._fd)


def events(path: Path) -> list[dict[str, Any]]:
    """All whole events, oldest first."""
    return [v for _, _, v in read_checked(path) if isinstance(v, dict) and isinstance(v.get("event"), str)]
