"""Ranks apart from their agent and keeper: each attempt's in a container of its own, such as another step of a Slurm job.

What ends that container (a scheduler, the kernel when its memory runs out) takes no snapshot with it. In the container runs a
small parent, as on every node, and below it a `rank_holder`, which starts the ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ...private import private_folder
from . import rank_holder, subreaper
from .descent import Parents, _lives
from .ownership import EndedProcesses, Start

_WITHIN_S = 30.0
_RECORD = "parent-ranks"
_LOOK_S = 0.2


@dataclass(frozen=True)
class Container:
    """How a container of its own is had on this node. `start` starts a program in one (`srun ...`, to which the program is
    added); `gone` is a command that succeeds once nothing of those that ended is left, for certain; empty where nobody knows.
    `several` says that another one can be had while one is there."""

    start: tuple[str, ...]
    gone: tuple[str, ...] = ()
    several: bool = False

    def as_text(self) -> str:
        return json.dumps([list(self.start), list(self.gone), self.several])

    @classmethod
    def from_text(cls, text: str) -> Container:
        """Raises ValueError."""
        start, gone, *more = json.loads(text)  # one of an earlier version says nothing more
        return cls(tuple(start), tuple(gone), bool(more and more[0]))


class Apart(Parents):
    """Agent and keeper are held by a small parent, the ranks of each attempt by another in a container.

    Where several containers can be had, warm processes wait in the next attempt's, which it finds there.
    """

    def __init__(self, run_id: str, scratch: Path, container: Container) -> None:
        super().__init__(run_id, scratch)
        self._container = container
        self._holders: dict[tuple[str, int], Holder] = {}
        self._next: dict[str, Holder] = {}
        self._count = 0

    def describe(self) -> str:
        return f"{super().describe()}, ranks in a container of their own"

    def as_text(self) -> str:
        return f"{self.kind}:{self._container.as_text()}"

    def start_rank(self, node: str, attempt: int, argv: Sequence[str]) -> Start:
        if (node, attempt) not in self._holders:
            self._begin(node, attempt, self._take_next(node) or self._start_holder(node))
        return Start(tuple(argv), spawn=self._holders[node, attempt].spawn)

    def prepare_warm(self, node: str) -> None:
        if self._container.several and (node not in self._next or self._next[node].lost):
            self._next[node] = self._start_holder(node)

    def start_warm(self, node: str, argv: Sequence[str]) -> Start | None:
        holder = self._next.get(node)
        return None if holder is None or holder.lost else Start(tuple(argv), spawn=holder.spawn)

    def move_warm(self, node: str, attempt: int, pid: int) -> None:
        if (node, attempt) in self._holders:
            return  # the first of its ranks has brought the container
        holder = self._take_next(node)
        if holder is None:
            raise OSError(0, "the container in which it waits is gone")
        self._begin(node, attempt, holder)

    def _begin(self, node: str, attempt: int, holder: Holder) -> None:
        for old in self._holders.values():
            old.close()
        self._holders = {(node, attempt): holder}

    def _take_next(self, node: str) -> Holder | None:
        holder = self._next.pop(node, None)
        return holder if holder is not None and not holder.lost else None

    def _close_next(self, node: str) -> None:
        if (holder := self._next.pop(node, None)) is not None:
            holder.close()

    def _start_holder(self, node: str) -> Holder:
        """Starts the container and waits until its holder has come. Raises OSError."""
        folder = self._scratch / node
        private_folder(folder)
        self._count += 1
        path = folder / f"ranks-{os.getpid()}-{self._count}.sock"
        path.unlink(missing_ok=True)
        argv = [
            *self._container.start, sys.executable, "-I", "-S", subreaper.__file__, str(self._folder(node) / _RECORD), "holder",
            sys.executable, "-I", "-S", rank_holder.__file__, str(path),
        ]  # fmt: skip
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.bind(str(path))
            door.listen(1)
            door.settimeout(0.1)
            env = {**os.environ, "UNBROKEN_ROLE": "parent"}
            process = subprocess.Popen(
                argv, env=env, cwd="/", stdin=subprocess.DEVNULL, start_new_session=True
            )
            try:
                return Holder(process, _accept(door, process))
            except OSError:
                process.kill()
                process.wait()
                raise
            finally:
                path.unlink(missing_ok=True)

    def end_ranks(self, node: str, within: float = 10.0, keep: Collection[int] = ()) -> EndedProcesses:
        for holder in self._holders.values():
            holder.close()
        self._holders.clear()
        deadline = time.monotonic() + within
        if not keep:
            self._close_next(node)
        elif (waiting := self._next.get(node)) is not None:
            keep = {*keep, waiting.pid}
        ended = super().end_ranks(node, within, keep)
        if ended.gone:
            return ended
        self._close_next(node)  # who asks whether nothing is left of such containers is told of this one too
        super().end_ranks(node, max(0.5, deadline - time.monotonic()))
        if not self._forget_killed(node, deadline):
            return ended
        return super().end_ranks(node, max(0.5, deadline - time.monotonic()))

    def _forget_killed(self, node: str, deadline: float) -> bool:
        """Drops the records of small parents that were killed with all of their container; whether there were any such."""
        killed = [
            p for p, process in self._records(node) if p.name.startswith(_RECORD) and not _lives(process)
        ]
        if not killed or not self._container.gone:
            return False
        while True:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                left = max(1.0, deadline - time.monotonic())
                argv = self._container.gone
                if (
                    subprocess.run(argv, check=False, capture_output=True, cwd="/", timeout=left).returncode
                    == 0
                ):
                    break
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)
        for path in killed:
            path.unlink(missing_ok=True)
        return True


class Holder:
    """A container with the holder of an attempt's ranks in it."""

    def __init__(self, process: subprocess.Popen[bytes], link: socket.socket) -> None:
        self._process, self._link = process, link
        self.gone = False
        """Whether nothing more will be heard of it: its ranks have ended with it."""
        self._data = b""
        self._reading = threading.Lock()
        self._ended: dict[int, int] = {}
        self._answers: list[dict[str, Any]] = []
        self.pid = int(self._wait_for_answer()["hello"])

    @property
    def lost(self) -> bool:
        """Whether it has ended, or its container has."""
        self._read(0.0)
        return self.gone or self._process.poll() is not None

    def spawn(
        self, argv: Sequence[str], *, cwd: str, env: Mapping[str, str], stdout: IO[bytes], **_: Any
    ) -> HeldProcess:
        """Starts a rank there. Raises OSError."""
        order = json.dumps({"argv": list(argv), "cwd": cwd, "env": dict(env)}).encode() + b"\n"
        self._link.settimeout(_WITHIN_S)
        sent = socket.send_fds(self._link, [order], [stdout.fileno()])
        self._link.sendall(order[sent:])
        answer = self._wait_for_answer()
        if "started" not in answer:
            raise OSError(answer.get("errno", 0), str(answer.get("refused")))
        return HeldProcess(self, int(answer["started"]))

    def find_code(self, pid: int) -> int | None:
        """How a rank ended; None where that was not said yet."""
        self._read(0.0)
        return self._ended.get(pid)

    def _wait_for_answer(self) -> dict[str, Any]:
        deadline = time.monotonic() + _WITHIN_S
        while not self._answers:
            if time.monotonic() > deadline:
                raise TimeoutError(0, "the holder of the ranks does not answer")
            if not self._read(0.5) and (self.gone or self._process.poll() is not None):
                raise OSError(0, "the holder of the ranks is gone")
        return self._answers.pop(0)

    def _read(self, wait_s: float) -> bool:
        """Takes in what it has said; False where nothing came."""
        with self._reading:
            return not self.gone and self._receive(wait_s)

    def _receive(self, wait_s: float) -> bool:
        self._link.settimeout(wait_s)
        try:
            piece = self._link.recv(1 << 16)
        except (BlockingIOError, TimeoutError):
            return False
        except OSError:
            self.gone = True
            return False
        self.gone = not piece
        *lines, self._data = (self._data + piece).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "ended" in said:
                self._ended[int(said["ended"])] = int(said["code"])
            else:
                self._answers.append(said)
        return bool(piece)

    def close(self) -> None:
        """Lets it end, with all of its ranks."""
        self._read(0.0)
        self.gone = True
        self._link.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0)


class HeldProcess:
    """A rank that a holder has started, as `subprocess.Popen` shows a child. It is signalled by its process id."""

    def __init__(self, holder: Holder, pid: int) -> None:
        self._holder, self.pid = holder, pid
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:
            self._pidfd = os.eventfd(1)  # it has ended already
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None and _has_ended(self._pidfd):
            self._code = self._holder.find_code(self.pid)
            if self._code is None and self._holder.gone:
                self._code = -signal.SIGKILL
        return self._code

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._pidfd)


def _has_ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


def _accept(door: socket.socket, process: subprocess.Popen[bytes]) -> socket.socket:
    deadline = time.monotonic() + _WITHIN_S
    while True:
        with contextlib.suppress(TimeoutError):
            return door.accept()[0]
        if (code := process.poll()) is not None:
            raise OSError(0, f"the container of the ranks did not start (it ended with {code})")
        if time.monotonic() > deadline:
            raise TimeoutError(0, f"the container of the ranks did not start within {_WITHIN_S:g} s")
