"""A cluster in one process and simulated time, as `contract.Cluster` has it; what goes wrong in it is said by `faults`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from pathlib import Path

from ...cluster.at_once import fence_all
from ...cluster.clocks import Moment
from ...cluster.contract import (
    AgentCommand,
    Allocation,
    Cordon,
    EndingAt,
    Event,
    Exited,
    Fenced,
    Lost,
    Pending,
    Request,
    Started,
)
from ...cluster.stream import EventStream
from ...errors import DoesNotFit, RunError
from ...units import plural
from ...waiting import wait_within
from .agent import FakeNode, VirtualAgent
from .keeper import FakeStorage
from .network import Network
from .training import Gang, Script

_WALL = 1.8e9
"""Seconds since the Unix epoch when a simulation begins."""


class FakeHardware:
    """The nodes themselves, which outlive supervisors: several `FakeCluster` of one run share them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, nodes: int, *, gpus: int = 8) -> None:
        self.loop = loop
        self.network, self.storage = Network(loop), FakeStorage()
        self.nodes = {
            f"node-{i:05d}": FakeNode(f"node-{i:05d}", gpus, booted=-1000.0 - 7.0 * i) for i in range(nodes)
        }
        self.given: dict[str, None] = {}
        """In the order in which they were given."""
        self.cordons: dict[str, Cordon] = {}
        self.gangs: dict[int, Gang] = {}
        self.launches = 0
        self.held_up = ""
        """Why no request is granted just now; nothing where they are."""
        self.expected: float | None = None
        self.ends: float | None = None
        self.changed = asyncio.Event()
        self.streams: set[EventStream] = set()

    def publish(self, event: Event) -> None:
        for stream in self.streams:
            stream.publish(event)

    def change(self) -> None:
        """Whoever waits for nodes looks again."""
        self.changed.set()
        self.changed = asyncio.Event()


class FakeCluster:
    """`contract.Cluster` over virtual nodes. `script` is what their ranks do; a fence takes `fence_s`. A successor is made
    with the same `hardware`."""

    def __init__(
        self, run_id: str, hardware: FakeHardware, *, script: Script | None = None, fence_s: float = 0.2
    ) -> None:
        self.run_id, self.hardware, self.script = run_id, hardware, script or Script()
        self.loop, self.network, self.storage = hardware.loop, hardware.network, hardware.storage
        self.wall_offset_s = _WALL
        self._fence_s = fence_s
        self._stream = EventStream(self._running)
        hardware.streams.add(self._stream)

    @property
    def nodes(self) -> Mapping[str, FakeNode]:
        return self.hardware.nodes

    @property
    def socket_folder(self) -> Path | None:
        """Its nodes are virtual, and come over a network of its own."""
        return None

    @property
    def door_address(self) -> str:
        return ""

    def check(self, request: Request) -> None:
        wanted, capacity = request.nodes + request.spares, self._capacity(request)
        if capacity < wanted:
            raise DoesNotFit(
                f"{plural(wanted, 'node')} of {plural(request.ranks_per_node, 'rank')} are more than the {capacity} that there are",
                hint="Ask for fewer --nodes or --spares",
            )

    def describe(self) -> str:
        return f"{len(self.nodes)} virtual nodes in simulated time"

    def now(self) -> Moment:
        return Moment.at(self.loop.time())

    def number_of(self, node: str) -> int:
        """Which one it is, from 0."""
        return int(node.rpartition("-")[2])

    def node_at(self, address: str) -> str:
        """The node that has this HOST:PORT; "" for none."""
        parts = address.rpartition(":")[0].split(".")
        if len(parts) != 4 or parts[0] != "10":
            return ""
        return f"node-{(int(parts[1]) << 16) + (int(parts[2]) << 8) + int(parts[3]):05d}"

    # --- nodes

    async def acquire(self, request: Request) -> Allocation:
        # A node is the run's until another one is given in its place: a request that is withdrawn changes nothing.
        mine = [n for n in request.replaces if n in self.hardware.given]
        for name in mine:
            self.hardware.given.pop(name)
        try:
            return await self._acquire(request)
        except BaseException:
            self.hardware.given.update(dict.fromkeys(mine))
            raise

    async def _acquire(self, request: Request) -> Allocation:
        hw, wanted = self.hardware, request.nodes + request.spares
        told = None
        self.check(request)
        while True:
            out = {*self._cordoned(), *request.exclude, *request.replaces}
            held = [] if request.replaces else [n for n in hw.given if n not in out][:wanted]
            free = [n for n in self._fitting(request) if n not in out and n not in hw.given]
            lacking = wanted - len(held)
            if not lacking or (not hw.held_up and len(free) >= lacking):
                given = [*held, *free[:lacking]]
                hw.given.update(dict.fromkeys(given))
                return Allocation(
                    "job-1", tuple(given[: request.nodes]), tuple(given[request.nodes :]), hw.ends
                )
            why = (
                hw.held_up
                or f"{plural(lacking, 'more node')} {'is' if lacking == 1 else 'are'} needed, {len(free)} {'is' if len(free) == 1 else 'are'} free"
            )
            if told != (why, hw.expected):
                told = (why, hw.expected)
                self._stream.publish(Pending(self.now(), request, why, hw.expected))
            await self._change()

    async def _change(self) -> None:
        """Waits until nodes may have become free: somebody said so, or a cordon expires."""
        until = [c.expires - _WALL for c in self.hardware.cordons.values() if c.expires is not None]
        soonest = min([t for t in until if t > self.loop.time()], default=math.inf)
        changed = self.hardware.changed.wait()
        if math.isinf(soonest):
            await changed
            return
        try:
            await wait_within(changed, soonest - self.loop.time())
        except TimeoutError:
            return

    def _capacity(self, request: Request) -> int:
        """How many nodes the request could ever be given: for a replacement, beside those that the run has."""
        large = sum(n.gpus >= request.ranks_per_node for n in self.nodes.values())
        return large - len(self.hardware.given) if request.replaces else large

    def _fitting(self, request: Request) -> Iterable[str]:
        return (n.name for n in self.nodes.values() if n.state == "up" and n.gpus >= request.ranks_per_node)

    async def give_back(self, nodes: Collection[str]) -> None:
        proven, error = await fence_all(self.fence, [n for n in nodes if n in self.hardware.given])
        for name in proven:
            self.hardware.given.pop(name)
        self.hardware.change()
        if error is not None:
            raise error

    # --- agents

    async def start(self, node: str, command: AgentCommand) -> str:
        known = self.nodes.get(node)
        if known is None or node not in self.hardware.given:
            raise RunError("the node is none of this run's", where=node, hint="Ask for nodes first")
        if known.state != "up":
            raise RunError(f"the node takes no order: it is {known.state}", where=node)
        if known.agent is not None:
            raise RunError("an agent runs there already", where=node)
        self.hardware.launches += 1
        launch = f"{node}/{self.hardware.launches}"
        self.loop.call_later(known.start_s, self._begin, known, known.wiped, launch, command)
        return launch

    def _begin(self, node: FakeNode, wiped: int, launch: str, command: AgentCommand) -> None:
        if node.wiped != wiped:
            return  # the order was on its way when the node was fenced or lost
        if node.agent is not None:
            # Two orders at once: the second finds the place taken.
            self.hardware.publish(Started(self.now(), node.name, launch))
            self.hardware.publish(Exited(self.now(), node.name, launch, 1))
            return
        node.agent, node.command = VirtualAgent(self, node, launch, command), command
        self.hardware.publish(Started(self.now(), node.name, launch))

    def restart_agent(self, node: FakeNode) -> None:
        """Starts a node's agent as it was started last, without an order."""
        if node.command is None:
            raise ValueError(f"no agent was started on {node.name} before")
        self.hardware.launches += 1
        launch = f"{node.name}/{self.hardware.launches}"
        self.loop.call_later(node.start_s, self._begin, node, node.wiped, launch, node.command)

    def agent_ended(self, agent: VirtualAgent, code: int | None, signal: int | None) -> None:
        """An agent's process has ended; what its keeper holds is still there."""
        if agent.node.agent is not agent:
            return
        agent.end()
        agent.node.agent = None
        if agent.node.state == "up":
            self.hardware.publish(Exited(self.now(), agent.node.name, agent.launch, code, signal))

    def peer_of(self, node: str) -> FakeNode | None:
        """The next node of the run that an agent runs on; None where there is no other."""
        size = len(self.nodes)
        for i in range(1, size):
            name = f"node-{(self.number_of(node) + i) % size:05d}"
            if name in self.hardware.given and self.nodes[name].agent is not None:
                return self.nodes[name]
        return None

    def gang(self, attempt: int, world_size: int, first: int) -> Gang:
        """The ranks of an attempt, made by whoever asks first."""
        gangs = self.hardware.gangs
        if attempt not in gangs:
            gangs[attempt] = Gang(self.loop, self.script, attempt, world_size, first)
        return gangs[attempt]

    # --- events

    def events(self) -> AsyncIterator[Event]:
        return self._stream.read()

    def _running(self) -> list[Event]:
        agents = [n.agent for n in self.nodes.values() if n.agent is not None and n.state == "up"]
        found: list[Event] = [Started(self.now(), a.node.name, a.launch) for a in agents]
        found += [
            Lost(self.now(), n, "it was lost before")
            for n in self.hardware.given
            if self.nodes[n].state != "up"
        ]
        if self.hardware.ends is not None:
            found.append(EndingAt(self.now(), "job-1", self.hardware.ends))
        return found

    # --- fences and cordons

    async def fence(self, node: str, deadline_s: float) -> Fenced:
        known = self.nodes[node]
        if known.state == "lost" and not known.unfenceable:
            return Fenced(True)
        if known.state != "up" or known.unfenceable or self._fence_s > deadline_s:
            # It may come back before the deadline.
            until = self.loop.time() + deadline_s
            while self.loop.time() < until:
                await asyncio.sleep(min(0.5, until - self.loop.time()))
                if known.state == "up" and not known.unfenceable and self._fence_s <= deadline_s:
                    break
            else:
                return Fenced(False, f"{node} did not answer within {deadline_s:g} s")
        await asyncio.sleep(min(self._fence_s, deadline_s))
        if known.agent is not None:
            self.agent_ended(known.agent, None, 9)
        known.wipe()
        return Fenced(True)

    async def forget(self, node: str) -> None:
        """Nothing is remembered here."""

    async def cordon(self, cordon: Cordon) -> None:
        held = self._cordoned().get(cordon.node)
        if held is not None and held.owner != cordon.owner:
            raise RunError(f"it is cordoned by {held.owner} ({held.reason})", where=cordon.node)
        self.hardware.cordons[cordon.node] = cordon

    async def release(self, node: str, owner: str) -> None:
        held = self._cordoned().get(node)
        if held is not None and held.owner != owner:
            raise RunError(f"it was cordoned by {held.owner}, not by {owner}", where=node)
        self.hardware.cordons.pop(node, None)
        self.hardware.change()

    async def cordons(self) -> Mapping[str, Cordon]:
        return self._cordoned()

    def _cordoned(self) -> dict[str, Cordon]:
        now = self.loop.time() + _WALL
        return {n: c for n, c in self.hardware.cordons.items() if not c.has_expired(now)}

    async def close(self) -> None:
        self.hardware.streams.discard(self._stream)
        self._stream.close()
