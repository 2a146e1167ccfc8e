"""`unbroken` with one cluster more, `plain`: agents are plain processes with little of this one's surroundings, which come over
TLS as from other machines, here over the loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from unbroken.cluster import registry
from unbroken.cluster.clocks import Moment
from unbroken.cluster.contract import (
    AgentCommand,
    Allocation,
    Cordon,
    Event,
    Exited,
    Fenced,
    Lost,
    Request,
    Returned,
    Started,
)
from unbroken.cluster.holding.choice import choose
from unbroken.cluster.local import find_root
from unbroken.cluster.stream import EventStream
from unbroken.errors import DoesNotFit, RunError, UsageError
from unbroken.link.secret import as_input
from unbroken.machine import python_path


@dataclass(frozen=True)
class PlainOptions:
    notes: Path
    """A folder in which a successor finds what runs."""
    size: int = 4
    """Nodes that there are."""
    apart: bool = False
    """Whether nodes have no run directory."""
    address: str = "127.0.0.1"
    """This host's, as agents reach it."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UsageError("a cluster without nodes is of no use")


class PlainCluster:
    """Nodes `plain-0`, `plain-1`, ...; where each process runs is in a note of its node. As long as there is a note `away-plain-1`
    that node is lost."""

    Options = PlainOptions

    def __init__(
        self, run_id: str, options: PlainOptions, *, log_of: Callable[[str], Path] | None = None
    ) -> None:
        self.run_id, self._options, self._log_of = run_id, options, log_of
        self._stream = EventStream(self._running)
        self._launches: dict[str, str] = {}
        self._away: asyncio.Task[None] | None = None

    @property
    def socket_folder(self) -> Path | None:
        return None

    @property
    def door_address(self) -> str:
        return self._options.address

    def describe(self) -> str:
        return "plain processes"

    def check(self, request: Request) -> None:
        if request.nodes + request.spares > self._options.size:
            raise DoesNotFit(f"there are {self._options.size} plain nodes", hint="Ask for less")

    async def acquire(self, request: Request) -> Allocation:
        out = {*request.exclude, *request.replaces}
        names = [n for i in range(self._options.size) if (n := f"plain-{i}") not in out]
        if request.replaces or len(names) < request.nodes + request.spares:
            raise DoesNotFit("there is no other node")
        return Allocation(
            "plain", tuple(names[: request.nodes]), tuple(names[request.nodes :][: request.spares])
        )

    async def start(self, node: str, command: AgentCommand) -> str:
        if (self._options.notes / f"away-{node}").exists():
            raise RunError("the node is away", where=node)
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": python_path(), **command.environment}
        log = self._log_of(node) if self._log_of else Path(os.devnull)
        log.parent.mkdir(parents=True, exist_ok=True)
        arguments = list(command.arguments)
        if self._options.apart:
            arguments[arguments.index("--run-dir") + 1] = str(self._options.notes.parent / "nowhere" / "run")
        with open(log, "ab") as out, as_input(command.secret) as secret:
            process = subprocess.Popen(
                [sys.executable, "-m", command.module, *arguments], env=env, cwd="/", stdin=secret,
                stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        (self._options.notes / node).write_text(str(process.pid))
        self._follow(node, process.pid)
        self._stream.publish(Started(Moment.at(time.monotonic()), node, self._launches[node]))
        return self._launches[node]

    def _follow(self, node: str, pid: int) -> None:
        fd = os.pidfd_open(pid)
        self._launches[node] = launch = f"{node}/{pid}"

        def ended() -> None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)
            with contextlib.suppress(OSError):
                os.waitpid(pid, 0)
            if self._launches.get(node) == launch:
                del self._launches[node]
            self._stream.publish(Exited(Moment.at(time.monotonic()), node, launch))

        asyncio.get_running_loop().add_reader(fd, ended)

    def _running(self) -> list[Event]:
        for note in self._options.notes.iterdir():
            with contextlib.suppress(OSError, ValueError):
                if note.name not in self._launches:
                    self._follow(note.name, int(note.read_text()))
        return [Started(Moment.at(time.monotonic()), n, launch) for n, launch in self._launches.items()]

    async def _follow_away(self) -> None:
        away: set[str] = set()
        while True:
            now = {p.name.removeprefix("away-") for p in self._options.notes.glob("away-*")}
            for node in now - away:
                self._stream.publish(Lost(Moment.at(time.monotonic()), node, "its power is out", proven=True))
                await self.fence(node, 5.0)
            for node in away - now:
                self._stream.publish(Returned(Moment.at(time.monotonic()), node))
            away = now
            await asyncio.sleep(0.05)

    def events(self) -> AsyncIterator[Event]:
        self._away = self._away or asyncio.create_task(self._follow_away())
        return self._stream.read()

    async def fence(self, node: str, deadline_s: float) -> Fenced:
        owner, _ = choose(self.run_id, find_root(self.run_id))
        ended = await asyncio.to_thread(owner.end_node, node, deadline_s)
        return Fenced(ended.gone, ended.why, tuple(str(p) for p in ended.survivors))

    async def forget(self, node: str) -> None: ...
    async def cordon(self, cordon: Cordon) -> None: ...
    async def release(self, node: str, owner: str) -> None: ...

    async def cordons(self) -> Mapping[str, Cordon]:
        return {}

    async def give_back(self, nodes: Collection[str]) -> None:
        for node in nodes:
            await self.fence(node, 10.0)

    async def close(self) -> None:
        if self._away is not None:
            self._away.cancel()
        self._stream.close()


registry.register("plain", PlainCluster)

if __name__ == "__main__":
    from unbroken.cli.main import main

    main()
