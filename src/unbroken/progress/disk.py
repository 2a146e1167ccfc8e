"""Whether the file system of a run directory takes what is written to it, by a look from outside."""

from __future__ import annotations

import os
from pathlib import Path

from ..units import Bytes

_ROOM_LEAST = Bytes("1MiB")


def find_trouble(path: Path) -> str:
    """Why nothing can be written there now, in words; "" where it can. Raises FileNotFoundError; may block on a file system
    that hangs."""
    try:
        free = os.statvfs(path)
    except FileNotFoundError:
        raise
    except OSError as e:
        return f"{path} cannot be reached: {e.strerror}"
    if free.f_flag & os.ST_RDONLY:
        return f"{path} is read-only now"
    if free.f_bavail * free.f_frsize < _ROOM_LEAST:
        return f"{path} is full"
    return ""
