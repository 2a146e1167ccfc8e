"""What a process and those that it started are doing, seen from outside without stopping them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ...extras import install_command
from .process import STATES, ChildInfo, ProcessInfo

_MOST_CHILDREN = 32
"""Of one rank: data loader workers, savers, judges of an evaluation."""
_AT_ONCE = 4
_BETWEEN_S = 0.3
"""Whether a process uses a processor is seen over so long."""
_BUSY_SHARE = 0.1
_MOST_FRAMES = 60
_LIBRARY = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen", "<string>")


@dataclass(frozen=True)
class _Thread:
    name: str
    active: bool
    owns_gil: bool
    frames: tuple[str, ...]
    site: str


def collect_stacks(pid: int, *, timeout: float = 10.0) -> ProcessInfo:
    """Looks at one process and at those that it started. Never attaches to them in a way that stops them; takes at most
    about `timeout` seconds, however they hang."""
    until = time.monotonic() + timeout
    state, wchan, used = _read_state(pid)
    began = time.monotonic()
    children = _find_children(pid) if state != "?" else []
    tool = find_py_spy()
    asked = [pid, *(c for c, _ in children)] if tool is not None else []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = dict(zip(asked, pool.map(lambda p: _dump(str(tool), p, until), asked), strict=True))
    time.sleep(max(0.0, min(began + _BETWEEN_S, until) - time.monotonic()))
    _, _, later = _read_state(pid)
    busy = None
    if used is not None and later is not None:
        busy = later - used > _BUSY_SHARE * (time.monotonic() - began)
    threads, trouble = found.get(pid, ([], ""))
    main = next((t for t in threads if t.name == "MainThread"), None)
    held = next((t for t in threads if t.owns_gil and not t.active and state == "S"), None)
    kept = tuple(
        ChildInfo(p, name, _read_state(p)[0], _main_frames(found.get(p, ([], ""))[0])) for p, name in children
    )
    lines = [
        f"process {pid}: {STATES.get(state, 'gone')} (state {state})"
        + (f", waits in {wchan}" if wchan else "")
        + ("" if busy is None else ", uses a processor" if busy else ", uses no processor")
    ]
    if tool is None and state != "?":
        lines.append(f"no Python stacks: py-spy is not installed ({install_command('stacks')})")
    elif state != "?":
        lines += [trouble] if trouble else _describe(threads)
    for child in kept:
        lines += ["", child.describe(), *_describe(found.get(child.pid, ([], ""))[0])]
    return ProcessInfo(
        pid, state, wchan, main.frames if main else (), "\n".join(lines) + "\n",
        site=main.site if main else "", gil=held.frames if held else (), busy=busy, children=kept,
    )  # fmt: skip


def collect_native(pid: int, *, timeout: float = 5.0) -> str:
    """The stacks of all threads with the frames of C and C++, as text; "" where they cannot be had.

    It stops the process for a moment, so only one that hangs is looked at so, and none that the kernel keeps from running:
    a tracer that gives up there would leave it stopped.
    """
    tool, before = find_py_spy(), _read_state(pid)[0]
    if tool is None or before not in ("R", "S"):
        return ""
    try:
        out = subprocess.run(
            [tool, "dump", "--native", "--pid", str(pid)], capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
        return out.stdout if out.returncode == 0 else ""
    except (OSError, subprocess.TimeoutExpired):
        return ""
    finally:
        if _read_state(pid)[0] == "T":
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)


def _read_state(pid: int) -> tuple[str, str, float | None]:
    """(the kernel's letter, where it waits, processor seconds); "?" where there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        fields = stat[stat.rindex(")") + 2 :].split()
        used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return "?", "", None
    try:
        wchan = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
    except OSError:
        wchan = ""
    return fields[0], wchan, used


def _find_children(pid: int) -> list[tuple[int, str]]:
    """(process id, program) of what it started, and of what those started."""
    try:
        found = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    named = []
    for child in found[:_MOST_CHILDREN]:
        with contextlib.suppress(psutil.Error):
            named.append((child.pid, child.name()))
    return named


def _dump(tool: str, pid: int, until: float) -> tuple[list[_Thread], str]:
    """The threads of one Python process, or what py-spy said instead."""
    left = until - time.monotonic()
    if left <= 0:
        return [], "py-spy was not asked any more: the time was over"
    try:
        out = subprocess.run(
            [tool, "dump", "--nonblocking", "--json", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=left,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return [], f"py-spy did not answer: {e}"
    if out.returncode != 0:
        return [], f"py-spy: {out.stderr.strip()[:500]}"
    try:
        return [_read_thread(t) for t in json.loads(out.stdout)], ""
    except (ValueError, KeyError, TypeError) as e:
        return [], f"what py-spy said makes no sense: {e}"


def _read_thread(thread: dict[str, Any]) -> _Thread:
    frames, site = [], ""
    for frame in thread["frames"][:_MOST_FRAMES]:
        short = frame.get("short_filename") or frame["filename"]
        text = f"{frame['name']} ({short}:{frame['line']})"
        if not site and not any(part in frame["filename"] for part in _LIBRARY):
            site = text
        frames.append(text)
    name = str(thread.get("thread_name") or "")
    return _Thread(name, bool(thread["active"]), bool(thread["owns_gil"]), tuple(frames), site)


def _main_frames(threads: Sequence[_Thread]) -> tuple[str, ...]:
    return next((t.frames for t in threads if t.name == "MainThread"), ())


def _describe(threads: Sequence[_Thread]) -> list[str]:
    lines = []
    for t in threads:
        how = ("active" if t.active else "idle") + (", holds the interpreter's lock" if t.owns_gil else "")
        lines += [f'Thread "{t.name}" ({how})', *(f"    {f}" for f in t.frames)]
    return lines


def find_py_spy() -> str | None:
    """The program that reads the stacks, None where it is not installed."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")
