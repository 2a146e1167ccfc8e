"""Finds and ends the processes of a run by the marks in their environment, never by name.

Every process of a run inherits UNBROKEN_RUN_ID, UNBROKEN_NODE and UNBROKEN_ROLE; children that a user's script
starts (data loader workers, shells) inherit them too, so that nothing of an attempt can be missed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

WARM = "warm"
"""The role of a warm process, until it becomes a rank."""
_EMPTY_LOOKS = 5
_BETWEEN_LOOKS_S = 0.007
_PIECE = 1 << 16


@dataclass(frozen=True)
class Marked:
    """A process that carries a run's mark. `started` is its start time in clock ticks since boot; `rank` is -1
    for agents and keepers."""

    pid: int
    started: int
    state: str
    node: str
    role: str
    attempt: int
    rank: int = -1


def marked(run_id: str, *, node: str | None = None) -> list[Marked]:
    """The processes of a run on this machine; zombies are left out. Needs a readable /proc/PID/environ."""
    found = (read_marked(int(name), run_id) for name in os.listdir("/proc") if name.isdigit())
    return [p for p in found if p is not None and (node is None or p.node == node)]


def read_marked(pid: int, run_id: str) -> Marked | None:
    """A process that carries a run's mark; None for any other, and for a zombie."""
    try:
        environ = read_proc(f"/proc/{pid}/environ")
        if f"UNBROKEN_RUN_ID={run_id}".encode() not in environ:
            return None
        env = dict(p.split(b"=", 1) for p in environ.split(b"\0") if b"=" in p)
        if _text(env, b"UNBROKEN_RUN_ID") != run_id:
            return None
        state, started = read_stat(pid)
    except (OSError, ValueError):
        return None
    if state in "ZX":
        return None
    return Marked(
        pid=pid,
        started=started,
        state=state,
        node=_text(env, b"UNBROKEN_NODE"),
        role=_text(env, b"UNBROKEN_ROLE"),
        attempt=_number(env, b"UNBROKEN_ATTEMPT", 0),
        rank=_number(env, b"RANK", -1) if env.get(b"UNBROKEN_ROLE") == b"rank" else -1,
    )


def find_runs(node: str) -> set[str]:
    """The runs that have an agent on this machine for a node of this name."""
    found = set()
    for name in os.listdir("/proc"):
        try:
            environ = Path(f"/proc/{int(name)}/environ").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        if b"UNBROKEN_ROLE=agent" in environ and f"UNBROKEN_NODE={node}".encode() in environ:
            marks = [v.partition(b"=")[2] for v in environ if v.startswith(b"UNBROKEN_RUN_ID=")]
            found |= {v.decode(errors="replace") for v in marks}
    return found


def _text(env: dict[bytes, bytes], key: bytes) -> str:
    return env.get(key, b"").decode(errors="replace")


def _number(env: dict[bytes, bytes], key: bytes, otherwise: int) -> int:
    """A number from an environment that a user's script may have changed as it liked."""
    try:
        return int(env.get(key, b""))
    except ValueError:
        return otherwise


def read_stat(pid: int) -> tuple[str, int]:
    """(state letter, start time in ticks) of a process. Raises OSError when it is gone."""
    rest = read_proc(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return rest[0].decode(), int(rest[19])


def read_proc(path: str) -> bytes:
    """A file of /proc, a third as long under way as `open` would be: thousands are read before a run goes on. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = b""
        while piece := os.read(fd, _PIECE):
            data += piece
        return data
    finally:
        os.close(fd)


def still_there(process: Marked) -> bool:
    """Whether that very process still runs (a zombie does not, nor does another one with its number)."""
    try:
        state, started = read_stat(process.pid)
    except (OSError, ValueError):
        return False
    return started == process.started and state not in "ZX"


def end(find: Callable[[], Iterable[Marked]], *, within: float = 10.0) -> list[Marked]:
    """Kills (SIGKILL) all that `find` finds, again until it finds none; returns those that survived `within` s.

    One empty look proves little: a process that forks and exits can slip between the entries of one listing of
    /proc. So it takes several empty looks in a row.
    """
    deadline = time.monotonic() + within
    empty = 0
    while True:
        left = [p for p in find() if still_there(p)]
        if left and time.monotonic() > deadline:
            return left
        if not left:
            empty += 1
            if empty == _EMPTY_LOOKS:
                return []
            time.sleep(_BETWEEN_LOOKS_S)
            continue
        empty = 0
        for p in left:
            try:
                os.kill(p.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        pause = time.monotonic() + 0.5
        while any(still_there(p) for p in left) and time.monotonic() < pause:
            time.sleep(0.002)
