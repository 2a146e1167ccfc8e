"""A process that outlives an evaluation's processes and removes a model's copy once none of them is left.

python -m unbroken.evaluate.model.reaper ROOT HASH LINGER
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from pathlib import Path

from .cache import _locked, live_references, remove

EVERY_S = 0.5


def watch(root: Path, name: str, linger_s: float) -> None:
    """Returns when the copy is gone: removed by its last user, or here, `linger_s` after the last reference died."""
    fd = os.open(root / f"{name}.watch", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # another one watches
    while True:
        _until_gone(root, name, linger_s)
        with _locked(root, name):
            if not (
                root / name
            ).exists():  # else it came meanwhile, with the lock; its own watcher found us here
                remove(root, name)
                return


def _until_gone(root: Path, name: str, linger_s: float) -> None:
    unused_since: float | None = None
    while (root / name).exists():
        if live_references(root, name):
            unused_since = None
        else:
            unused_since = unused_since or time.monotonic()
            if time.monotonic() - unused_since >= linger_s:
                with _locked(root, name):
                    if not live_references(root, name):
                        remove(root, name)
                        return
        time.sleep(EVERY_S)


if __name__ == "__main__":
    watch(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
