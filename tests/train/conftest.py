"""Ranks that start in milliseconds."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from unbroken.train.witness import Witness, read_witness

NURSERY = Path(__file__).with_name("nursery.py")


class Nursery:
    """The process that forks ranks."""

    def __init__(self) -> None:
        env = os.environ | {"PYTHONUNBUFFERED": "1"}
        self._p = subprocess.Popen(
            [sys.executable, str(NURSERY)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self._answer()

    def start(self, argv: list[str], env: dict[str, str], log: Path) -> int:
        return int(self._ask({"argv": argv, "env": env, "log": str(log)})["pid"])

    def wait(self, pid: int) -> int:
        return int(self._ask({"wait": pid})["code"])

    def close(self) -> None:
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
        assert line, "the nursery died"
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass
class Training:
    """One training of several ranks in a folder, started as often as its test likes."""

    nursery: Nursery
    folder: Path
    ranks: int
    argv: list[str]
    pids: list[int] = field(default_factory=list)
    starts: int = 0

    def start(self, *more: str) -> None:
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
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "UNBROKEN_LODGING": str(self.folder),
            }  # fmt: skip
            self.pids.append(self.nursery.start(argv, env, self.log(r)))

    def log(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.{self.starts}.log"

    def wait_for_step(self, step: int, rank: int = 0, within: float = 60.0) -> None:
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            if step in self.witness(rank).losses:
                return
            time.sleep(0.01)
        raise AssertionError(f"step {step} was not reached:\n{self.said()}")

    def kill(self, rank: int, signal_: int = signal.SIGKILL) -> None:
        os.kill(self.pids[rank], signal_)

    def codes(self) -> list[int]:
        return [self.nursery.wait(p) for p in self.pids]

    def finish(self) -> None:
        codes = self.codes()
        assert codes == [0] * self.ranks, f"{codes}\n{self.said()}"

    def said(self) -> str:
        return "\n".join(f"-- {p.name}\n{p.read_text()}" for p in sorted(self.folder.glob("rank-*.log")))

    def witness(self, rank: int) -> Witness:
        path = self.folder / f"w-{rank}.jsonl"
        return read_witness(path) if path.exists() else Witness()

    def witnesses(self) -> list[Witness]:
        return [self.witness(r) for r in range(self.ranks)]


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    n = Nursery()
    yield n
    n.close()
