"""Whether the kernel killed a process because memory ran out, from its log, where that can be read."""

from __future__ import annotations

import os
import re
import weakref

from ....machine import read_kernel_log

_PLACE = "/dev/kmsg"
_WITHIN_S = 1.0
_KILLED = re.compile(rb"(?:Out of memory|out of memory).*?Killed process (\d+)|oom-kill:.*?\bpid=(\d+)")
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""The inode that Linux gives the namespace of the host's own process numbers (PROC_PID_INIT_INO), which are those in the log."""


class KernelLog:
    """The kernel's log from now on: what it said earlier was of other processes, whose numbers are used again."""

    def __init__(self, place: str = _PLACE, *, host_pids: bool | None = None) -> None:
        """`host_pids`: whether process numbers here are the host's; None finds out."""
        self.why_not = ""
        """Why it tells nothing."""
        self._killed: set[int] = set()
        self._log = -1
        if not (_has_host_pids() if host_pids is None else host_pids):
            self.why_not = f"process numbers here are a container's own, and {place} has the host's"
            return
        try:
            self._log = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._log)
            os.lseek(self._log, 0, os.SEEK_END)
        except OSError as e:
            self.why_not = f"{place} cannot be read: {e.strerror}"

    def has_killed(self, pid: int) -> bool | None:
        """Whether a process of this number was killed for memory since this was made; None where that cannot be known."""
        if not self.why_not:
            self._read()
        return True if pid in self._killed else None if self.why_not else False

    def _read(self) -> None:
        try:
            for record in read_kernel_log(self._log, _WITHIN_S):
                if record is None:
                    self.why_not = "lines of the kernel's log were overwritten before they were read"
                    continue
                self._killed.update(int(found[1] or found[2]) for found in _KILLED.finditer(record))
        except TimeoutError as e:
            self.why_not = str(e)
        except OSError as e:
            self.why_not = f"the kernel's log cannot be read: {e.strerror}"


def _has_host_pids() -> bool:
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _FIRST_PID_NAMESPACE
    except OSError:
        return True
