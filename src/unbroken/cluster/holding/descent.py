"""Processes held by descent: a small parent per node that takes in every orphan; and marks, which prove nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from ... import atomic
from . import subreaper
from .ownership import EndedProcesses, Kind, Start
from .processes import WARM, Marked, end, marked, read_marked, read_proc, read_stat, still_there

_KEPT = ("agent", "keeper", "parent")
_STOP_ROUNDS = 20
_EMPTY_LOOKS = 3
Process = tuple[int, int]
"""(pid, start time in ticks)."""
Tree = dict[int, list[int]]
"""The children of each process, by number."""


class Marks:
    """Found by the marks in their environment, by descent from one that carries them, and by the last census."""

    kind = Kind.MARKS

    def __init__(self, run_id: str, scratch: Path) -> None:
        self.run_id, self._scratch = run_id, scratch

    def describe(self) -> str:
        return "marks in their environment only: their end cannot be proven"

    def as_text(self) -> str:
        return str(self.kind)

    def start_agent(self, node: str, argv: Sequence[str]) -> Start:
        return Start(tuple(argv))

    def start_rank(self, node: str, attempt: int, argv: Sequence[str]) -> Start:
        return Start(tuple(argv))

    def prepare_warm(self, node: str) -> None:
        return  # they are children of the agent

    def start_warm(self, node: str, argv: Sequence[str]) -> Start | None:
        return Start(tuple(argv))

    def move_warm(self, node: str, attempt: int, pid: int) -> None:
        return  # it is known by its marks, which it writes over, and by descent

    def end_warm(self, node: str, keep: Collection[int] = ()) -> None:
        end_marked_warm(self.run_id, node, keep)

    def take_census(self, node: str) -> None:
        now = sorted(self._find(node, ranks=False, keep=()))
        place = self._census(node)
        with contextlib.suppress(OSError, ValueError):
            if not place.exists() or json.loads(place.read_text()) != [list(p) for p in now]:
                place.parent.mkdir(parents=True, exist_ok=True)
                atomic.write_json(place, now, durable=False)

    def end_ranks(self, node: str, within: float = 10.0, keep: Collection[int] = ()) -> EndedProcesses:
        return self._end(node, within, ranks=True, keep=keep)

    def end_node(self, node: str, within: float = 10.0) -> EndedProcesses:
        ended = self._end(node, within, ranks=False)
        self._census(node).unlink(missing_ok=True)
        self._tidy(node)
        return ended

    def leave(self, node: str) -> None:
        self._census(node).unlink(missing_ok=True)
        self._tidy(node)

    def _tidy(self, node: str) -> None:
        for folder in (self._folder(node), self._folder(node).parent):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def left(self, node: str) -> list[int]:
        return [pid for pid, _ in self._find(node, ranks=False, keep=())]

    def nodes(self) -> list[str]:
        folder = self._folder("x").parent
        return sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []

    def forget(self, node: str) -> None:
        self._census(node).unlink(missing_ok=True)

    def _end(self, node: str, within: float, *, ranks: bool, keep: Collection[int] = ()) -> EndedProcesses:
        why = self._unproven(node)

        def find() -> set[Process]:
            return self._find(node, ranks=ranks, keep=keep)

        left = end_all(find, within)
        return EndedProcesses(tuple(sorted(p for p, _ in left)), not why, why)

    def _unproven(self, node: str) -> str:
        return f"the processes of {node} are known by marks in their environment only, which they can lose"

    def _find(self, node: str, *, ranks: bool, keep: Collection[int]) -> set[Process]:
        """What is held on a node; of `ranks` without agent, keeper and parent, our own programs, which never lose their mark, and
        without `keep` and what that started."""
        there, tree = marked(self.run_id, node=node), read_children()
        found = self._held(node, there, tree)
        if not ranks:
            return found
        service = {(p.pid, p.started) for p in there if p.role in _KEPT}
        return found - service - with_descendants(keep, tree)

    def _roots(self, node: str, there: Iterable[Marked]) -> set[Process]:
        return {(p.pid, p.started) for p in there}

    def _held(self, node: str, there: Iterable[Marked], tree: Tree) -> set[Process]:
        roots = {p for p in self._roots(node, there) | self._noted(node) if _lives(p)}
        return descendants(roots, tree) | roots

    def _noted(self, node: str) -> set[Process]:
        try:
            return {(int(pid), int(started)) for pid, started in json.loads(self._census(node).read_text())}
        except (OSError, ValueError, TypeError):
            return set()

    def _folder(self, node: str) -> Path:
        return self._scratch / "owned" / node

    def _census(self, node: str) -> Path:
        return self._folder(node) / "census.json"


class Parents(Marks):
    """Held by a small parent per node (`subreaper`), which outlives the agent. A node may have several: each agent
    is started with one, and one whose agent died still holds the keeper and what the ranks have left."""

    kind = Kind.PARENT

    @staticmethod
    def missing() -> str:
        """Why it cannot work here; nothing where it can."""
        return "" if sys.platform.startswith("linux") else "only Linux hands orphans to a parent of choice"

    def describe(self) -> str:
        return "a small parent process on each node"

    def start_agent(self, node: str, argv: Sequence[str]) -> Start:
        record = self._folder(node) / "parent"
        return Start(
            (sys.executable, "-I", "-S", subreaper.__file__, str(record), "--", *argv),
            env={"UNBROKEN_ROLE": "parent"},
        )

    def leave(self, node: str) -> None:
        return  # its parent removes what is left, after it

    def _end(self, node: str, within: float, *, ranks: bool, keep: Collection[int] = ()) -> EndedProcesses:
        deadline = time.monotonic() + within
        why = self._unproven(node)
        parents = {p for _, p in self._records(node)}

        def taken_in() -> set[int]:
            """Who is a child of a parent now. Whoever forks and exits without end slips through a listing of /proc, not
            through this one: all that he leaves is handed to the parent, at the end of its list, before he is gone."""
            listed = {pid for p in parents if _lives(p) for pid in _living_children(p[0])}
            return (
                {pid for pid in listed if pid not in keep and not self._is_service(pid)} if ranks else listed
            )

        def find() -> set[Process]:
            found = self._find(node, ranks=ranks, keep=keep) - parents
            return found | {
                p for pid in taken_in() if (p := _process(pid)) is not None
            }  # last: it must be fresh

        # The parents go last: whoever they take in while the others are ended is still listed.
        left = end_all(find, within, taken_in)
        if ranks:
            why = why or self._unproven(node)  # a parent that was about to die when this began
        if not ranks and not left:
            patience = min(deadline, time.monotonic() + 1.0)
            while any(_lives(p) for p in parents) and time.monotonic() < patience:
                time.sleep(0.002)  # they end by themselves, and remove their records
            left = end_all(lambda: {p for p in parents if _lives(p)}, max(0.5, deadline - time.monotonic()))
        return EndedProcesses(tuple(sorted(p for p, _ in left)), not why, why)

    def _records(self, node: str) -> list[tuple[Path, Process]]:
        found = []
        for path in self._folder(node).glob("parent-*-*"):
            with contextlib.suppress(ValueError):
                _, pid, started = path.name.rsplit("-", 2)
                found.append((path, (int(pid), int(started))))
        return found

    def _is_service(self, pid: int) -> bool:
        found = read_marked(pid, self.run_id)
        return found is not None and found.role in _KEPT

    def _roots(self, node: str, there: Iterable[Marked]) -> set[Process]:
        return super()._roots(node, there) | {p for _, p in self._records(node) if _lives(p)}

    def _unproven(self, node: str) -> str:
        lost = [p for path, p in self._records(node) if not _lives(p) and path.exists()]
        if not lost:
            return ""
        return f"the small parent of {node} (process {lost[0][0]}) was killed, and with it the list of what it held"

    def forget(self, node: str) -> None:
        super().forget(node)
        for path, process in self._records(node):
            if not _lives(process):
                path.unlink(missing_ok=True)


def end_all(
    find: Callable[[], set[Process]], within: float, listed: Callable[[], set[int]] = set
) -> set[Process]:
    """Kills all that `find` finds until it finds none and none is `listed`; returns what survived `within` seconds.

    All are stopped before any is killed: what is stopped cannot fork, so that whoever respawns is caught. `listed` is
    the surer look: process ids of which some may be gone again, but which is empty only where nothing is left.
    """
    deadline = time.monotonic() + within
    empty = 0
    while True:
        left = {p for p in find() if _lives(p)}
        if not left and (there := listed()):
            if time.monotonic() > deadline:
                return {(pid, 0) for pid in there}
            empty = 0
            continue
        if not left:
            empty += 1
            if empty == _EMPTY_LOOKS:
                return set()
            time.sleep(0.005)
            continue
        if time.monotonic() > deadline:
            return left
        empty = 0
        for _ in range(_STOP_ROUNDS):
            _signal(left, signal.SIGSTOP)
            more = {p for p in find() if _lives(p)} - left
            if not more:
                break
            left |= more
        _signal(left, signal.SIGKILL)
        pause = min(time.monotonic() + 0.5, deadline)
        while any(_lives(p) for p in left) and time.monotonic() < pause:
            time.sleep(0.002)


def with_descendants(pids: Collection[int], tree: Tree | None = None) -> set[Process]:
    """The living processes of these numbers, and all that descend from them."""
    roots = {p for pid in pids if (p := _process(pid)) is not None}
    return roots | descendants(roots, tree) if roots else set()


def end_marked_warm(run_id: str, node: str, keep: Collection[int]) -> None:
    """Kills the processes of a node that carry the mark of a warm process, but for those in `keep` and their descendants."""
    end(lambda: find_marked(run_id, node, (WARM,), keep), within=1.0)


def find_marked(run_id: str, node: str, roles: Collection[str], keep: Collection[int]) -> list[Marked]:
    """Those of a node that carry the mark of such a role, but for those in `keep` and their descendants."""
    found = [p for p in marked(run_id, node=node) if p.role in roles and p.pid not in keep]
    if not found or not keep:
        return found  # mostly: then nobody's descent has to be known
    kept = with_descendants(keep)
    return [p for p in found if (p.pid, p.started) not in kept]


def read_children() -> Tree:
    """The children of each process, by one listing of /proc."""
    children: Tree = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                children.setdefault(_parent_of(int(name)), []).append(int(name))
    return children


def descendants(roots: Iterable[Process], tree: Tree | None = None) -> set[Process]:
    """All living processes that descend from the living ones among `roots`; the roots are not among them. `tree` is what
    `read_children` has just found."""
    children = read_children() if tree is None else tree
    found: set[Process] = set()
    waiting = [pid for pid, _ in (p for p in roots if _lives(p))]
    seen = set(waiting)
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            if pid in seen:
                continue
            seen.add(pid)
            waiting.append(pid)
            if pid == os.getpid():
                continue  # what it started counts, itself it does not end
            with contextlib.suppress(OSError, ValueError):
                state, started = read_stat(pid)
                if state not in "ZX":
                    found.add((pid, started))
    return found


def _parent_of(pid: int) -> int:
    return int(read_proc(f"/proc/{pid}/stat").rpartition(b")")[2].split(None, 2)[1])


def _children(pid: int) -> set[int]:
    """The children of a process with one thread, in one reading of the kernel's own list; none where it has no such list."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as f:
            return {int(n) for n in f.read().split()}
    except OSError:
        return set()


def _living_children(pid: int) -> set[int]:
    """The same without zombies, which a parent that somebody stopped does not take away. One that was a zombie before
    the list was read has left nobody who is not in the list."""
    listed = _children(pid)
    dead = {p for p in listed if _process(p) is None}
    return _children(pid) - dead if dead else listed


def _process(pid: int) -> Process | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        state, started = read_stat(pid)
        return None if state in "ZX" else (pid, started)
    return None


def _lives(process: Process) -> bool:
    return still_there(Marked(process[0], process[1], "", "", "", 0))


def _signal(processes: Iterable[Process], sig: int) -> None:
    for process in processes:
        # Its number may be another's by now.
        if _lives(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process[0], sig)
