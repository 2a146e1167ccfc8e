"""Where results go: refused before the work where they cannot be written, and in one paragraph where they fail later."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import StorageError, UsageError


def folder_for(path: Path) -> None:
    """Creates a folder for results, so that hours of work do not end at it. Raises UsageError, StorageError."""
    if path.exists() and not path.is_dir():
        raise UsageError("the output is a file, not a folder", where=str(path), hint="Name a folder")
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    may_write(path)


def file_for(path: Path) -> None:
    """Returns where a result can be written as this file. Raises UsageError, StorageError."""
    if path.is_dir():
        raise UsageError("the output is a folder, not a file", where=str(path), hint="Name a file in it")
    if not path.parent.is_dir():
        raise UsageError("the output's folder does not exist", where=str(path.parent), hint="Create it first")
    may_write(path.parent)


def may_write(folder: Path) -> None:
    """Returns where this user may create files in the folder. Raises StorageError."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StorageError(
            "results cannot be written here: Permission denied", where=str(folder), hint="Name another place"
        )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what the disk refuses, to us or to DuckDB, into a StorageError."""
    import duckdb

    try:
        yield
    except (OSError, duckdb.IOException) as e:
        why = (e.strerror if isinstance(e, OSError) else None) or str(e).splitlines()[0]
        raise StorageError(
            f"results cannot be written: {why}",
            where=str(path),
            hint="Free space there, or name another place",
        ) from e
