"""What a process is doing, seen from outside without stopping it: state, where it waits, its stacks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..extras import install_command

_STATES = {
    "R": "running", "S": "sleeping", "D": "in uninterruptible sleep", "T": "stopped by a signal",
    "t": "stopped by a debugger", "Z": "dead, not reaped", "X": "dead", "I": "idle",
}  # fmt: skip


@dataclass(frozen=True)
class ProcessInfo:
    """`state` is the kernel's letter; `wchan` where it waits in the kernel; `frames` the innermost Python
    frames of its main thread, innermost first ('function (file:line)'); `text` everything collected."""

    pid: int
    state: str
    wchan: str
    frames: tuple[str, ...]
    text: str

    @property
    def cannot_run(self) -> bool:
        """Whether the kernel itself keeps it from running: stopped, dead, or stuck in a device."""
        return self.state in "TtDZX?"


def collect_stacks(pid: int, *, timeout: float = 10.0) -> ProcessInfo:
    """Looks at one process. Never attaches to it in a way that stops it; takes at most `timeout` seconds."""
    state, wchan = "?", ""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
        state = status[status.rindex(")") + 2]
        wchan = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
    except OSError:
        pass
    lines = [
        f"process {pid}: {_STATES.get(state, 'gone')} (state {state})"
        + (f", waits in {wchan}" if wchan else "")
    ]
    frames: tuple[str, ...] = ()
    tool = _py_spy()
    if state == "?":
        pass
    elif tool is None:
        lines.append(f"no Python stacks: py-spy is not installed ({install_command('stacks')})")
    else:
        try:
            out = subprocess.run(
                [tool, "dump", "--nonblocking", "--pid", str(pid)],
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
            lines.append(out.stdout.rstrip() if out.returncode == 0 else f"py-spy: {out.stderr.strip()}")
            frames = _main_frames(out.stdout)
        except (OSError, subprocess.TimeoutExpired) as e:
            lines.append(f"py-spy did not answer: {e}")
    return ProcessInfo(pid, state, wchan, frames, "\n".join(lines) + "\n")


_COLLECTIVES = re.compile(
    r"^_?(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|(?:monitored_)?barrier|scatter|gather|reduce"
    r"|isend|irecv|send|recv)\w* \(.*\bdistributed\b|[/ (]torch/distributed/|distributed_c10d|^_engine_run_backward |\bnccl|\bgloo",
    re.IGNORECASE,
)
_LOOKED_AT = 12


def in_collective(frames: Sequence[str]) -> bool:
    """Whether a process waits for the other ranks, as its innermost frames tell ('function (file:line)').

    A backward pass counts: gradients are reduced inside it.
    """
    return any(_COLLECTIVES.search(f) for f in frames[:_LOOKED_AT])


def place(processes: Mapping[int, ProcessInfo]) -> str:
    """Where the ranks stand, in a form that compares equal when they hang in the same place again; "" if unknown.

    A process that a signal has stopped stands nowhere of its own.
    """
    if not processes or any(process.cannot_run or not process.frames for process in processes.values()):
        return ""
    each = [
        f"{r}:" + "<".join(f.split(" (")[0] for f in process.frames[:3])
        for r, process in sorted(processes.items())
    ]
    return " ".join(each)[:1000]


def late_ranks(processes: Mapping[int, ProcessInfo], behind: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The ranks that hold the others up, as far as their looks tell; empty where they do not.

    First those that the kernel keeps from running, then those that are in no collective while all others wait in
    one (of two ranks too), then those whose step lags, then the few whose innermost frame differs from that of the
    majority.
    """
    stuck = tuple(r for r, process in sorted(processes.items()) if process.cannot_run)
    if stuck:
        return stuck
    seen = {r: in_collective(process.frames) for r, process in sorted(processes.items()) if process.frames}
    away = tuple(r for r, waits in seen.items() if not waits)
    if len(seen) == len(processes) and 0 < len(away) < len(seen):
        return away
    if behind:
        return behind
    tops = {r: process.frames[0].split(" (")[0] for r, process in processes.items() if process.frames}
    if len(tops) < 2:
        return ()
    (common, n), *_ = Counter(tops.values()).most_common(1)
    odd = tuple(sorted(r for r, top in tops.items() if top != common))
    return odd if 0 < len(odd) < n else ()


def _main_frames(dump: str) -> tuple[str, ...]:
    frames: list[str] = []
    inside = False
    for line in dump.splitlines():
        if line.startswith("Thread"):
            if frames:
                break
            inside = "MainThread" in line
        elif inside and line.startswith("    ") and line.strip():
            frames.append(line.strip())
    return tuple(frames)


def _py_spy() -> str | None:
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")
