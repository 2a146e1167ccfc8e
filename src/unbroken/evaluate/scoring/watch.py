"""Which sample is being scored, written where the pool can read it.

A scorer is someone's code: it may hang, eat all memory or take its process down. Whoever finds the process dead, or
stuck for too long, learns here which sample did it, counts that one as crashed, and scores the rest.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

_RECORD = struct.Struct("<qd")
_tell: Callable[[int], object] | None = None
_file: int | None = None


def open_watch(path: Path) -> None:
    """From now on `at` writes to this file (an older one is overwritten). Raises OSError."""
    global _file
    close_watch()
    file = _file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    os.pwrite(file, _RECORD.pack(-1, 0.0), 0)  # a disk that is full says so here, and not in the scorer
    tell(lambda sample: os.pwrite(file, _RECORD.pack(sample, time.monotonic()), 0))


def tell(where: Callable[[int], object] | None) -> None:
    """From now on `at` calls this."""
    global _tell
    _tell = where


def close_watch() -> None:
    """`at` does nothing from now on, if it wrote to a file."""
    global _file
    if _file is not None:
        os.close(_file)
        _file = None
        tell(None)


def at(sample: int) -> None:
    """Says that this sample is being scored now (-1: none is); free where nobody watches."""
    if _tell is not None:
        _tell(sample)


def read_watch(path: Path) -> tuple[int, float] | None:
    """(sample, seconds since it began), or None before the first and between two."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(data) != _RECORD.size:
        return None
    sample, since = _RECORD.unpack(data)
    return None if sample < 0 else (sample, time.monotonic() - since)
