"""A toy backend: what a new cluster takes is one file like this one and one registration. Its agents are tasks."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.cluster.clocks import Moment
from unbroken.cluster.contract import (
    AgentCommand,
    Allocation,
    Cordon,
    Event,
    Exited,
    Fenced,
    Request,
    Started,
)
from unbroken.cluster.stream import EventStream
from unbroken.errors import DoesNotFit, RunError


@dataclass
class Agent:
    launch: str
    command: AgentCommand


@dataclass
class Site:
    """The machines, which outlive supervisors."""

    size: int = 8
    slots: int = 8
    given: list[str] = field(default_factory=list)
    agents: dict[str, Agent] = field(default_factory=dict)
    cordoned: dict[str, Cordon] = field(default_factory=dict)
    streams: list[EventStream] = field(default_factory=list)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def end(self, node: str, code: int | None = None, signal: int | None = None) -> None:
        agent = self.agents.pop(node)
        for stream in self.streams:
            stream.publish(Exited(now(), node, agent.launch, code, signal))


def now() -> Moment:
    return Moment.at(time.monotonic())


SITES: dict[str, Site] = {}


@dataclass(frozen=True)
class ToyOptions:
    site: str = "here"
    """Which machines, by a name in `SITES`."""


class ToyCluster:
    """`contract.Cluster` over a `Site`."""

    Options = ToyOptions

    def __init__(
        self, run_id: str, options: ToyOptions, *, log_of: Callable[[str], Path] | None = None
    ) -> None:
        self.run_id, self._site = run_id, (site := SITES.setdefault(options.site, Site()))
        self._stream = EventStream(lambda: [Started(now(), n, a.launch) for n, a in site.agents.items()])
        site.streams.append(self._stream)

    @property
    def socket_folder(self) -> Path | None:
        return None

    @property
    def door_address(self) -> str:
        return ""

    def describe(self) -> str:
        return "a toy"

    def check(self, request: Request) -> None:
        site = self._site
        if request.ranks_per_node > site.slots or request.nodes + request.spares > site.size:
            raise DoesNotFit("the toy is smaller than that", hint="Ask for less")

    async def acquire(self, request: Request) -> Allocation:
        site, wanted = self._site, request.nodes + request.spares
        out = {*await self.cordons(), *request.exclude, *request.replaces}
        self.check(request)
        held = [] if request.replaces else [n for n in site.given if n not in out][:wanted]
        free = [n for i in range(site.size) if (n := f"toy-{i}") not in out and n not in site.given]
        fresh = free[: wanted - len(held)]
        site.given = [n for n in site.given if n not in request.replaces] + fresh
        found = [*held, *fresh]
        return Allocation("toy", tuple(found[: request.nodes]), tuple(found[request.nodes :]))

    async def start(self, node: str, command: AgentCommand) -> str:
        if node not in self._site.given:
            raise RunError("the node is none of this run's", where=node)
        launch = f"{node}/{next(self._site.numbers)}"
        self._site.agents[node] = Agent(launch, command)
        for stream in self._site.streams:
            stream.publish(Started(now(), node, launch))
        return launch

    def events(self) -> AsyncIterator[Event]:
        return self._stream.read()

    async def fence(self, node: str, deadline_s: float) -> Fenced:
        if node in self._site.agents:
            self._site.end(node, signal=9)
        return Fenced(True)

    async def forget(self, node: str) -> None:
        """Nothing is remembered here."""

    async def cordon(self, cordon: Cordon) -> None:
        await self._check_owner(cordon.node, cordon.owner)
        self._site.cordoned[cordon.node] = cordon

    async def release(self, node: str, owner: str) -> None:
        await self._check_owner(node, owner)
        self._site.cordoned.pop(node, None)

    async def _check_owner(self, node: str, owner: str) -> None:
        held = (await self.cordons()).get(node)
        if held is not None and held.owner != owner:
            raise RunError(f"it is cordoned by {held.owner}", where=node)

    async def cordons(self) -> Mapping[str, Cordon]:
        return {n: c for n, c in self._site.cordoned.items() if not c.has_expired(time.time())}

    async def give_back(self, nodes: Collection[str]) -> None:
        for node in set(nodes) & set(self._site.given):
            await self.fence(node, 10.0)
            self._site.given.remove(node)

    async def close(self) -> None:
        await asyncio.sleep(0)
        self._site.streams.remove(self._stream) if self._stream in self._site.streams else None
        self._stream.close()
