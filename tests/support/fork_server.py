"""Ranks of the reference trainer that start in milliseconds, for tests that kill many of them.

`ForkServer` is a process that imports torch once and forks a rank whenever it is asked; `Training` is one training of
several ranks, started, killed and started again. The protocol is a JSON object a line: {"argv", "env", "log"} is
answered by {"pid"}, {"wait": pid} by {"code"}, the exit code or minus the signal.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unbroken.train.step_digests import StepDigest, read_step_digests


class ForkServer:
    """The process that forks ranks."""

    def __init__(self, preload: str = "unbroken.train.loop") -> None:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        env = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
        self._p = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server", preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        self._answer()

    def start(self, argv: list[str], env: dict[str, str], log: Path) -> int:
        """Forks a rank that runs `unbroken train` with `argv`; returns its process id."""
        return int(self._ask({"argv": argv, "env": env, "log": str(log)})["pid"])

    def wait(self, pid: int) -> int:
        """Waits for a rank's end; returns its exit code, or minus the signal."""
        return int(self._ask({"wait": pid})["code"])

    def close(self) -> None:
        """Ends the fork server and every rank that still runs."""
        assert self._p.stdin is not None
        self._p.stdin.close()
        self._p.wait(20)

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._p.stdin is not None
        self._p.stdin.write(json.dumps(order) + "\n")
        self._p.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._p.stdout is not None
        line = self._p.stdout.readline()
        assert line, "the fork server died"
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass
class Training:
    """One training of several ranks in a folder, started as often as its test likes."""

    fork_server: ForkServer
    folder: Path
    ranks: int
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    """Variables of every rank."""
    pids: list[int] = field(default_factory=list)
    starts: int = 0

    def start(self, *more: str) -> None:
        """Starts every rank, with more options."""
        self.folder.mkdir(exist_ok=True)
        self.starts += 1
        argv = [*self.argv, "--trace", str(self.folder / "w-{rank}.jsonl"), *more]
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.pids = []
        for r in range(self.ranks):
            env = {
                "RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": str(self.ranks), "LOCAL_WORLD_SIZE": str(self.ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                **self.env,
            }  # fmt: skip
            self.pids.append(self.fork_server.start(argv, env, self.log(r)))

    def log(self, rank: int) -> Path:
        """Where a rank of the newest start prints."""
        return self.folder / f"rank-{rank}.{self.starts}.log"

    def wait_for_step(self, step: int, rank: int = 0, within: float = 60.0) -> None:
        """Waits until a rank has completed a step; AssertionError when that does not come."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            if step in self.step_digests(rank).losses:
                return
            time.sleep(0.01)
        raise AssertionError(f"step {step} was not reached:\n{self.said()}")

    def kill(self, rank: int, signal_: int = signal.SIGKILL) -> None:
        """Signals one rank."""
        os.kill(self.pids[rank], signal_)

    def codes(self) -> list[int]:
        """Waits for all ranks; returns their exit codes, or minus the signals."""
        return [self.fork_server.wait(p) for p in self.pids]

    def finish(self) -> None:
        """Waits for all ranks; AssertionError with what they printed unless each ended well."""
        codes = self.codes()
        assert codes == [0] * self.ranks, f"{codes}\n{self.said()}"

    def said(self) -> str:
        """What all ranks of all starts printed."""
        return "\n".join(f"-- {p.name}\n{p.read_text()}" for p in sorted(self.folder.glob("rank-*.log")))

    def step_digests(self, rank: int) -> StepDigest:
        """What a rank's trace says so far."""
        path = self.folder / f"w-{rank}.jsonl"
        return read_step_digests(path) if path.exists() else StepDigest()

    def all_step_digests(self) -> list[StepDigest]:
        """What every rank's trace says."""
        return [self.step_digests(r) for r in range(self.ranks)]


def serve(preload: str) -> None:
    """The fork server's own side: reads orders until its input ends."""
    from unbroken.train.world import pin_environment

    pin_environment()
    import torch.distributed.tensor  # noqa: F401  the Checkpointer wants it at the first save: 1.5 s for each rank

    import unbroken.checkpoint.checkpointer
    import unbroken.train.loop  # noqa: F401

    importlib.import_module(preload)

    children: set[int] = set()
    print(json.dumps({"ready": True}), flush=True)
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], 0)
            children.discard(order["wait"])
            print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            become(order)
        children.add(pid)
        print(json.dumps({"pid": pid}), flush=True)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def become(order: dict[str, object]) -> None:
    """Turns this freshly forked process into the rank that was ordered; never returns."""
    log = os.open(str(order["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    env = order["env"]
    assert isinstance(env, dict)
    os.environ.update(env)
    from unbroken.train.__main__ import main

    argv = order["argv"]
    assert isinstance(argv, list)
    sys.exit(main(argv))


if __name__ == "__main__":
    serve(sys.argv[1])
