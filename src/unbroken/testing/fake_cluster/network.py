"""Links between a supervisor and virtual nodes, in memory: with latency, cuts in either direction, and a count of bytes.

The supervisor's side is a StreamReader and what stands for a StreamWriter, so that its own framing runs unchanged. The
nodes' side is a callback for what arrives: thousands of them cost no tasks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ...link.address import Address
from ...link.bounds import READ_AHEAD

Serve = Callable[[asyncio.StreamReader, Any], Awaitable[None]]
CONNECT_S = 3.0
"""So long a connection attempt over a cut link waits before it gives up."""


@dataclass
class NetworkTraffic:
    """What went over the links in one direction: messages, and their size in bytes."""

    messages: int = 0
    size: int = 0

    def count(self, data: bytes) -> None:
        self.messages += data.count(b"\n")
        self.size += len(data)

    def copy(self) -> NetworkTraffic:
        return NetworkTraffic(self.messages, self.size)

    def since(self, before: NetworkTraffic) -> NetworkTraffic:
        """What has been added since that copy was made."""
        return NetworkTraffic(self.messages - before.messages, self.size - before.size)


class _Way:
    """One direction of a link: in order, each piece after the latency; while it is cut, kept."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, latency_s: float, deliver: Callable[[bytes], None]
    ) -> None:
        self._loop, self._latency_s, self._deliver = loop, latency_s, deliver
        self._under_way: deque[bytes] = deque()
        self._kept: deque[bytes] = deque()
        self.cut = False

    def send(self, data: bytes) -> None:
        self._under_way.append(data)
        # Each timer takes the oldest piece, whichever of several that are due at once comes first.
        self._loop.call_later(self._latency_s, self._arrive)

    def _arrive(self) -> None:
        data = self._under_way.popleft()
        if self.cut:
            self._kept.append(data)
        else:
            self._deliver(data)

    def heal(self) -> None:
        """Delivers what was kept, as TCP does when it sends again."""
        self.cut = False
        while self._kept:
            self._deliver(self._kept.popleft())


class FakeConnection:
    """One connection of a node to the supervisor. `receive` gets each line that arrives, `lost` hears of its end."""

    def __init__(
        self, network: Network, node: str, receive: Callable[[bytes], None], lost: Callable[[], None]
    ) -> None:
        self._network, self.node = network, node
        self._receive, self._lost = receive, lost
        self._rest = b""
        self.closed = False
        self.reader = asyncio.StreamReader(limit=READ_AHEAD, loop=network.loop)
        self.writer = _Writer(self)
        self.to_supervisor = _Way(network.loop, network.latency_s, self._feed)
        self.to_node = _Way(network.loop, network.latency_s, self._take)
        self.to_supervisor.cut, self.to_node.cut = network.cuts(node)

    def send(self, data: bytes) -> None:
        """From the node; nothing once it is closed."""
        if not self.closed:
            self._network.to_supervisor.count(data)
            self.to_supervisor.send(data)

    def _feed(self, data: bytes) -> None:
        if not self.closed and not self.writer.is_closing():
            if data:
                self.reader.feed_data(data)
            else:
                self.reader.feed_eof()

    def _take(self, data: bytes) -> None:
        if not data:
            self._end()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not self.closed:
                self._receive(line)

    def close(self) -> None:
        """The node's side closes: the supervisor reads the end, unless the link is cut."""
        if not self.closed:
            self.to_supervisor.send(b"")
            self._network.loop.call_later(self._network.latency_s * 2, self._end)

    def vanish(self) -> None:
        """The node is gone without a word: the supervisor's side stays open and silent."""
        self.closed = True
        self._network.forget(self)

    def _end(self) -> None:
        if self.closed:
            return
        if not self.to_supervisor.cut:
            self.reader.feed_eof()
        self.closed = True
        self._network.forget(self)
        self._lost()


class _Writer:
    """What the supervisor writes to: as much of a StreamWriter as a link uses."""

    def __init__(self, connection: FakeConnection) -> None:
        self._connection = connection
        self._closing = False
        self.transport = self

    def write(self, data: bytes) -> None:
        if not self._closing and not self._connection.closed:
            self._connection._network.to_nodes.count(data)
            self._connection.to_node.send(bytes(data))

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._connection.to_node.send(b"")
            self._connection.reader.feed_eof()

    abort = close

    def is_closing(self) -> bool:
        return self._closing

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self._connection.to_node._kept))

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    async def drain(self) -> None:
        """Takes whatever comes."""

    async def wait_closed(self) -> None:
        """Is closed at once."""


class FakeDoor:
    """Where a supervisor listens; made with the arguments of `listener.Listener`, and used like it."""

    def __init__(self, network: Network, serve: Serve, port: int) -> None:
        self._network, self._serve = network, serve
        self.address = Address("tls", "supervisor", port)
        self.strangers = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def known(self, writer: Any) -> None:
        """Nobody is a stranger here."""

    def let_in(self, connection: FakeConnection) -> None:
        async def serve() -> None:
            try:
                await self._serve(connection.reader, connection.writer)
            finally:
                connection.writer.close()

        task = self._network.loop.create_task(serve())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        self._network.shut(self)


class Network:
    """All links of a fake cluster. `to_supervisor` and `to_nodes` count what went over them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, latency_s: float = 0.0005) -> None:
        self.loop, self.latency_s = loop, latency_s
        self.to_supervisor, self.to_nodes = NetworkTraffic(), NetworkTraffic()
        self._doors: list[FakeDoor] = []
        self._ports = 0
        self._open: dict[str, set[FakeConnection]] = {}
        self._cuts: dict[str, tuple[bool, bool]] = {}
        self._waiting: list[asyncio.Future[None]] = []

    def listen(self, serve: Serve, host: str = "", port: int = 0) -> FakeDoor:
        """A supervisor's door; nodes come to the newest one. Takes the arguments of `listener.Listener`."""
        self._ports += 1
        door = FakeDoor(self, serve, self._ports)
        self._doors.append(door)
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
        return door

    def shut(self, door: FakeDoor) -> None:
        if door in self._doors:
            self._doors.remove(door)

    async def opened(self) -> None:
        """Returns when the next supervisor listens."""
        future = self.loop.create_future()
        self._waiting.append(future)
        await future

    @property
    def newest(self) -> FakeDoor | None:
        """Where nodes connect to now."""
        return self._doors[-1] if self._doors else None

    async def connect(
        self, node: str, receive: Callable[[bytes], None], lost: Callable[[], None]
    ) -> FakeConnection:
        """A node's connection to the newest supervisor. Raises ConnectionRefusedError, TimeoutError over a cut link."""
        if any(self.cuts(node)):
            await asyncio.sleep(CONNECT_S)
            raise TimeoutError(f"no answer to {node}")
        await asyncio.sleep(2 * self.latency_s)
        door = self.newest
        if door is None:
            raise ConnectionRefusedError("no supervisor listens")
        connection = FakeConnection(self, node, receive, lost)
        self._open.setdefault(node, set()).add(connection)
        door.let_in(connection)
        return connection

    # --- faults

    def cuts(self, node: str) -> tuple[bool, bool]:
        """(to the supervisor, to the node): whether nothing passes."""
        return self._cuts.get(node, (False, False))

    def cut(self, node: str, *, to_supervisor: bool = True, to_node: bool = True) -> None:
        """Lets nothing pass any more, in one direction or both. Nobody is told: connections stay open, and silent."""
        self._cuts[node] = (to_supervisor, to_node)
        for c in self._open.get(node, ()):
            c.to_supervisor.cut, c.to_node.cut = to_supervisor, to_node

    def heal(self, node: str) -> None:
        """Lets everything pass; what was sent meanwhile arrives."""
        self._cuts.pop(node, None)
        for c in list(self._open.get(node, ())):
            c.to_supervisor.heal()
            c.to_node.heal()

    def drop_all(self) -> None:
        """The supervisor's host is gone, or its process killed: every connection breaks, and no door is open."""
        self._doors.clear()
        for connections in list(self._open.values()):
            for c in list(connections):
                c.writer.close()

    def forget(self, connection: FakeConnection) -> None:
        self._open.get(connection.node, set()).discard(connection)
