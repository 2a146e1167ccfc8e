"""The nodes of a run: their agents are started, their leases granted, and those that are lost noticed."""

from __future__ import annotations

import asyncio
import functools
import logging
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ....cluster import Backend, Ended, NodeState
from ....errors import RunError
from ....machine import python_path
from ....progress import RunDir
from ...wire import Link, Message
from ..attempt.outcome import NodeEnd
from ..record.clock import Clock
from .node import Node

_log = logging.getLogger("unbroken.supervisor")
_LEASE_MARGIN_S = 2.0
_SILENT_LEAST_S = 2.0
_AT_ONCE = 256
"""So many agents are asked at a time: answers of thousands at once would only wait in the loop."""


class Fleet:
    """What the supervisor knows of its nodes, and all that it does with the cluster."""

    def __init__(
        self,
        run_dir: RunDir,
        run_id: str,
        backend: Backend,
        *,
        nodes: int,
        spares: int,
        lease_s: float,
        agent_arguments: Sequence[str],
        clock: Clock,
        changed: asyncio.Event,
    ) -> None:
        """`agent_arguments` go to every agent; `changed` is set when a node comes or goes."""
        self._run_dir, self.run_id, self._backend = run_dir, run_id, backend
        self.lease_s, self._arguments = lease_s, tuple(agent_arguments)
        self._clock, self._changed = clock, changed
        self.allocation = backend.allocate(nodes, spares)
        self.nodes = {name: Node(name) for name in self.names}

    # --- what the desk reports

    def welcome(self, hello: Message, link: Link) -> Node:
        """Takes an agent in, in place of the one that was there before. Raises RunError for one that does not belong here."""
        node = self.nodes.get(hello["node"])
        if node is None or hello.get("run_id") != self.run_id:
            raise RunError("this agent belongs to another run", where=str(hello.get("node")))
        if node.state == "lost":
            raise RunError("this node was given up", where=node.name)
        if node.link is not None and node.link is not link:
            node.link.close()
        node.link, node.hello, node.state = link, hello, "up"
        node.heard = node.granted = self._clock.monotonic()
        self._changed.set()
        return node

    def note_sign(self, node: Node) -> None:
        """Something came from this node."""
        node.heard = self._clock.monotonic()

    def grant(self, node: Node) -> float:
        """Renews a node's lease; for how many seconds."""
        node.granted = self._clock.monotonic()
        return self.lease_s

    def note_closed(self, node: Node, link: Link) -> None:
        """A link to a node ended."""
        if node.link is link:
            _log.info("the link to %s is closed", node.name)
            self._changed.set()

    def hang_up(self) -> None:
        """Closes the links to all agents, which go on."""
        for node in self.nodes.values():
            if node.link is not None:
                node.link.close()

    # --- starting agents

    @property
    def names(self) -> tuple[str, ...]:
        """All nodes that the run may use: those that train first, then the spares."""
        return (*self.allocation.nodes, *self.allocation.spares)

    def up(self) -> list[str]:
        """The nodes whose agent answers."""
        return [n for n, node in self.nodes.items() if node.up]

    async def bring_up(self, names: Collection[str], within_s: float = 30.0) -> list[str]:
        """Starts agents where none is alive, waits for all; returns those that did not come."""
        for name in names:
            node = self.nodes[name]
            if node.up:
                continue
            node.state = "starting"
            if await asyncio.to_thread(self._backend.state, name) is not NodeState.ALIVE:
                self._launch(name)
        began = self._clock.monotonic()
        relaunched: set[str] = set()
        while self._clock.monotonic() < began + within_s:
            missing = [n for n in names if not self.nodes[n].up]
            if not missing:
                return []
            await asyncio.sleep(0.02)
            # An agent that was alive a moment ago may have been on its way out.
            if self._clock.monotonic() > began + 1.0:
                for name in missing:
                    state = await asyncio.to_thread(self._backend.state, name)
                    if state is not NodeState.ALIVE and name not in relaunched:
                        relaunched.add(name)
                        self._launch(name)
        return [n for n in names if not self.nodes[n].up]

    def _launch(self, name: str) -> None:
        argv = [
            sys.executable, "-m", "unbroken.recover.node.agent",
            "--run-dir", str(self._run_dir.path), "--run-id", self.run_id, "--node", name,
            "--scratch", str(self._backend.scratch(name)), "--ownership", self._backend.ownership(), *self._arguments,
        ]  # fmt: skip
        env = {"UNBROKEN_RUN_ID": self.run_id, "UNBROKEN_NODE": name, "UNBROKEN_ROLE": "agent"}
        if not _can_import():
            env["PYTHONPATH"] = (
                python_path()
            )  # the ranks inherit it: without it they could not import us either
        handle = self._backend.launch(name, argv, env, self._run_dir.agent_log(name))
        self.nodes[name].left = handle.left

    async def return_node(self, name: str) -> bool:
        """Starts a lost node again, empty; whether it came."""
        self.nodes[name].state = "down"
        return not await self.bring_up([name])

    # --- who is lost

    async def find_lost(self, names: Iterable[str]) -> dict[str, NodeEnd]:
        """Those of these nodes whose agent is gone for good, with what is left of them."""
        lost: dict[str, NodeEnd] = {}
        silent_after = max(_SILENT_LEAST_S, self.lease_s / 2)
        for name in dict.fromkeys(names):
            node = self.nodes[name]
            if node.up and self._clock.monotonic() - node.heard < silent_after:
                continue
            end = await asyncio.to_thread(self._check, name)
            if end is not None:
                lost[name] = end
        return lost

    def _check(self, name: str) -> NodeEnd | None:
        """None while the node's agent answers or may come back within its lease; else what the backend sees of it."""
        node = self.nodes[name]
        silent = self._clock.monotonic() - node.heard
        late = silent >= self.lease_s + _LEASE_MARGIN_S
        if node.up and not late:
            return None
        return self._read_state(name, late=late)

    def _read_state(self, name: str, *, late: bool = True) -> NodeEnd | None:
        match self._backend.state(name):
            case NodeState.ALIVE:
                return NodeEnd.UNREACHABLE if late else None
            case NodeState.AGENT_LOST:
                return NodeEnd.AGENT_LOST
            case NodeState.UNREACHABLE:
                return NodeEnd.UNREACHABLE
            case NodeState.GONE:
                return NodeEnd.GONE

    async def read_end(self, name: str) -> NodeEnd | None:
        """What is left of a node that did not answer; None where all of it may still be there."""
        return await asyncio.to_thread(self._read_state, name, late=False)

    def describe_silent(self, lost: Mapping[str, NodeEnd]) -> dict[str, str]:
        """What the agents do that are there but do not answer; to be asked before they are ended."""
        return {n: self._backend.agent_state(n) for n, end in lost.items() if end is NodeEnd.UNREACHABLE}

    def lease_ends(self, name: str) -> float:
        """The monotonic time from which the node's processes have stopped by themselves."""
        return self.nodes[name].granted + self.lease_s + _LEASE_MARGIN_S

    def give_up(self, name: str) -> None:
        """Marks a node as lost: its agent is refused from now on."""
        node = self.nodes[name]
        node.state = "lost"
        if node.link is not None:
            node.link.close()

    def find_free(self, slots: Collection[str], gone: Collection[str]) -> list[str]:
        """Nodes that could take another one's place now: none that trains, and none that is `gone` or out of use."""
        return [
            n for n in self.names
            if n not in slots and n not in gone and self.nodes[n].up
        ]  # fmt: skip

    # --- ending nodes

    async def fence(self, name: str) -> Ended:
        """Ends all that the run has on a node; whether that is proven."""
        return await asyncio.to_thread(self._backend.clear, name)

    async def wait_until_gone(self, name: str, within_s: float) -> None:
        """Waits until agent and keeper, which were told to leave, have left."""
        deadline = self._clock.monotonic() + within_s
        while self._clock.monotonic() < deadline:
            if await asyncio.to_thread(self._backend.state, name) is NodeState.GONE:
                return
            await asyncio.sleep(0.02)

    async def sweep(self) -> None:
        """Ends whatever is left of the run, on every node."""
        await asyncio.to_thread(self._backend.sweep)

    async def forget(self, name: str) -> None:
        """A person has made sure that nothing is left on a node whose end could not be proven."""
        await asyncio.to_thread(self._backend.forget, name)

    # --- what a node offers

    def can_return(self, name: str) -> bool:
        """Whether a lost node may be started again."""
        return self._backend.can_return(name)

    def describe(self) -> str:
        """How processes are held, in words. Raises RunError where that does not work."""
        return self._backend.describe_ownership()

    @property
    def held(self) -> str:
        """How processes are held now: cgroup, parent or marks."""
        return self._backend.ownership().partition(":")[0]

    def address(self, name: str) -> str:
        """Where the ranks of other nodes reach this one's."""
        return self._backend.address(name)

    def devices(self, slot: int, nproc: int, slots: int) -> str | None:
        """CUDA_VISIBLE_DEVICES of the ranks in a slot; None leaves it as it is."""
        return self._backend.devices(slot, nproc, slots)

    # --- asking agents

    async def ask(self, name: str, op: str, *, timeout: float = 30.0, **fields: Any) -> Message:
        """Asks one node's agent. Raises RunError, also when it is gone or late."""
        link = self.nodes[name].link
        if link is None:
            raise RunError("there is no link to the node", where=name)
        try:
            return await link.call(op, timeout=timeout, **fields)
        except TimeoutError:
            raise RunError(f"no answer to '{op}' within {timeout:.0f} s", where=name) from None

    async def ask_each(
        self, requests: Mapping[str, Mapping[str, Any]], op: str, *, timeout: float = 30.0
    ) -> dict[str, Message]:
        """Asks each node its own question; those that fail are left out (their loss shows elsewhere)."""
        turn = asyncio.Semaphore(_AT_ONCE)

        async def one(name: str, fields: Mapping[str, Any]) -> tuple[str, Message | None]:
            async with turn:
                try:
                    return name, await self.ask(name, op, timeout=timeout, **fields)
                except RunError as e:
                    _log.warning("%s", e)
                    return name, None

        answers = await asyncio.gather(*(one(n, f) for n, f in requests.items()))
        return {n: a for n, a in answers if a is not None}

    async def ask_all(
        self, names: Iterable[str], op: str, *, timeout: float = 30.0, **fields: Any
    ) -> dict[str, Message]:
        """Asks many the same; those that fail are left out."""
        return await self.ask_each(dict.fromkeys(names, fields), op, timeout=timeout)


@functools.cache
def _can_import() -> bool:
    """Whether a bare interpreter finds this package and what it needs: not where they came from sys.path alone."""
    code = "from importlib.util import find_spec\nimport sys\nsys.exit(any(find_spec(m) is None for m in ('unbroken', 'psutil')))"
    return subprocess.run([sys.executable, "-c", code], cwd="/", check=False).returncode == 0
