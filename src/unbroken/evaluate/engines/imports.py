"""The imports of a node's workers, made once: this side of fork_server.py."""

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
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

UNKNOWN = 1
"""The exit code of a process whose end nobody was left to tell."""


class Forked:
    """A process that the server forked, or will; as much of `subprocess.Popen` as an engine needs."""

    def __init__(self, server: Imports, number: int, stdin: IO[bytes] | None) -> None:
        self._server, self.number, self.stdin = server, number, stdin
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
        if self.poll() is not None:
            return
        if not self.pid:
            self._server.close()
        elif self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


class Imports:
    """A fork server for one backend; starts with the first process that is asked for, and ends with `close`."""

    def __init__(self, backend: str, env: Mapping[str, str], log: Path) -> None:
        """`env`: of the server; those of its children may differ in what is read late (CUDA_VISIBLE_DEVICES)."""
        self.backend, self._log = backend, log
        # Whether a GPU is there is asked by some imports: of the driver's library, without a context.
        self._env = {**env, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self._numbers = itertools.count(1)
        self._children: dict[int, Forked] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._said = b""
        self.gone = False
        self.unfit = ""
        """Why it forks nothing."""

    def start(self) -> None:
        """Begins to import."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "unbroken.evaluate.engines.fork_server", str(theirs.fileno()), self.backend],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=self._env,
                pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        self._link = ours

    @property
    def usable(self) -> bool:
        """Whether it forks, or will."""
        if self._process is None and not self.gone:
            self.start()
        self.hear()
        return not self.gone and not self.unfit

    def fork(self, argv: Sequence[str], env: Mapping[str, str], log: Path, *, with_input: bool) -> Forked:
        """`python -m argv...` from what is imported, its output in `log`. Raises OSError where the server is gone."""
        if not self.usable or self._link is None:
            raise OSError("the fork server is gone")
        number = next(self._numbers)
        read, write = os.pipe() if with_input else (os.open(os.devnull, os.O_RDONLY), -1)
        log.parent.mkdir(parents=True, exist_ok=True)
        out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            request = json.dumps({"id": number, "argv": list(argv), "env": dict(env)}).encode()
            socket.send_fds(self._link, [request], [read, out, out])
        except OSError:
            if write >= 0:
                os.close(write)
            raise
        finally:
            os.close(read)
            os.close(out)
        child = Forked(self, number, os.fdopen(write, "wb") if write >= 0 else None)
        self._children[number] = child
        return child

    def hear(self, within_s: float = 0.0) -> None:
        """Takes in what the server has told."""
        while self._link is not None and select.select([self._link], [], [], within_s)[0]:
            within_s = 0.0
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
        self.gone = True
        if self._link is not None:
            self._link.close()
            self._link = None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
