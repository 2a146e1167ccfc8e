"""Files that appear whole or not at all: written aside, fsynced, renamed, folder fsynced."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any


def fsync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_bytes(path: Path, data: bytes | memoryview, *, durable: bool = True, mode: int = 0o666) -> None:
    """Replaces `path` by `data`; a reader sees the old file or the new one, never a part.

    `mode` is less the umask from the first moment on. Raises OSError as the system gives it; the file aside is removed
    then.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.aside")
    try:
        with open(aside, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as f:
            f.write(data)
            f.flush()
            if durable:
                os.fsync(f.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    if durable:
        fsync_folder(path.parent)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """As `write_bytes`, in UTF-8."""
    write_bytes(path, text.encode(), durable=durable)


def write_json(path: Path, value: Any, *, durable: bool = True, indent: int | None = 1) -> None:
    """As `write_bytes`, as JSON with sorted keys and a final newline."""
    write_bytes(path, (json.dumps(value, indent=indent, sort_keys=True) + "\n").encode(), durable=durable)


def create_exclusive(path: Path, data: bytes, *, mode: int = 0o666) -> bool:
    """Creates `path` with `data`, whole and durable, and returns True; False if it exists already.

    `mode` is less the umask from the first moment on, so that a secret is never readable by others.

    Uses link(2), which is atomic on local file systems and on NFS, where O_EXCL of old servers is not.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.aside")
    try:
        with open(aside, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        try:
            os.link(aside, path)
        except FileExistsError:
            # An NFS server whose answer was lost is asked again, and then finds our own link in the way.
            if os.stat(aside).st_nlink != 2:
                return False
        fsync_folder(path.parent)
        return True
    finally:
        aside.unlink(missing_ok=True)
