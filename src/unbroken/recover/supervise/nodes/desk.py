"""Where agents come in: both sides show that they know the run's token, then the agent says what it is, and has a lease."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from .... import atomic
from ....errors import RunError
from ....link.address import Address
from ....link.bounds import HELLO_BYTES, HELLO_S, Malformed, proof, same_secret, text
from ....progress import RunDir
from ...wire import Link, Message, read_token
from . import received
from .door import Listen
from .fleet import Fleet
from .logs import ShippedLogs
from .node import Node

_log = logging.getLogger("unbroken.supervisor")
MESSAGE_BYTES = 1 << 20
RANK_BYTES = 1 << 20
"""An agent's line may have MESSAGE_BYTES and RANK_BYTES for each of its ranks: the longest one holds all their stacks."""


class Inbox:
    """What agents report, kept until somebody reads it: a successor does not know at once to which attempt it belongs."""

    def __init__(self) -> None:
        self._kept: list[tuple[Node, Message]] = []
        self._reader: Callable[[Node, Message], None] | None = None

    def put(self, node: Node, message: Message) -> None:
        if self._reader is None:
            self._kept.append((node, message))
        else:
            self._reader(node, message)

    def open(self, reader: Callable[[Node, Message], None]) -> None:
        """Gives `reader` what was kept, and from now on each message as it comes."""
        if self._reader is None:
            self._reader = reader
            kept, self._kept = self._kept, []
            for node, message in kept:
                reader(node, message)


class Desk:
    """Serves each connection; those that have shown the token and said who they are become a node's link."""

    def __init__(
        self,
        fleet: Fleet,
        inbox: Inbox,
        token: str,
        listen: Listen,
        logs: ShippedLogs,
        *,
        nproc: int,
        world_size: int,
    ) -> None:
        """Listens from now on; call it in the event loop. `nproc` is the ranks of a node, from which follows how much its
        agent may send at once. Raises OSError."""
        self._fleet, self._inbox, self._token, self._logs = fleet, inbox, token, logs
        self.world_size = world_size
        """No rank of any attempt has this number or a higher one."""
        self._message_bytes = MESSAGE_BYTES + nproc * RANK_BYTES
        self._tasks: set[asyncio.Task[Any]] = set()
        self.term = 0
        """The supervisor's own, 0 until it has claimed one."""
        self.amend: Callable[[Message], Awaitable[Message]] | None = None
        """Answers who asks for other arguments, once there is a run to amend."""
        self.waits: Callable[[], str] = str
        """What the run waits for, in words, for who asks."""
        self._door = listen(self._serve)

    @property
    def address(self) -> Address:
        return self._door.address

    def _prove(self, nonce: str) -> str:
        """Shows an agent that it speaks with this run's supervisor, and not with who took a dead one's port."""
        return proof(self._token, "supervisor", nonce, self.address.name)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node: Node | None = None

        async def handle(message: Message) -> Message | None:
            nonlocal node
            op = message.get("op")
            if op == "prove" and link.strict:
                return {"proof": self._prove(text(message.get("nonce"), "nonce"))}
            if link.strict:
                if op != "token" or not same_secret(message.get("token"), self._token):
                    asyncio.get_running_loop().call_soon(link.close)  # after the answer
                    raise RunError("wrong token" if op == "token" else "show the token first")
                # Only now may it send a hello, which tells of all its ranks.
                link.limit, link.strict = self._message_bytes, False
                self._door.known(writer)
                return {
                    "run_id": self._fleet.run_id, "host": socket.gethostname(), "epoch": self.term,
                }  # fmt: skip
            if op == "clock":
                return self._fleet.read_clocks()
            if op == "waits" and node is None:
                return {"waits": self.waits()}
            if op == "amend" and node is None:
                if self.amend is None:
                    raise RunError(
                        "the supervisor is just starting", hint="Give the command again in a moment"
                    )
                strange.cancel()
                return await self.amend(message)
            try:
                if op == "hello":
                    node = self._fleet.welcome(received.hello(message), link)
                    strange.cancel()
                    return {"epoch": self.term}
                if op == "logs" and node is not None:
                    self._fleet.note_sign(node)
                    return await asyncio.to_thread(self._logs.take, node.name, message)
                received.check(message, self.world_size)
            except Malformed as e:
                _log.warning("a message of %s was passed over: %s", node.name if node else "an agent", e)
                raise RunError(f"the message makes no sense: {e}") from None
            if node is None:
                raise RunError("say hello first")
            self._read(node, link, message)
            return None

        def take_news(message: Message) -> bool:
            if node is None or link.strict or message.get("op") == "hello":
                return False
            received.check(message, self.world_size)
            self._read(node, link, message)
            return True

        link = Link(reader, writer, handle, limit=HELLO_BYTES, strict=True, take_news=take_news)
        strange = asyncio.get_running_loop().call_later(HELLO_S, link.close)
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            await link.serve()
        finally:
            strange.cancel()
        if node is not None:
            self._fleet.note_closed(node, link)

    def _read(self, node: Node, link: Link, message: Message) -> None:
        """Takes a message of a known agent, which was checked."""
        self._fleet.note_sign(node)
        if message.get("op") == "beat":
            seconds, clocks = self._fleet.grant(node), self._fleet.read_clocks()
            link.tell(op="lease", number=message["number"], seconds=seconds, **clocks)
        elif message.get("op") == "clocks":
            node.take_clocks(message)
        else:
            self._inbox.put(node, message)

    def close(self) -> None:
        """Listens no more, and ends all connections."""
        self._door.close()
        self._fleet.hang_up()
        for task in list(self._tasks):
            task.cancel()


def make_token(run_dir: RunDir) -> str:
    """The run's token, made where there is none. Raises UnsafeFile, OSError."""
    if not run_dir.token.exists():
        # Of two supervisors that start at once, one makes the file and both read it.
        atomic.create_exclusive(run_dir.token, f"{secrets.token_hex(16)}\n".encode(), mode=0o600)
    return read_token(run_dir)
