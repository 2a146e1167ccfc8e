"""Workers on the nodes of a cluster: whatever `unbroken run` can run on (`cluster.contract`) starts them.

A slot is a node here. On each runs one process (`node`) that starts the node's workers and fills their places; they join the coordinator
over its own connection, as everywhere. A node that is lost is replaced where the cluster has another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from ....cluster.contract import AgentCommand, Cluster, Exited, Lost, Request
from ....errors import UnbrokenError
from ....waiting import wait_within
from .. import Slot, WorkerEnded
from .node import name_slot

_FENCE_S = 10.0
_LEAVE_S = 30.0


class ClusterEngine:
    """One process per slot, and below it the workers of its node. The cluster is used in a thread of its own: its calls take as
    long as nodes do."""

    remote = True

    def __init__(self, cluster: Cluster, *, nodes: int, workers: int, width: int) -> None:
        """`workers` of `width` GPUs each (0: CPU) on every node. Raises what the cluster says against that."""
        self._cluster, self._workers, self._width = cluster, workers, width
        self._request = Request(nodes, ranks_per_node=max(1, workers * width))
        cluster.check(self._request)
        self.address = cluster.door_address
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cluster", daemon=True)
        self._thread.start()
        self._lock = threading.Lock()
        self._gone: list[WorkerEnded] = []
        self._nodes: dict[str, str] = {}
        """The node of each slot that has one."""
        self._launches: dict[str, str] = {}
        self._asked: set[str] = set()
        """Slots that were asked for and have not ended."""
        self._free: list[str] = []
        self._lost: list[str] = []
        self._early: dict[str, str] = {}
        self._given: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None

    def stand_by(self, slots: Sequence[Slot], cluster: Path, backend: str) -> None:
        """Nothing: a node is asked for when there is something to do."""

    def take_devices(self) -> None:
        """Nothing: nobody stands by."""

    def start(self, slot: Slot, cluster: Path) -> None:
        """Asks for a node's workers; they join when the cluster has started them."""
        self._asked.add(slot.name)
        self._submit(self._start(slot.name, cluster.read_bytes()))

    async def _start(self, slot: str, where: bytes) -> None:
        """What is secret goes to the node's process on its standard input, as an agent's does."""
        try:
            node = await self._take_node()
            self._nodes[slot] = node
            arguments = ("--name", slot, "--workers", str(self._workers), "--width", str(self._width))
            command = AgentCommand("unbroken.evaluate.engines.cluster.node", arguments, secret=where)
            launch = await self._cluster.start(node, command)
        except UnbrokenError as e:
            self._end(slot, str(e))
            return
        self._launches[launch] = slot
        if (why := self._early.pop(launch, None)) is not None:
            self._note_exit(launch, why)

    async def _take_node(self) -> str:
        """A node that no slot has: of those that were asked for at first, or in place of a lost one. Raises what the cluster says."""
        if self._given is None:
            self._following = asyncio.create_task(self._follow())
            self._given = asyncio.create_task(self._acquire())
        await asyncio.shield(self._given)
        if not self._free:
            lost = tuple(self._lost)
            request = Request(1, ranks_per_node=self._request.ranks_per_node, replaces=lost[:1])
            self._free += (await self._cluster.acquire(request)).nodes
            self._lost = [n for n in self._lost if n not in lost[:1]]
        return self._free.pop(0)

    async def _acquire(self) -> None:
        self._free += (await self._cluster.acquire(self._request)).nodes

    async def _follow(self) -> None:
        async for event in self._cluster.events():
            match event:
                case Exited(launch=launch, code=code, signal=number):
                    how = (
                        f"exit code {code}"
                        if code is not None
                        else f"signal {number}"
                        if number
                        else "it ended"
                    )
                    self._note_exit(launch, how)
                case Lost(node=node, why=why):
                    self._lost.append(node)
                    for slot in [s for s, n in self._nodes.items() if n == node]:
                        self._end(slot, f"the node {node} is lost: {why}", usable=False)

    def _note_exit(self, launch: str, why: str) -> None:
        slot = self._launches.pop(launch, None)
        if slot is None:
            self._early[launch] = why  # `start` has not returned yet
        else:
            self._end(slot, f"its process on {self._nodes.get(slot)} is gone ({why})")

    def _end(self, slot: str, why: str, *, usable: bool = True) -> None:
        """A slot's workers are no more; its node takes the next one, where it can be used."""
        node = self._nodes.pop(slot, None)
        if node is not None and usable:
            self._free.append(node)
        with self._lock:
            if slot in self._asked:
                self._asked.discard(slot)
                self._gone.append(WorkerEnded(slot, why))

    def ended(self) -> Sequence[WorkerEnded]:
        with self._lock:
            gone, self._gone = self._gone, []
        return gone

    def running(self) -> int:
        """Nodes that were asked for and have not ended."""
        return len(self._asked)

    def end(self, name: str) -> None:
        """A worker that hangs is ended with all of its node: only the cluster is sure to reach it. What the others held goes to others."""
        self._submit(self._fence(name_slot(name)))

    async def _fence(self, slot: str) -> None:
        node = self._nodes.get(slot)
        if node is not None and not (await self._cluster.fence(node, _FENCE_S)).proven:
            self._lost.append(node)
            self._end(slot, f"what runs on {node} cannot be ended", usable=False)

    def close(self, within_s: float = 10.0) -> None:
        """Waits for the nodes' processes, which end with their workers; then gives the nodes back."""
        deadline = time.monotonic() + within_s
        while self._asked and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._thread.is_alive():
            with contextlib.suppress(UnbrokenError, TimeoutError):
                self._submit(self._leave()).result(_LEAVE_S + _FENCE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_LEAVE_S)

    async def _leave(self) -> None:
        tasks = [t for t in (self._given, self._following) if t is not None]
        if self._given is not None and not self._given.done():
            self._given.cancel()  # nobody wants the nodes any more
        try:
            await wait_within(self._cluster.give_back({*self._free, *self._nodes.values()}), _LEAVE_S)
        finally:
            await self._cluster.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _submit(self, work: Coroutine[Any, Any, None]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)
