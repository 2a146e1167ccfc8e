"""The volatile folder of a run on this machine: held while a supervisor uses it, removed once nothing of the run is left."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ..private import private_folder
from .holding.subreaper import is_listening

RECORD = "cluster.json"
"""Which nodes were given, and cordons: what a successor has to know."""


@contextlib.contextmanager
def hold_run(root: Path) -> Iterator[None]:
    """Keeps a run's volatile folder from `forget_run` while a supervisor uses it, also where its last agent ends just as it
    starts. Raises UnsafeFile, OSError."""
    while True:
        try:
            private_folder(root)
            held = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            if not root.parent.is_dir():
                raise
            continue  # it was removed in between
        fcntl.flock(held, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(root), os.fstat(held)):
                break
        os.close(held)  # it was removed in between
    try:
        yield
    finally:
        os.close(held)


def forget_run(root: Path) -> None:
    """Removes a run's volatile folder, and what is noted there of its nodes, where nothing of any node is left, and no
    supervisor listens or holds it."""
    with contextlib.suppress(OSError):
        held = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in root.glob("*.sock"):
                if not is_listening(str(path)):
                    path.unlink(missing_ok=True)
            if [p.name for p in root.iterdir()] == [RECORD]:
                (root / RECORD).unlink()
            root.rmdir()
        finally:
            os.close(held)
