"""A file that is written, synced and read back: whether the bytes are the same, and how fast that goes."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ....units import Bytes
from ..result import CheckResult, State

_CHUNK = 4 << 20


def check_disk(
    folder: Path,
    size: int = 256 << 20,
    seconds: float = 10.0,
    after: Callable[[int], object] = lambda fd: None,
) -> CheckResult:
    """Writes up to `size` bytes below `folder`, under a name that nobody knows, and removes them. `after` is called with the
    open file between writing and reading: tests flip bits there."""
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".unbroken-check-") as file:
            fd = file.fileno()
            written, write_s = _write(fd, size, seconds)
            after(fd)
            # The pages are dropped, so that the read comes from the disk where the file system lets that happen.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            wrong, read_s = _read(fd, written)
    except OSError as e:
        return CheckResult("disk", State.BAD, f"it takes no bytes: {e.strerror}", str(folder))
    if wrong is not None:
        return CheckResult(
            "disk", State.BAD, f"byte {wrong:,} came back otherwise than it was written", str(folder)
        )
    size = written * len(_pattern(0))
    rate = [Bytes(int(size / max(s, 1e-9))) for s in (write_s, read_s)]
    text = f"{Bytes(size)} came back as they were written; {rate[0]}/s written and synced, {rate[1]}/s read"
    return CheckResult("disk", State.GOOD, text, str(folder))


def _pattern(number: int) -> bytes:
    """The bytes of one chunk: no two are the same."""
    return (number.to_bytes(8, "little") + bytes(range(256)) * 31)[: 8 * 992] * (_CHUNK // (8 * 992))


def _write(fd: int, size: int, seconds: float) -> tuple[int, float]:
    """How many chunks were written, and the seconds that it took."""
    began, number = time.monotonic(), 0
    while number * _CHUNK < size and time.monotonic() - began < seconds:
        data = memoryview(_pattern(number))
        while data:
            data = data[os.write(fd, data) :]
        number += 1
    os.fsync(fd)
    return number, time.monotonic() - began


def _read(fd: int, chunks: int) -> tuple[int | None, float]:
    """The first byte that differs, None where none does."""
    began, at = time.monotonic(), 0
    for number in range(chunks):
        wanted = _pattern(number)
        found = os.pread(fd, len(wanted), at)
        if found != wanted:
            same = next(
                (i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), len(found)
            )
            return at + same, time.monotonic() - began
        at += len(wanted)
    return None, time.monotonic() - began
