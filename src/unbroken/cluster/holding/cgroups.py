"""Processes held by cgroups v2: the kernel lists them, kills them all at once, and tells when none is left.

    <own cgroup of the supervisor>/unbroken-<run id>/<node>/service         agent and keeper
                                                            warm            processes that wait to become ranks
                                                            attempt-0001    the ranks of an attempt, all they start

No controller is enabled, nothing is limited: the folders only hold. They work as root, in a container with a cgroup
namespace of its own, in the cgroup2 tree of a hybrid hierarchy, and in a delegated cgroup of a systemd user
(`systemd-run --user --scope -p Delegate=yes unbroken run ...`). Source: Documentation/admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from .descent import end_marked_warm, find_marked, with_descendants
from .ownership import EndedProcesses, Kind, Start
from .processes import WARM, Marked, end, marked

_MOUNTS, _OWN = Path("/proc/self/mountinfo"), Path("/proc/self/cgroup")
_POLL_S = 0.002
_KILL_AGAIN_S = 0.1
_PROBE_S = 5.0
_WALK_MAX = 20_000
"""Folders that are looked through for what an earlier supervisor left; a node of a large cluster has some thousands."""
_SERVICE, _WARM, _ATTEMPT = "service", "warm", re.compile(r"attempt-(\d+)")


class Cgroups:
    """The cgroups of one run below `root`, which is the run's own folder."""

    kind = Kind.CGROUP

    def __init__(self, run_id: str, root: Path) -> None:
        self.run_id, self.root = run_id, root

    @classmethod
    def find(cls, run_id: str, mounts: Path = _MOUNTS, own: Path = _OWN) -> tuple[Cgroups | None, str]:
        """Cgroups that were tried and work, or None and why not. The run's folder from before is taken where there is one."""
        places = [*cls.left_by(run_id, mounts), *(base / _name(run_id) for base in _bases(mounts, own))]
        why = "this machine has no cgroup v2"
        for place in places:
            made = cls(run_id, place)
            why = made._try()
            if not why:
                return made, ""
        return None, why

    @classmethod
    def left_by(cls, run_id: str, mounts: Path = _MOUNTS) -> list[Path]:
        """Folders of this run, wherever an earlier supervisor made them."""
        found = []
        for mount, _ in _mounted(mounts):
            for n, (folder, names, _) in enumerate(os.walk(mount)):
                if _name(run_id) in names:
                    found.append(Path(folder) / _name(run_id))
                if n > _WALK_MAX:
                    break
        return found

    def describe(self) -> str:
        return "a cgroup for each attempt"

    def as_text(self) -> str:
        return f"{self.kind}:{self.root}"

    def start_agent(self, node: str, argv: Sequence[str]) -> Start:
        return self._start(self.root / node / _SERVICE, argv)

    def start_rank(self, node: str, attempt: int, argv: Sequence[str]) -> Start:
        folder = self._attempt(node, attempt)
        start = self._start(folder, argv)
        with contextlib.suppress(OSError):  # only where the memory controller was delegated
            (folder / "memory.oom.group").write_text("1")  # half of an attempt is of no use
        return start

    def _attempt(self, node: str, attempt: int) -> Path:
        return self.root / node / f"attempt-{attempt:04d}"

    def start_warm(self, node: str, argv: Sequence[str]) -> Start | None:
        return self._start(self.root / node / _WARM, argv)

    def prepare_warm(self, node: str) -> None:
        return  # a folder is made at once

    def move_warm(self, node: str, attempt: int, pid: int) -> None:
        start = self.start_rank(node, attempt, ())
        start.close()
        (self._attempt(node, attempt) / "cgroup.procs").write_text(str(pid))

    def end_warm(self, node: str, keep: Collection[int] = ()) -> None:
        self._kill_warm(node, keep)
        end_marked_warm(self.run_id, node, keep)

    def _kill_warm(self, node: str, keep: Collection[int]) -> None:
        there = [pid for pid in _pids(self.root / node / _WARM) if pid > 0 and pid not in keep]
        kept = {pid for pid, _ in with_descendants(keep)} if there else set()
        for pid in there:
            if pid not in kept:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def take_census(self, node: str) -> None:
        return  # the kernel keeps it

    def _start(self, folder: Path, argv: Sequence[str]) -> Start:
        folder.mkdir(parents=True, exist_ok=True)
        procs = os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        return Start(tuple(argv), lambda: _enter(procs), lambda: os.close(procs))

    def end_ranks(self, node: str, within: float = 10.0, keep: Collection[int] = ()) -> EndedProcesses:
        deadline = time.monotonic() + within
        ended = EndedProcesses()
        if keep:
            self._kill_warm(node, keep)
        for folder in self._folders(node):
            if folder.name != _SERVICE and not (keep and folder.name == _WARM):
                ended |= _end(folder, deadline)
        return ended | self._end_marked(node, deadline, ranks=True, keep=keep)

    def end_node(self, node: str, within: float = 10.0) -> EndedProcesses:
        deadline = time.monotonic() + within
        ended = EndedProcesses()
        # The agent first: it could start more.
        for folder in sorted(self._folders(node), key=lambda f: f.name != _SERVICE):
            ended |= _end(folder, deadline)
        ended |= self._end_marked(node, deadline, ranks=False)
        for folder in (self.root / node, self.root):
            with contextlib.suppress(OSError):
                folder.rmdir()  # others may still use it
        return ended

    def _end_marked(
        self, node: str, deadline: float, *, ranks: bool, keep: Collection[int] = ()
    ) -> EndedProcesses:
        """What somebody has moved to another cgroup still carries the run's mark, mostly."""

        def find() -> list[Marked]:
            if ranks:
                return find_marked(self.run_id, node, ("rank", WARM), keep)
            return [p for p in marked(self.run_id, node=node) if p.role != "parent"]

        return EndedProcesses(tuple(p.pid for p in end(find, within=max(0.1, deadline - time.monotonic()))))

    def leave(self, node: str) -> None:
        with contextlib.suppress(OSError):
            (self.root.parent / "cgroup.procs").write_text(str(os.getpid()))
            for folder in (self.root / node / _SERVICE, self.root / node, self.root):
                folder.rmdir()

    def left(self, node: str) -> list[int]:
        return [pid for folder in self._folders(node) for pid in _pids(folder)]

    def nodes(self) -> list[str]:
        return sorted(p.name for p in _children(self.root))

    def forget(self, node: str) -> None:
        return

    def _folders(self, node: str) -> list[Path]:
        return list(_children(self.root / node))

    def _try(self) -> str:
        """Holds a process and kills it; says what did not work, or nothing."""
        there = self.root.exists()
        folder = self.root / f"probe-{os.getpid()}"
        try:
            start = self._start(folder, (sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"))
            try:
                child = subprocess.Popen(start.argv, preexec_fn=start.enter, stdin=subprocess.DEVNULL)
            finally:
                start.close()
            try:
                if child.pid not in _pids(folder):
                    return f"a process does not stay in {folder}"
                if _end(folder, time.monotonic() + _PROBE_S).survivors:
                    return f"a process in {folder} cannot be killed"
            finally:
                child.kill()
                child.wait()
            return ""
        except (OSError, subprocess.SubprocessError) as e:
            return f"{self.root.parent} cannot be used ({getattr(e, 'strerror', None) or e})"
        finally:
            for made in (folder, *(() if there else (self.root,))):
                with contextlib.suppress(OSError):
                    made.rmdir()


def _enter(procs: int) -> None:
    os.write(procs, b"0")


def _name(run_id: str) -> str:
    return f"unbroken-{run_id}"


def _mounted(mounts: Path) -> Iterator[tuple[Path, str]]:
    """(mount point, the cgroup that is its root) of each cgroup v2 tree."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        left, _, right = line.partition(" - ")
        fields = left.split()
        if right.split()[:1] == ["cgroup2"] and len(fields) > 4:
            yield Path(_plain(fields[4])), _plain(fields[3])


def _plain(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), text)


def _bases(mounts: Path, own: Path) -> Iterator[Path]:
    """This process's own cgroup, where it can be seen: folders made there need no other rights than its own."""
    try:
        path = next((x[3:] for x in own.read_text().splitlines() if x.startswith("0::")), None)
    except OSError:
        path = None
    if path is None:
        return
    for mount, root in _mounted(mounts):
        inside = (
            path.removeprefix(root.rstrip("/")).lstrip("/") if path.startswith(root.rstrip("/")) else None
        )
        if inside is not None and ".." not in inside.split("/") and (mount / inside).is_dir():
            yield mount / inside


def _children(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from sorted(p for p in folder.iterdir() if p.is_dir())


def _pids(folder: Path) -> list[int]:
    """All processes in a folder and below; 0 stands for one of another pid namespace."""
    found = []
    for place, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            found += [int(n) for n in (Path(place) / "cgroup.procs").read_text().split()]
    return found


def _populated(folder: Path) -> bool:
    try:
        return "populated 1" in (folder / "cgroup.events").read_text()
    except OSError:
        return False  # removed


def _end(folder: Path, deadline: float) -> EndedProcesses:
    """Kills all in a folder and below, waits until the kernel says that none is left, and removes it."""
    killed = 0.0
    while _populated(folder):
        now = time.monotonic()
        if now > deadline:
            return EndedProcesses(tuple(_pids(folder)) or (0,))
        if now - killed > _KILL_AGAIN_S:
            killed = now
            _kill(folder)
        time.sleep(_POLL_S)
    for place, _, _ in os.walk(folder, topdown=False):
        while time.monotonic() < deadline:
            try:
                os.rmdir(place)
                break
            except FileNotFoundError:
                break
            except OSError:
                time.sleep(_POLL_S)  # the last process is still being taken apart
    return EndedProcesses()


def _kill(folder: Path) -> None:
    try:
        (folder / "cgroup.kill").write_text("1")
    except FileNotFoundError:
        # Linux before 5.14: frozen processes cannot fork, so that one round of signals reaches all.
        with contextlib.suppress(OSError):
            (folder / "cgroup.freeze").write_text("1")
        for pid in _pids(folder):
            if pid > 0:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    except OSError:
        return  # tried again until the deadline
