"""One warm process, from its start until it becomes a rank or ends."""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....cluster import Ownership, Process
from .imports import can_record, count_own_words, find_own_folder, with_hook

READY_S = 300.0
"""Imports from a busy file system take minutes; what takes longer is no help."""
ANSWER_S = 10.0
"""For taking over: it checks its files, and the agent waits meanwhile."""
_LOOK_S = 0.05
_LOOK_CLOSELY_S = 0.002
_WIDTH = 10
"""Digits of the numbers that are written over later."""


@dataclass(frozen=True)
class RankStart:
    """What a rank is started with, cold or warm."""

    rank: int
    attempt: int
    argv: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    log: Path


@dataclass(frozen=True)
class Readiness:
    """What came of warming. `why` says why it came to nothing, "" where it is ready; `culprit` is the module that did it.
    `stopped` says why not all was imported."""

    seconds: float = 0.0
    modules: int = 0
    stopped: str = ""
    why: str = ""
    culprit: str = ""


class WarmProcess:
    """A process that has imported, or does so now, what the rank before it imported. `pid` is its process."""

    def __init__(self, process: Process, start: RankStart, folder: Path, go: int) -> None:
        self._process, self._start, self._folder, self._go = process, start, folder, go
        self.pid = process.pid
        self.readiness: Readiness | None = None

    @classmethod
    def launch(
        cls, start: RankStart, imports: Sequence[str], without: Collection[str], folder: Path, node: str, owner: Ownership,
        enter: Callable[[], None],
    ) -> WarmProcess | None:  # fmt: skip
        """Starts it in a folder of its own; None where ranks are held so that none can be. Raises OSError."""
        held = owner.start_warm(node, start.argv)
        if held is None:
            return None
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, mode=0o700)
            os.mkfifo(folder / "go", 0o600)
            marks = {"RANK": start.env["RANK"], "UNBROKEN_ATTEMPT": start.env["UNBROKEN_ATTEMPT"]}
            order = {
                "env": marks, "imports": list(imports), "without": list(without),
                "own": find_own_folder(start.argv, start.cwd),
            }  # fmt: skip
            (folder / "order").write_bytes(marshal.dumps(order))
            go = os.open(folder / "go", os.O_RDWR | os.O_CLOEXEC)
            env = {**start.env, "UNBROKEN_ROLE": "warm", **{k: v.zfill(_WIDTH) for k, v in marks.items()}}

            def begin() -> None:
                held.enter()
                enter()

            with open(folder / "printed", "ab", buffering=0) as out:
                try:
                    process = (held.spawn or subprocess.Popen)(
                        held.argv, cwd=start.cwd, env=with_hook(env, folder), stdin=subprocess.DEVNULL, stdout=out,
                        stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=begin,
                    )  # fmt: skip
                except BaseException:
                    os.close(go)
                    raise
        finally:
            held.close()
        return cls(process, start, folder, go)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def folder(self) -> Path:
        """Where its imports are recorded."""
        return self._folder

    async def wait_until_ready(self, within_s: float = READY_S) -> Readiness:
        """Waits for its imports; it is ended where they came to nothing."""
        said = await self._wait_for("said", within_s, _LOOK_S)
        if said is None:
            why = (
                "it ended while it imported"
                if not self.running
                else f"it was not ready after {within_s:.0f} s"
            )
            self.readiness = Readiness(why=why)
        elif "why" in said:
            self.readiness = Readiness(why=str(said["why"]), culprit=str(said.get("name", "")))
        else:
            self.readiness = Readiness(float(said["seconds"]), int(said["count"]), str(said["stopped"]))
        if self.readiness.why:
            self.end()
        return self.readiness

    async def _wait_for(self, name: str, within_s: float, every_s: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + within_s
        while True:
            ran = self.running
            with contextlib.suppress(OSError, ValueError, EOFError, TypeError):
                found = marshal.loads((self._folder / name).read_bytes())
                return found if isinstance(found, dict) else None
            if not ran or time.monotonic() > deadline:
                return None
            await asyncio.sleep(every_s)

    def find_refusal(self, start: RankStart) -> str:
        """Why it cannot become this rank, as far as that can be told without asking it."""
        if self.readiness is None:
            return "its warm process was not ready yet"
        if not self.running:
            return "its warm process has ended"
        if not can_record(start.argv):
            return "its command is no Python script"
        words = count_own_words(start.argv)
        if start.argv[:words] != self._start.argv[:words]:
            return "the script is another one"
        return ""

    async def become(self, start: RankStart, node: str, owner: Ownership) -> Process | str:
        """The process, as that rank; in words why not, and then it is ended."""
        try:
            owner.move_warm(node, start.attempt, self.pid)
            printed = (self._folder / "printed").read_bytes()
            with contextlib.suppress(OSError), open(start.log, "ab", buffering=0) as log:
                log.write(printed)  # a full disk loses these lines, and not the process
            marks = {
                "UNBROKEN_ROLE": "rank", "RANK": str(start.rank).zfill(_WIDTH),
                "UNBROKEN_ATTEMPT": str(start.attempt).zfill(_WIDTH),
            }  # fmt: skip
            order = {
                "env": dict(start.env), "marks": marks, "cwd": os.path.realpath(start.cwd), "log": str(start.log),
                "arguments": list(start.argv[count_own_words(start.argv) :]),
            }  # fmt: skip
            (self._folder / "launch").write_bytes(marshal.dumps(order))
            os.write(self._go, b"g")
            answer = await self._wait_for("answer", ANSWER_S, _LOOK_CLOSELY_S)
        except OSError as e:
            answer = {"why": f"its warm process could not take over: {e.strerror or e}"}
        except BaseException:
            self.end()
            raise
        if answer is None or "why" in answer:
            self.end()
            return str(answer["why"]) if answer else "its warm process did not answer"
        os.close(self._go)
        self._go = -1
        return self._process

    def end(self) -> None:
        """Kills it, if it is no rank."""
        if self._go < 0:
            return
        os.close(self._go)
        self._go = -1
        with contextlib.suppress(ProcessLookupError):
            if self.running:
                os.kill(self.pid, signal.SIGKILL)
