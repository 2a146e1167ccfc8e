"""How much memory may be taken, and taking it: pages of a memfd are allocated before anyone writes to them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

PIECE_BYTES = 128 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


def fill_pages(fd: int, size: int) -> None:
    """Allocates all pages of a memfd, piece by piece. Raises OSError (ENOSPC, ENOMEM) instead of a later SIGBUS."""
    for start in range(0, size, PIECE_BYTES):
        os.posix_fallocate(fd, start, min(PIECE_BYTES, size - start))


def populate(address: int, size: int) -> None:
    """Enters mapped pages that are filled already into this process's page table, ten times faster than by touching them.

    Only a help: an older kernel refuses, and they are entered one by one when they are first used. Lets other threads run.
    """
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _POPULATE_WRITE)


def available_memory() -> int | None:
    """Bytes that can still be allocated here: the smaller of the machine's and the cgroup's; None if unknown."""
    found = [n for n in (_meminfo("MemAvailable"), _cgroup_left()) if n is not None]
    return min(found, default=None)


def default_budget() -> int:
    """60 % of the memory that is there: snapshots must never push the trainer out."""
    total = [n for n in (_meminfo("MemTotal"), _cgroup_limit()) if n is not None]
    return int(0.6 * min(total, default=8 << 30))


def _meminfo(key: str) -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _cgroup_folder() -> Path | None:
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return Path("/sys/fs/cgroup" + line[3:])
    except OSError:
        pass
    return None


def _cgroup_limit() -> int | None:
    folder = _cgroup_folder()
    limits: list[int] = []
    while folder is not None and folder != Path("/sys/fs"):
        text = _read(folder / "memory.max")
        if text.isdigit():
            limits.append(int(text))
        folder = folder.parent
    return min(limits, default=None)


def _cgroup_left() -> int | None:
    folder, limit = _cgroup_folder(), _cgroup_limit()
    if folder is None or limit is None:
        return None
    used = _read(folder / "memory.current")
    # Page cache counts as used but is given back on demand.
    cache = next(
        (
            int(x.split()[1])
            for x in _read(folder / "memory.stat").splitlines()
            if x.startswith("inactive_file ")
        ),
        0,
    )
    return max(0, limit - int(used) + cache) if used.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
