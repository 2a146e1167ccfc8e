"""Which sample is being scored, written where the pool can read it.

A scorer is someone's code: it may hang, eat all memory or take its process down. Whoever finds the process dead, or
stuck for too long, learns here which sample did it, counts that one as crashed, and scores the rest.
"""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

_RECORD = struct.Struct("<qd")
_file: int | None = None


def open_watch(path: Path) -> None:
    """From now on `at` writes to this file (an older one is overwritten)."""
    global _file
    close_watch()
    _file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)


def close_watch() -> None:
    """`at` does nothing from now on."""
    global _file
    if _file is not None:
        os.close(_file)
    _file = None


def at(sample: int) -> None:
    """Says that this sample is being scored now; free where nobody watches."""
    if _file is not None:
        os.pwrite(_file, _RECORD.pack(sample, time.time()), 0)


def read_watch(path: Path) -> tuple[int, float] | None:
    """(sample, when it began), or None before the first."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return _RECORD.unpack(data) if len(data) == _RECORD.size else None
