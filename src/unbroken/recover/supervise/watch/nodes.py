"""The nodes of a run as the supervisor sees them: links to agents, leases, who is alive, lost or parked."""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .... import atomic
from ....cluster import Backend, Ended, NodeState
from ....errors import RunError
from ....link.bounds import HELLO_BYTES, HELLO_S, Malformed, proof, same_secret, text
from ....link.listener import Listener
from ....machine import python_path
from ....progress import RunDir
from ...wire import Link, Message, read_token
from . import received

_log = logging.getLogger("unbroken.supervisor")
_LEASE_MARGIN_S = 2.0
MESSAGE_BYTES = 1 << 20
RANK_BYTES = 1 << 20
"""An agent's line may have MESSAGE_BYTES and RANK_BYTES for each of its ranks: the longest one holds all their stacks."""


@dataclass
class Node:
    """One node. `state` is down, starting, up, or lost; `granted` the monotonic time of the last lease."""

    name: str
    state: str = "down"
    link: Link | None = None
    hello: Message = field(default_factory=dict)
    granted: float = 0.0
    heard: float = 0.0
    parked: str = ""
    left: Ended = field(default_factory=Ended)
    """What ending ranks came to that were held in another way than now, when its agent was launched."""

    @property
    def up(self) -> bool:
        return self.state == "up" and self.link is not None and not self.link.closed.is_set()


class NodeTable:
    """Starts agents, accepts their connections, grants leases, and says which nodes are lost."""

    def __init__(
        self,
        run_dir: RunDir,
        run_id: str,
        backend: Backend,
        lease_s: float,
        orphan_grace_s: float,
        keeper_bytes: int,
        on_message: Callable[[Node, Message], None],
        changed: asyncio.Event,
        *,
        nproc: int = 1,
        world_size: int = 1 << 24,
    ) -> None:
        """`nproc`: ranks of a node, from which follows how much its agent may send at once."""
        self._run_dir, self._run_id, self._backend = run_dir, run_id, backend
        self.lease_s, self._orphan_grace_s = lease_s, orphan_grace_s
        self._on_message, self._changed = on_message, changed
        self.keeper_bytes = keeper_bytes
        self.nodes: dict[str, Node] = {}
        self._world_size = world_size
        self._message_bytes = MESSAGE_BYTES + nproc * RANK_BYTES
        self._listener: Listener | None = None
        self._token = ""
        self._tasks: set[asyncio.Task[Any]] = set()
        self.epoch = 0
        self.room_s = 600.0
        self.elsewhere = ""
        """How long a keeper that ends waits for a storage that refuses what it holds."""

    async def listen(self) -> tuple[str, int]:
        """Opens the port for agents; returns its address."""
        if not self._run_dir.token.exists():
            # Of two supervisors that start at once, one makes the file and both read it.
            atomic.create_exclusive(self._run_dir.token, f"{secrets.token_hex(16)}\n".encode(), mode=0o600)
        self._token = read_token(self._run_dir)
        self._listener = Listener(self._accept, "127.0.0.1")
        return self._listener.address

    def _proof(self, nonce: str) -> str:
        """Shows an agent that it speaks with this run's supervisor, and not with who took a dead one's port."""
        assert self._listener is not None
        return proof(self._token, "supervisor", nonce, str(self._listener.address[1]))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node: Node | None = None

        async def handle(message: Message) -> Message | None:
            nonlocal node
            op = message.get("op")
            if op == "prove" and link.strict:
                return {"proof": self._proof(text(message.get("nonce"), "nonce"))}
            if link.strict:
                if op != "token" or not same_secret(message.get("token"), self._token):
                    asyncio.get_running_loop().call_soon(link.close)  # after the answer
                    raise RunError("wrong token" if op == "token" else "show the token first")
                # Only now may it send a hello, which tells of all its ranks.
                link.limit, link.strict = self._message_bytes, False
                known(writer)
                return {"run_id": self._run_id, "host": socket.gethostname(), "epoch": self.epoch}
            try:
                if op == "hello":
                    node = self._welcome(received.hello(message, self._world_size), link)
                    strange.cancel()
                    return {"epoch": self.epoch}
                received.check(message, self._world_size)
            except Malformed as e:
                _log.warning("a message of %s was passed over: %s", node.name if node else "an agent", e)
                raise RunError(f"the message makes no sense: {e}") from None
            if node is None:
                raise RunError("say hello first")
            node.heard = time.monotonic()
            if op == "beat":
                node.granted = time.monotonic()
                link.tell(op="lease", number=message["number"], seconds=self.lease_s)
                return None
            self._on_message(node, message)
            return None

        if self._listener is None:
            return
        known = self._listener.known
        link = Link(reader, writer, handle, limit=HELLO_BYTES, strict=True)
        strange = asyncio.get_running_loop().call_later(HELLO_S, link.close)
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            await link.serve()
        finally:
            strange.cancel()
        if node is not None and node.link is link:
            _log.info("the link to %s is closed", node.name)
            self._changed.set()

    def _welcome(self, message: Message, link: Link) -> Node:
        node = self.nodes.get(message["node"])
        if node is None or message.get("run_id") != self._run_id:
            raise RunError("this agent belongs to another run", where=str(message.get("node")))
        if node.state == "lost":
            raise RunError("this node was given up", where=node.name)
        if node.link is not None and node.link is not link:
            node.link.close()
        node.link, node.hello, node.state = link, message, "up"
        node.heard = node.granted = time.monotonic()
        self._changed.set()
        return node

    async def bring_up(self, names: list[str], within: float = 30.0) -> list[str]:
        """Starts agents where none is alive, waits for all; returns those that did not come."""
        for name in names:
            node = self.nodes.setdefault(name, Node(name))
            if node.up:
                continue
            node.state = "starting"
            if await asyncio.to_thread(self._backend.state, name) is not NodeState.ALIVE:
                self._launch(name)
        deadline = time.monotonic() + within
        relaunched: set[str] = set()
        while time.monotonic() < deadline:
            missing = [n for n in names if not self.nodes[n].up]
            if not missing:
                return []
            await asyncio.sleep(0.02)
            # An agent that was alive a moment ago may have been on its way out.
            if time.monotonic() > deadline - within + 1.0:
                for name in missing:
                    state = await asyncio.to_thread(self._backend.state, name)
                    if state is not NodeState.ALIVE and name not in relaunched:
                        relaunched.add(name)
                        self._launch(name)
        return [n for n in names if not self.nodes[n].up]

    def _launch(self, name: str) -> None:
        argv = [
            sys.executable, "-m", "unbroken.recover.node.agent",
            "--run-dir", str(self._run_dir.path), "--run-id", self._run_id, "--node", name,
            "--scratch", str(self._backend.scratch(name)), "--orphan-grace", str(self._orphan_grace_s),
            "--keeper-memory", str(self.keeper_bytes), "--ownership", self._backend.ownership(),
            "--wait-for-room", str(self.room_s), "--room-elsewhere", self.elsewhere,
        ]  # fmt: skip
        env = {"UNBROKEN_RUN_ID": self._run_id, "UNBROKEN_NODE": name, "UNBROKEN_ROLE": "agent"}
        if not _importable():
            env["PYTHONPATH"] = (
                python_path()
            )  # the ranks inherit it: without it they could not import us either
        handle = self._backend.launch(name, argv, env, self._run_dir.agent_log(name))
        self.nodes[name].left = handle.left

    def check(self, name: str) -> NodeState:
        """ALIVE while the node's agent answers or may come back within its lease; else what the backend sees.

        Call it when a link is closed or silent; it may scan processes, so call it from a thread.
        """
        node = self.nodes[name]
        silent = time.monotonic() - node.heard
        if node.up and silent < self.lease_s + _LEASE_MARGIN_S:
            return NodeState.ALIVE
        state = self._backend.state(name)
        if state is NodeState.ALIVE and silent >= self.lease_s + _LEASE_MARGIN_S:
            return NodeState.UNREACHABLE
        return state

    def lease_ends(self, name: str) -> float:
        """The monotonic time from which the node's processes have stopped by themselves."""
        return self.nodes[name].granted + self.lease_s + _LEASE_MARGIN_S

    async def ask(self, name: str, op: str, *, timeout: float = 30.0, **fields: Any) -> Message:
        """Asks one node's agent. Raises RunError, also when it is gone or late."""
        link = self.nodes[name].link
        if link is None:
            raise RunError("there is no link to the node", where=name)
        try:
            return await link.call(op, timeout=timeout, **fields)
        except TimeoutError:
            raise RunError(f"no answer to '{op}' within {timeout:.0f} s", where=name) from None

    async def ask_all(
        self, names: list[str], op: str, *, timeout: float = 30.0, **fields: Any
    ) -> dict[str, Message]:
        """Asks many at once; those that fail are left out (their loss shows elsewhere)."""

        async def one(name: str) -> tuple[str, Message | None]:
            try:
                return name, await self.ask(name, op, timeout=timeout, **fields)
            except RunError as e:
                _log.warning("%s", e)
                return name, None

        answers = await asyncio.gather(*(one(n) for n in names))
        return {n: a for n, a in answers if a is not None}

    def up(self) -> list[str]:
        return [n for n, node in self.nodes.items() if node.up]

    def give_up(self, name: str) -> None:
        """Marks a node as lost: its agent is refused from now on."""
        node = self.nodes[name]
        node.state = "lost"
        if node.link is not None:
            node.link.close()

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for node in self.nodes.values():
            if node.link is not None:
                node.link.close()
        for task in list(self._tasks):
            task.cancel()


@functools.cache
def _importable() -> bool:
    """Whether a bare interpreter finds this package and what it needs: not where they came from sys.path alone."""
    code = "from importlib.util import find_spec\nimport sys\nsys.exit(any(find_spec(m) is None for m in ('unbroken', 'psutil')))"
    return subprocess.run([sys.executable, "-c", code], cwd="/", check=False).returncode == 0
