"""Logs that grow without end: their middle is given back to the disk, and readers pass over it.

The writer keeps the file open and appends; so nothing is renamed or cut off. The blocks of the middle are freed in place
(`fallocate`, FALLOC_FL_PUNCH_HOLE), where the file system can: offsets stay as they were.
"""

from __future__ import annotations

import ctypes
import io
import os
from pathlib import Path

_PUNCH = 3
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE."""
_BLOCK = 4096
_LEAST = 16 * _BLOCK
LEFT_OUT = b"\n--- the middle of this log was left out here, to keep the run's logs within --keep-logs ---\n"
_libc = ctypes.CDLL(None, use_errno=True)


def used_bytes(path: Path) -> int:
    """Bytes that a file takes on the disk, at most its length; 0 where it is not there."""
    try:
        info = path.stat()
    except OSError:
        return 0
    return min(info.st_size, info.st_blocks * 512)


def drop_middle(path: Path, head: int, tail: int) -> int:
    """Keeps the first `head` and the last `tail` bytes of a log, and says in it that the rest was left out. Returns the bytes that
    were freed, 0 where it is not worth it. Raises OSError, also where the file system cannot do it."""
    start = -(-max(head, len(LEFT_OUT)) // _BLOCK) * _BLOCK
    end = (path.stat().st_size - tail) // _BLOCK * _BLOCK
    before = used_bytes(path)
    if end - start < _LEAST or before < start + tail + _LEAST:
        return 0
    with open(path, "rb+", buffering=0) as f:
        args = (ctypes.c_int(_PUNCH), ctypes.c_int64(start), ctypes.c_int64(end - start))
        if _libc.fallocate(ctypes.c_int(f.fileno()), *args) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
        os.pwrite(f.fileno(), LEFT_OUT, start - len(LEFT_OUT))
    return before - used_bytes(path)


def has_hole(path: Path) -> bool:
    """Whether a file takes clearly less than its length. Raises OSError."""
    info = path.stat()
    return info.st_blocks * 512 + _LEAST < info.st_size


class _PastHoles(io.FileIO):
    """Reads on from one piece of data to the next."""

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        at = os.lseek(self.fileno(), 0, os.SEEK_CUR)
        try:
            data = os.lseek(self.fileno(), at, os.SEEK_DATA)
            until = os.lseek(self.fileno(), data, os.SEEK_HOLE)
            os.lseek(self.fileno(), data, os.SEEK_SET)
        except OSError:
            return 0  # nothing but a hole is left, or nothing
        return super().readinto(view[: until - data]) or 0


def open_past_holes(path: Path) -> io.BufferedReader:
    """A log to be read from its beginning to its end, as if what was left out had never been. Not to be sought in."""
    return io.BufferedReader(_PastHoles(path))
