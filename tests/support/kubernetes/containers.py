"""Containers as processes of this machine: what is in which is told by a mark in the environment."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

_MARK = "FAKE_CONTAINER_"


class Container:
    """One container. `code` once its own process has ended: then nothing else in it is left either."""

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.name, self.log = name, log
        self.id = uuid.uuid4().hex
        self.env = {**env, f"{_MARK}{name}": self.id}
        self.started = time.time()
        self.code: int | None = None
        self.refused = ""
        try:
            with open(log, "ab") as out:
                self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                    [*argv], env=self.env, cwd="/", stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as e:
            self._process, self.code = None, 128
            self.refused = f'exec: "{argv[0]}": {e.strerror}'

    def poll(self) -> int | None:
        if self.code is None and self._process is not None:
            code = self._process.poll()
            if code is not None:
                self._kill_rest()
                self.code = code if code >= 0 else 128 - code
        return self.code

    def signal(self, number: int) -> None:
        """To its own process alone, as the kubelet does."""
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Ends all that is in it."""
        self.signal(signal.SIGKILL)
        self._kill_rest()

    def find_processes(self) -> list[int]:
        found = []
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            try:
                environ = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if f"{_MARK}{self.name}={self.id}".encode() not in environ or state in "ZX":
                continue
            # What is started for the agent in the other container has the marks of both.
            if self.name != "agent" or not any(v.startswith(f"{_MARK}ranks=".encode()) for v in environ):
                found.append(int(name))
        return found

    def _kill_rest(self) -> None:
        deadline = time.monotonic() + 10
        while (left := self.find_processes()) and time.monotonic() < deadline:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if self._process is not None:
                self._process.poll()
            time.sleep(0.002)
