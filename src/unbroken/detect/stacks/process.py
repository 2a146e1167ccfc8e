"""What is known of one process, and of those that it started."""

from __future__ import annotations

from dataclasses import dataclass

STATES = {
    "R": "running", "S": "sleeping", "D": "in uninterruptible sleep", "T": "stopped by a signal",
    "t": "stopped by a debugger", "Z": "dead, not reaped", "X": "dead", "I": "idle",
}  # fmt: skip
"""The kernel's letter, in words."""
_CANNOT_RUN = "TtDZX?"


@dataclass(frozen=True)
class ChildInfo:
    """A process that a rank started: `name` is its program, `frames` as of `ProcessInfo`."""

    pid: int
    name: str
    state: str
    frames: tuple[str, ...] = ()

    @property
    def cannot_run(self) -> bool:
        return self.state in _CANNOT_RUN

    def describe(self) -> str:
        """`process 41, stopped by a signal, in work (data.py:3)`."""
        at = f", in {self.frames[0]}" if self.frames else ""
        return f"process {self.pid} ({self.name}), {STATES.get(self.state, 'gone')}{at}"


@dataclass(frozen=True)
class ProcessInfo:
    """`state` is the kernel's letter; `wchan` where it waits in the kernel; `frames` the innermost Python
    frames of its main thread, innermost first ('function (file:line)'); `text` everything collected.

    `site` is the innermost frame that is no library's; `gil` the frames of a thread that sleeps and holds the interpreter's
    lock meanwhile; `busy` whether it used a processor while it was looked at (None: not known).
    """

    pid: int
    state: str
    wchan: str
    frames: tuple[str, ...]
    text: str
    site: str = ""
    gil: tuple[str, ...] = ()
    busy: bool | None = None
    children: tuple[ChildInfo, ...] = ()

    @property
    def cannot_run(self) -> bool:
        """Whether the kernel itself keeps it from running: stopped, dead, or stuck in a device."""
        return self.state in _CANNOT_RUN
