"""Copies of snapshots in the memory of another node: losing a node then loses no step beyond the last copied one.

Each keeper sends what is complete on all ranks to the next node of a ring, and holds what the one before it sends.
One connection a transfer, on one machine over a Unix socket, else over TLS: the run's secret, then a JSON header, the
bytes, and their checksums at the end, which the receiver takes by itself and compares. Only the newest is sent; what a
slow network misses is skipped.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ...errors import CheckpointError, UnbrokenError
from ...journal.checksummed import digest
from ...link.accepting import Acceptor, Connection
from ...link.address import Address, connect, listen_unix
from ...link.bounds import HELLO_BYTES, Malformed, same_secret, whole
from ...link.tls import Identity
from ..format.manifest import CHUNK_BYTES
from .buffers.holdings import FINALIZED, FREE, Buffer, Snapshot, SnapshotId
from .buffers.memory import NodeMemory
from .wire import MAX_MESSAGE_BYTES, Channel, Closed, Message

TIMEOUT_S = 60.0
_MOST = 1 << 53


class PeerError(CheckpointError):
    """A transfer between keepers did not work."""


class PeerHome(Protocol):
    """What the peers need of their keeper."""

    changed: threading.Condition
    memory: NodeMemory
    attempt: int

    def note_complete(self, snapshot_id: SnapshotId) -> None:
        """All ranks have this snapshot; `changed` is held."""

    def emit(self, event: Message) -> None: ...


@dataclass(frozen=True)
class PeerTarget:
    """The node that holds our copies."""

    node: str
    address: Address


@dataclass(frozen=True)
class Asking:
    """How a snapshot is asked of another node's keeper: with the secret of its ring, and with this certificate off its machine.

    `going_on` is looked at for each piece. With `only_free` no buffer is taken that holds a snapshot, however old.
    """

    token: str = field(repr=False)
    identity: Identity | None = field(default=None, repr=False)
    timeout_s: float = TIMEOUT_S
    going_on: Callable[[], bool] = lambda: True
    only_free: bool = False


class Peers:
    """Sends to one peer, receives from another."""

    def __init__(self, home: PeerHome, log: Callable[[str], None]) -> None:
        self.home, self.log = home, log
        self.token = ""
        self.target: PeerTarget | None = None
        self._identity: Identity | None = None
        self._here: Address | None = None
        self._wide: tuple[Address, Identity, Acceptor, socket.socket] | None = None
        self._due: SnapshotId | None = None
        self._sent: SnapshotId | None = None
        self._started = False

    def listen_here(self, beside: Path) -> Address:
        """Accepts transfers from this machine from now on, on a Unix socket beside the keeper's own. Raises OSError."""
        if self._here is None:
            path = beside.with_name(f"{beside.stem}.peers")
            Acceptor(listen_unix(path), self._serve, self.log).start()
            self._here = Address.unix(path)
        return self._here

    def listen(self, host: str, identity: Identity) -> Address:
        """Accepts transfers of those who have this certificate from now on, in place of another one's. Raises OSError."""
        if self._wide is not None and self._wide[1] != identity:
            self._wide[2].close()
            self._wide[3].close()
            self._wide = None
        if self._wide is None:
            listener = socket.create_server((host, 0), backlog=16)
            acceptor = Acceptor(listener, self._serve, self.log, identity=identity)
            acceptor.start()
            self._wide = Address("tls", host, listener.getsockname()[1]), identity, acceptor, listener
        self._identity = identity
        return self._wide[0]

    def addresses(self) -> tuple[str, str]:
        """Where transfers are accepted now: on this machine, and from others; "" where they are not."""
        return str(self._here or ""), str(self._wide[0] if self._wide else "")

    def leave(self) -> None:
        """Leaves no socket behind."""
        if self._here is not None:
            Path(self._here.host).unlink(missing_ok=True)

    def send_to(self, token: str, target: PeerTarget | None) -> None:
        """Whom to send to, with `home.changed` held."""
        self.token, self.target, self._sent = token, target, None
        if target is not None and not self._started:
            self._started = True
            threading.Thread(target=self._send_loop, daemon=True).start()

    def complete(self, snapshot_id: SnapshotId) -> None:
        """This snapshot is whole on all ranks; with `home.changed` held."""
        if self.target is not None and (self._due is None or snapshot_id > self._due):
            self._due = snapshot_id

    def pull(self, address: str, snapshot_id: SnapshotId, rank: int, asking: Asking | None = None) -> Buffer:
        """Fetches a rank's snapshot from another keeper into a buffer of this one, by default from the ring that this one is
        in. Raises PeerError; DoesNotFit where the machine has no memory for it."""
        asking = asking or Asking(self.token, self._identity)
        try:
            channel = self._connect(Address.parse(address), asking)
            try:
                channel.send({"token": asking.token})
                channel.send(
                    {
                        "op": "get",
                        "attempt": snapshot_id.attempt,
                        "step": snapshot_id.step,
                        "rank": rank,
                    }
                )
                answer, _ = channel.receive()
                if not answer.get("found"):
                    raise PeerError(
                        f"the peer has no copy of rank {rank} at step {snapshot_id.step}", where=address
                    )
                return self._take(channel, answer, snapshot_id, rank, asking)
            finally:
                channel.close()
        except (OSError, Closed, Malformed) as e:
            raise PeerError(f"the peer does not answer: {e}", where=address) from e

    # --- sending

    def _send_loop(self) -> None:
        while True:
            with self.home.changed:
                while self._due is None or self._due == self._sent or self.target is None:
                    self.home.changed.wait()
                snapshot_id, target = self._due, self.target
                held = [
                    b
                    for b in self.home.memory.holdings.buffers.values()
                    if not b.replica
                    and b.snapshot
                    and b.snapshot.snapshot_id == snapshot_id
                    and b.state == FINALIZED
                ]
                for b in held:
                    b.pins += 1
                self._sent = snapshot_id
            for b in held:
                why = ""
                try:
                    assert b.snapshot is not None
                    self._send(target, b.snapshot, self.home.memory.view(b, b.snapshot.file_bytes))
                except (PeerError, OSError, Closed) as e:
                    why = str(e)
                    self.log(f"step {snapshot_id.step} was not copied to {target.node}: {e}")
                with self.home.changed:
                    b.pins -= 1
                    self.home.emit(
                        {
                            "event": "peer_failed" if why else "peer", "attempt": snapshot_id.attempt,
                            "step": snapshot_id.step, "rank": b.rank, "node": target.node, **({"why": why} if why else {}),
                        }
                    )  # fmt: skip
                    self.home.changed.notify_all()

    def _send(self, target: PeerTarget, s: Snapshot, view: memoryview) -> None:
        channel = self._connect(target.address, Asking(self.token, self._identity))
        try:
            channel.send({"token": self.token})
            channel.send(
                {
                    "op": "put", "attempt": s.snapshot_id.attempt, "step": s.snapshot_id.step, "rank": s.rank,
                    "world_size": s.world_size, "file_bytes": s.file_bytes, "part": dict(s.part),
                }
            )  # fmt: skip
            answer, _ = channel.receive()
            if not answer.get("ok"):
                raise PeerError(str(answer.get("what")), where=target.node)
            self._stream(channel, view)
            answer, _ = channel.receive()
            if not answer.get("ok"):
                raise PeerError(str(answer.get("what")), where=target.node)
        finally:
            channel.close()

    def _stream(self, channel: Channel, view: memoryview) -> None:
        sums = []
        for at in range(0, len(view), CHUNK_BYTES):
            chunk = view[at : at + CHUNK_BYTES]
            channel.send_bytes(chunk)
            sums.append(digest(chunk))
        channel.send({"checksums": sums})

    # --- receiving

    def _serve(self, connection: Connection, known: Callable[[], None]) -> None:
        channel = Channel(connection, limit=HELLO_BYTES)
        try:
            connection.settimeout(TIMEOUT_S)
            if not same_secret(channel.receive()[0].get("token"), self.token):
                return
            known()
            channel.limit = MAX_MESSAGE_BYTES
            m, _ = channel.receive()
            snapshot_id = SnapshotId(
                whole(m.get("attempt"), "attempt", 0, _MOST), whole(m.get("step"), "step", -1, _MOST)
            )
            rank = whole(m.get("rank"), "rank", 0, 1 << 24)
            if m.get("op") == "put":
                self._take(channel, m, snapshot_id, rank)
                channel.send({"ok": True})
            elif m.get("op") == "get":
                self._give(channel, snapshot_id, rank)
        except UnbrokenError as e:
            with suppress(Closed):
                channel.send({"ok": False, "what": e.message})
        except (Closed, OSError, KeyError, TypeError, ValueError) as e:
            if not isinstance(e, OSError):
                self.log(f"a peer's transfer makes no sense: {e!r}"[:300])
        finally:
            channel.close()

    def _give(self, channel: Channel, snapshot_id: SnapshotId, rank: int) -> None:
        with self.home.changed:
            b = self.home.memory.holdings.find(snapshot_id, rank)
            s = b.snapshot if b else None
            if b is None or s is None:
                channel.send({"found": False})
                return
            b.pins += 1
        try:
            channel.send(
                {"found": True, "file_bytes": s.file_bytes, "part": dict(s.part), "world_size": s.world_size}
            )
            self._stream(channel, self.home.memory.view(b, s.file_bytes))
        finally:
            with self.home.changed:
                b.pins -= 1
                self.home.changed.notify_all()

    def _take(
        self, channel: Channel, m: Message, snapshot_id: SnapshotId, rank: int, asking: Asking | None = None
    ) -> Buffer:
        """Receives what was asked for, or else another node's copy, into a buffer, which is finalized only if every byte is right.

        It is pinned meanwhile: an attempt that begins frees what is claimed, and nobody else may fill it until this has ended.
        """
        replica = asking is None
        size = whole(m.get("file_bytes"), "file_bytes", 1, _MOST)
        world_size = whole(m.get("world_size"), "world_size", rank + 1, 1 << 24)
        part = m.get("part")
        if not isinstance(part, dict):
            raise Malformed("'part' is no table")
        with self.home.changed:
            if replica and snapshot_id.attempt < self.home.attempt:
                raise PeerError(f"attempt {snapshot_id.attempt} is over")
            b = self.home.memory.room_for(
                rank, size, replica, only_free=asking is not None and asking.only_free
            )
            if b is None:
                raise PeerError("there is no room for another node's snapshot in the budget")
            b.pins += 1
        kept = False
        try:
            if replica:
                channel.send({"ok": True})
            view, sums = self.home.memory.view(b, size), []
            for at in range(0, size, CHUNK_BYTES):
                if asking is not None and not asking.going_on():
                    raise PeerError("nobody needs it any more")
                chunk = view[at : at + CHUNK_BYTES]
                channel.receive_bytes(chunk)
                sums.append(digest(chunk))
            told, _ = channel.receive()
            if told.get("checksums") != sums:
                raise PeerError("the bytes that came are not those that were sent")
            snapshot = Snapshot(snapshot_id, rank, world_size, size, part, tuple(sums))
            with self.home.changed:
                b.state, b.snapshot = FINALIZED, snapshot
                if replica:  # only what is whole on all ranks is sent
                    self.home.note_complete(snapshot_id)
                self.home.changed.notify_all()
            kept = True
            return b
        finally:
            with self.home.changed:
                b.pins -= 1
                if not kept:
                    b.state, b.snapshot = FREE, None
                self.home.changed.notify_all()

    def _connect(self, address: Address, asking: Asking) -> Channel:
        connection = connect(address, asking.identity, within_s=asking.timeout_s)
        connection.settimeout(asking.timeout_s)
        return Channel(connection)


def machine_of(socket_path: Path) -> str:
    """Says, compared with another keeper's, whether both see the same sockets: the same kernel, and the same file system of
    the same mount where theirs lie."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat(socket_path.parent).st_dev}"
