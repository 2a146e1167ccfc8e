"""The imports of a node's processes, made once: this side of fork_server.py."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

UNKNOWN = 1
"""The exit code of a process whose end nobody was left to tell."""


class Forked:
    """A process that the server forked, or will; as much of `subprocess.Popen` as an engine needs."""

    def __init__(
        self, server: Imports, number: int, stdin: IO[bytes] | None, stdout: IO[bytes] | None = None
    ) -> None:
        self._server, self.number, self.stdin, self.stdout = server, number, stdin, stdout
        self.pid = 0
        """0: the server imports still."""
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code; None while it runs, or waits for the server."""
        if self.returncode is None:
            self._server.hear()
            if self.returncode is None and self._server.gone and not (self.pid and _alive(self.pid)):
                self.returncode = UNKNOWN
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As Popen's. Raises TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() >= until:
                raise subprocess.TimeoutExpired("worker", timeout or 0.0)
            self._server.hear(0.02)
        return code

    def kill(self) -> None:
        """SIGKILL to its session; the server too, if it hangs in an import."""
        until = time.monotonic() + 1.0
        while self.poll() is None and not self.pid and self._server.ready and time.monotonic() < until:
            self._server.hear(0.02)  # it forks now
        if self.poll() is not None:
            return
        if not self.pid:
            self._server.close()
        else:
            # By its own number too: just forked, it may not lead its session yet, and would live on.
            for end in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    end(self.pid, signal.SIGKILL)


Process = subprocess.Popen[bytes] | Forked


class Imports:
    """A fork server; starts with the first process that is asked for, and ends with `close`. Threads may share it."""

    def __init__(
        self, backend: str, env: Mapping[str, str], log: Path, harnesses: Sequence[str] = ()
    ) -> None:
        """`backend`: that of the workers to fork; "" for processes that prepare and score tasks of `harnesses`.
        `env`: of the server; those of its children may differ in what is read late (CUDA_VISIBLE_DEVICES)."""
        self.backend, self._log, self.harnesses = backend, log, tuple(harnesses)
        self._guard = threading.RLock()
        # Whether a GPU is there is asked by some imports: of the driver's library, without a context.
        self._env = {**env, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self._numbers = itertools.count(1)
        self._children: dict[int, Forked] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._said = b""
        self.gone = False
        self.ready = False
        """Its imports are done."""
        self.unfit = ""
        """Why it forks nothing."""

    def start(self) -> None:
        """Begins to import."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "unbroken.evaluate.engines.fork_server", str(theirs.fileno()), self.backend, *self.harnesses],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=self._env,
                pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        self._link = ours

    @property
    def usable(self) -> bool:
        """Whether it forks, or will."""
        with self._guard:
            if self._process is None and not self.gone:
                self.start()
        self.hear()
        return not self.gone and not self.unfit

    def fork(self, argv: Sequence[str], env: Mapping[str, str], log: Path, *, with_input: bool) -> Forked:
        """`python -m argv...` from what is imported, its output in `log`. Raises OSError where the server is gone."""
        read, write = os.pipe() if with_input else (os.open(os.devnull, os.O_RDONLY), -1)
        log.parent.mkdir(parents=True, exist_ok=True)
        out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            child = self._fork(argv, env, (read, out, out))
        except OSError:
            if write >= 0:
                os.close(write)
            raise
        finally:
            os.close(read)
            os.close(out)
        child.stdin = os.fdopen(write, "wb") if write >= 0 else None
        return child

    def fork_piped(self, argv: Sequence[str], env: Mapping[str, str], errors: int) -> Forked:
        """As `fork`, with a pipe to its input and one from its output; `errors`: the descriptor for the rest of what
        it prints. Raises OSError where the server is gone."""
        (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
        try:
            child = self._fork(argv, env, (theirs_in, theirs_out, errors))
        except OSError:
            os.close(ours_in)
            os.close(ours_out)
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        child.stdin, child.stdout = os.fdopen(ours_in, "wb"), os.fdopen(ours_out, "rb")
        return child

    def _fork(self, argv: Sequence[str], env: Mapping[str, str], fds: Sequence[int]) -> Forked:
        if not self.usable:
            raise OSError("the fork server is gone")
        with self._guard:
            if self._link is None:
                raise OSError("the fork server is gone")
            child = Forked(self, next(self._numbers), None)
            request = json.dumps({"id": child.number, "argv": list(argv), "env": dict(env)}).encode()
            self._children[child.number] = child
            try:
                socket.send_fds(self._link, [request], list(fds))
            except OSError:
                del self._children[child.number]
                raise
        return child

    def hear(self, within_s: float = 0.0) -> None:
        """Takes in what the server has told."""
        link = self._link
        if link is None:
            return
        if within_s:
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                select.select([link], [], [], within_s)
        with self._guard:
            self._take_in()

    def _take_in(self) -> None:
        while self._link is not None and select.select([self._link], [], [], 0.0)[0]:
            try:
                data = self._link.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                self._lost()
                return
            *lines, self._said = (self._said + data).split(b"\n")
            for line in lines:
                event = json.loads(line)
                self.ready = self.ready or "ready" in event
                if "unfit" in event:
                    self.unfit = str(event["unfit"])
                child = self._children.get(event.get("id", 0))
                if child is not None and "pid" in event:
                    child.pid = int(event["pid"])
                if child is not None and "code" in event:
                    child.returncode = int(event["code"])
                    del self._children[child.number]

    def close(self) -> None:
        """Ends the server; what it forked is ended by whoever asked for it."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        self.hear()
        self._lost()

    def _lost(self) -> None:
        with self._guard:
            self.gone = True
            if self._link is not None:
                self._link.close()
                self._link = None


def start_piped(
    imports: Imports | None, argv: Sequence[str], env: Mapping[str, str], errors: int | None
) -> Process:
    """`python -m argv...` in a session of its own, with pipes to its input and from its output; forked from `imports`
    where those can. `errors`: the descriptor of its standard error; None: ours."""
    if imports is not None and imports.usable:
        with contextlib.suppress(OSError):
            return imports.fork_piped(argv, env, 2 if errors is None else errors)
    return subprocess.Popen([sys.executable, "-m", *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                            env=dict(env), start_new_session=True)  # fmt: skip


def end_piped(process: Process) -> None:
    """Kills it with its session, waits for it, and closes its pipes."""
    if isinstance(process, Forked):
        process.kill()
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError, ValueError):
                pipe.close()


def _alive(pid: int) -> bool:
    """Whether it runs. One that has ended and that nobody has taken away yet does not: in a container the first process need not."""
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
