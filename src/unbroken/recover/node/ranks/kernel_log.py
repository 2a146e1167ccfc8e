"""Whether the kernel killed a process because memory ran out, from its log, where that can be read."""

from __future__ import annotations

import contextlib
import os
import re
import time

_PLACE = "/dev/kmsg"
_WITHIN_S = 1.0
_KILLED = re.compile(rb"(?:Out of memory|out of memory).*?Killed process (\d+)|oom-kill:.*?\bpid=(\d+)")


def killed_for_memory(pid: int, place: str = _PLACE) -> bool | None:
    """True where the kernel's log says so of `pid`, False where it says nothing, None where it cannot be read.

    The log is a ring: only what it still holds is known. A number may be used again, rarely while it holds it.
    """
    try:
        log = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    until = time.monotonic() + _WITHIN_S
    try:
        while time.monotonic() < until:
            try:
                record = os.read(log, 8192)
            except BlockingIOError:
                return False
            except BrokenPipeError:
                continue  # what was to be read next was overwritten meanwhile
            except OSError:
                return None
            if not record:
                return False
            for found in _KILLED.finditer(record):
                if int(found[1] or found[2]) == pid:
                    return True
        return False
    finally:
        with contextlib.suppress(OSError):
            os.close(log)
