"""Whether a run directory, or a node's folder, can take what a run writes, and the wait for a full one of a run that goes on."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ..errors import StorageError
from ..progress import RunDir
from ..units import Bytes

RUN_DIR_NEEDS = Bytes("64MiB")
"""What a new run finds free at least, for logs, journal and checkpoints."""
_RETRY_S = 0.5


def check_places(run_dir: RunDir, at_least: Bytes = RUN_DIR_NEEDS) -> None:
    """Raises StorageError unless run directory and checkpoints can be written, and as many bytes are free."""
    try:
        _write(run_dir)
    except OSError as e:
        raise unwritable(run_dir, e) from e
    free = shutil.disk_usage(run_dir.path).free
    if free < at_least:
        raise StorageError(
            f"only {Bytes(free)} are free for logs, journal and checkpoints, at least {at_least} are needed",
            where=str(run_dir.path),
            hint="Free space or choose another --run-dir",
        )


def wait_for_room(run_dir: RunDir, say: Callable[[str], None]) -> None:
    """Waits while the disk of a run that goes on is full, as a supervisor does that meets this later.

    Whoever gives up here leaves keepers with what is in memory only, and nobody to take it over. Anything but a full disk
    is left to `check_places`.
    """
    told = False
    while True:
        try:
            _write(run_dir)
            return
        except OSError as e:
            if not is_full(e):
                return
            if not told:
                say(
                    f"the run's directory cannot be written ({e.strerror}); it goes on as soon as there is room: {run_dir.path}"
                )
                told = True
        time.sleep(_RETRY_S)


def find_no_room(folder: Path, size: int = 4096) -> str:
    """Why no folder with a file of `size` bytes in it can be made there for want of room, in words; "" where it can, or where something else is
    wrong, which whoever writes there is told."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".probe-") as made:
            (Path(made) / "probe").write_bytes(b"x" * size)
    except OSError as e:
        return describe_no_room(e, folder) if is_full(e) else ""
    return ""


def describe_no_room(e: OSError, folder: Path) -> str:
    """The refusal of a full disk, with the place."""
    return f"{e.filename or folder}: {e.strerror}"


def is_full(e: OSError) -> bool:
    """Whether room, or a quota, is all that lacks."""
    return e.errno in (errno.ENOSPC, errno.EDQUOT)


def _write(run_dir: RunDir) -> None:
    run_dir.create()
    for folder in (run_dir.path, run_dir.terms, run_dir.journals, run_dir.checkpoints):
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as probe:
            probe.write(b"x" * 4096)
            probe.flush()
            os.fsync(probe.fileno())


def unwritable(run_dir: RunDir, e: OSError) -> StorageError:
    """What is said where it cannot be written."""
    return StorageError(
        f"the run directory cannot be written: {e.strerror}",
        where=str(e.filename or run_dir.path),
        hint="Choose another --run-dir, or free space and permissions there",
    )
