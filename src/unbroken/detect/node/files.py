"""Folders that a training writes to, and shared memory: whether they take bytes, and have room."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ...units import Bytes
from .result import CheckResult, State

_SHM_LEAST = Bytes("64MiB")
_DISK_LEAST = Bytes("1GiB")


def check_folder(folder: Path, least: Bytes = _DISK_LEAST) -> CheckResult:
    """Writes and syncs 4 KiB, under a name that nobody knows, and removes them."""
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".unbroken-check-") as probe:
            probe.write(b"x" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
        room = os.statvfs(folder)
    except OSError as e:
        return CheckResult("folder", State.BAD, f"it takes no bytes: {e.strerror}", str(folder))
    free = Bytes(room.f_bavail * room.f_frsize)
    if free < least:
        return CheckResult("folder", State.BAD, f"{free} are free, {least} are the least", str(folder))
    return CheckResult("folder", State.GOOD, f"it takes bytes; {free} are free", str(folder))


def check_shared_memory(folder: Path = Path("/dev/shm")) -> CheckResult:
    """Room for what data loaders and NCCL put there."""
    found = check_folder(folder, _SHM_LEAST)
    return CheckResult("shared memory", found.state, found.text, str(folder))
