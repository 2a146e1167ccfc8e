"""What root may run: nothing that somebody else could have written."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

from ...errors import UsageError


def find_writable(paths: Iterable[str]) -> str | None:
    """The first of these files and folders, or of what they lie in, that somebody besides root can write; None where none is."""
    for path in paths:
        at = Path(path or ".").absolute()
        for place in (at, *at.parents):
            try:
                found = place.stat()
            except OSError:
                continue
            shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            # In a folder with the sticky bit (/tmp) others cannot replace what is root's.
            if found.st_uid != 0 or (shared and not (place != at and found.st_mode & stat.S_ISVTX)):
                return str(place)
    return None


def refuse_as_root() -> None:
    """Raises UsageError where root would run, or read, what others can change; does nothing for other users."""
    if os.geteuid() != 0:
        return
    if os.environ.get("PYTHONPATH"):
        raise UsageError(
            "root does not check with a PYTHONPATH: whoever can write there could run anything",
            hint="Unset PYTHONPATH, or start it as `python -I -m unbroken check`",
        )
    where = find_writable([p for p in (*sys.path, sys.executable) if os.path.exists(p or ".")])
    if where is not None:
        raise UsageError(
            "root does not check with code that others can change",
            where=where,
            hint="Install unbroken where only root can write, and start it as `python -I -m unbroken check` from there",
        )
