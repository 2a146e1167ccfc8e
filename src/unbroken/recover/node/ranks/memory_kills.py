"""Whether a rank was killed because memory ran out."""

from __future__ import annotations

from typing import NamedTuple

from ....machine import find_kill_count, read_kill_count
from .kernel_log import KernelLog

_EVERY_S = 1.0


class MemoryKill(NamedTuple):
    """What the kernel says of a process that was ended by SIGKILL."""

    oom: bool | None
    """Whether it killed it because memory ran out; None where nothing tells."""
    counted: bool = False
    """By the count of its cgroup alone, which names no process: another one there may have been meant."""


class MemoryKills:
    """What the kernel says of one process: its log names it; where that cannot be read its cgroup counts such kills.

    The count is of all processes there, so it says something of this one only where it rose within seconds of its end.
    """

    def __init__(self, pid: int, log: KernelLog) -> None:
        """`log` is from before the process was started; it has been moved to its cgroup."""
        self._pid, self._log = pid, log
        self._file = find_kill_count(pid)
        count = read_kill_count(self._file) if self._file else None
        self._before = self._now = count
        self._at = float("-inf")

    def look(self, now: float) -> None:
        """Notes the count while the process runs; `now` is CLOCK_MONOTONIC."""
        if self._file is not None and now - self._at >= _EVERY_S:
            # Compared with the one before the newest: that may have been read when the process was killed, and not yet seen to be.
            self._at, self._before, self._now = now, self._now, read_kill_count(self._file)

    def was_killed(self) -> MemoryKill:
        """Asked once it was ended by SIGKILL."""
        named = self._log.has_killed(self._pid)
        if named is not None or self._file is None or self._before is None:
            return MemoryKill(named)
        count = read_kill_count(self._file)
        rose = count is not None and count > self._before
        return MemoryKill(True, counted=True) if rose else MemoryKill(None)
