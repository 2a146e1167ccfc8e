"""What a keeper does: connections, requests, attempts, places; its buffers are in memory.py.

Each connection has a thread, and one condition (`changed`) guards all state. Long requests (settle, flush, close)
are answered from threads of their own, so that leases are renewed meanwhile. Long because all that the one condition
guards is read in one place.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import UnbrokenError
from ...link.accepting import Acceptor, Connection
from ...link.bounds import HELLO_BYTES
from ...link.runs import unpack
from ...progress.records.candidate import folder_name
from ...units import plural
from ..catalogue import retention
from ..catalogue.retention import Retention
from ..storage import open_storage
from ..storage.base import Storage
from .ahead import FetchAhead
from .buffers.holdings import CLAIMED, FREE, Buffer, Holdings, SnapshotId
from .buffers.memory import NodeMemory
from .clients import Client, KeeperSettings, OperationRefused, Wait, check, log, refusal, reply, tell
from .durability.checksums import take_checksums
from .durability.uploading import Uploading
from .durability.writing import Writing
from .peers import Peers
from .wire import MAX_MESSAGE_BYTES, Channel, Closed, Message

Answer = tuple[Message, list[int]]
"""What is answered, and the descriptors that go with it."""
Operation = Callable[["Keeper", Client, Message, list[int]], Answer | None]


class Keeper:
    """The state that the operations of operations.py work on, each called with `changed` held."""

    def __init__(
        self, settings: KeeperSettings, operations: Mapping[str, Operation], flush: Callable[..., Message]
    ) -> None:
        """`operations` are those of operations.py, `flush` that of flushing.py, which know the keeper and not it them."""
        self.settings = settings
        self._operations, self._flush = operations, flush
        self.id = secrets.token_hex(8)
        self.changed = threading.Condition(threading.RLock())
        self.memory = NodeMemory(settings, self.changed, self._filled)
        self.holdings = self.memory.holdings
        self.clients: list[Client] = []
        self.waits: list[Wait] = []
        self.attempt = 0
        self.world_size = 0
        self.local: dict[int, int] = {}
        self.candidates: list[Any] = []
        self.agent_known = settings.lease_s is not None
        self.restored = False
        self.told_restored: tuple[int, tuple[int, int] | None] | None = None
        """(attempt, what its ranks went on from) as it was told last."""
        self.deserted = 0
        """The last attempt of which a rank here went without a goodbye: it may be started again."""
        self.alone_since = time.monotonic()
        self.stop = threading.Event()
        self.hurried = False
        """Whoever asked for a flush waits no longer for a storage that refuses."""
        self.exit_code = 0
        self.place = settings.checkpoints
        """Where checkpoints are written now; under a supervisor it may follow what the ranks say (placement.py)."""
        self.place_asked = self.place_used = ""
        """What a rank asked for that the supervisor has not answered yet; what ranks of this attempt were told to use."""
        self.place_refused: Message | None = None
        self.writing = Writing(
            open_storage, self.holdings, self.changed, self.emit, self.memory.view,
            node=settings.node, writers=settings.writers, after_commit=self._after_commit, freed=self.serve_waits,
        )  # fmt: skip
        self.writing.place = self.place
        if settings.lease_s is not None:
            self.writing.lease_until = time.monotonic() + settings.lease_s
        self.peers = Peers(self, log)
        self.ahead = FetchAhead(self)
        self.uploading: Uploading | None = None
        self.keep = Retention(settings.keep, settings.keep_every)
        self.peer_wanted = False
        self.memory.start()
        threading.Thread(target=take_checksums, args=(self,), daemon=True).start()

    # --- connections

    def serve(self, listener: socket.socket) -> None:
        """Accepts connections until `stop` is set; ends by itself when nobody has been here for the grace time."""
        acceptor = Acceptor(listener, self._converse, log, tick=self._tick, stop=self.stop)
        acceptor.run()

    def _tick(self) -> None:
        with self.changed:
            lonely = not self.clients and time.monotonic() - self.alone_since > self.settings.orphan_grace_s
        if lonely:
            log("nobody has been here for a while: flush what is allowed, free all, end")
            self.finish(flush=True, deadline_s=self.settings.term_grace_s, room_s=self.settings.room_s)

    def _converse(self, sock: Connection, known: Callable[[], None]) -> None:
        # A process that is stopped reads nothing; it must not stop the keeper with it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 2, 0))
        client = Client(Channel(sock, limit=HELLO_BYTES, descriptors=True), known)
        with self.changed:
            self.clients.append(client)
        try:
            while True:
                message, fds = client.channel.receive()
                try:
                    self._handle(client, message, fds)
                finally:
                    for fd in fds:
                        with contextlib.suppress(OSError):
                            os.close(fd)
        except Closed:
            pass
        finally:
            self._gone(client)

    def _handle(self, client: Client, message: Message, fds: list[int]) -> None:
        op, number = str(message.get("op", "")), message.get("id", 0)
        method = self._operations.get(op)
        try:
            check(message)
            if method is None and op not in _SLOW:
                raise OperationRefused(
                    f"the keeper knows no request '{op}'", hint="Use the same version of unbroken"
                )
            if not client.role and op != "hello":
                raise OperationRefused("the first message must be hello")
            if op in _OF_AGENT and client.role != "agent" and self.agent_known:
                raise OperationRefused(f"only an agent may ask for '{op}'")
            if client.role == "visitor" and op not in _OF_VISITOR:
                raise OperationRefused(f"a visitor may not ask for '{op}'")
            if client.role and op == "hello":
                raise OperationRefused("hello was said before")
            if method is None:
                if client.slow >= _SLOW_AT_ONCE:
                    raise OperationRefused(
                        f"{_SLOW_AT_ONCE} long requests of this connection are being answered"
                    )
                client.slow += 1
                threading.Thread(target=self._slowly, args=(client, message), daemon=True).start()
                return
            with self.changed:
                answer = method(self, client, message, fds)
                self.serve_waits()
                self.changed.notify_all()
        except UnbrokenError as e:
            reply(client, number, refusal(e))
            return
        except Exception as e:  # noqa: BLE001  whatever a request holds, the thread and the others' snapshots stay
            reply(client, number, refusal(OperationRefused(f"malformed request '{op:.40}': {e!r}"[:300])))
            return
        if op == "hello":
            client.channel.limit = MAX_MESSAGE_BYTES
            client.known()
        if answer is not None:
            reply(client, number, {"ok": True, **answer[0]}, answer[1])

    def _slowly(self, client: Client, message: Message) -> None:
        op = str(message["op"])
        try:
            deadline = float(message.get("deadline_s", 30.0))
            if op == "settle":
                gone = unpack(message.get("gone", []), "gone", _MOST_RANKS)
                stuck = self.writing.settle(int(message["attempt"]), deadline, gone)
                if stuck:
                    raise OperationRefused(
                        f"writing of {plural(len(stuck), 'checkpoint')} cannot be stopped: the disk does not answer",
                        where=self.settings.node,
                        hint="Treat this node as unreachable until its keeper is gone",
                    )
                with self.changed:
                    durable = sorted(
                        m.step for m in self.holdings.durable if m.attempt == int(message["attempt"])
                    )
                answer: Message = {"durable": durable}
            elif op == "flush":
                answer = self.flush(deadline, **_how(message))
            elif op == "insist":
                answer = self.insist(client, message)
            elif op == "pull":
                answer = self.pull(client, message)
            else:
                answer = self.finish(bool(message.get("flush", True)), deadline, **_how(message))
        except UnbrokenError as e:
            reply(client, message.get("id", 0), refusal(e))
            return
        except (LookupError, TypeError, ValueError, AttributeError) as e:
            reply(
                client,
                message.get("id", 0),
                refusal(OperationRefused(f"malformed request '{op}': {e!r}"[:300])),
            )
            return
        finally:
            with self.changed:
                client.slow -= 1
        reply(client, message.get("id", 0), {"ok": True, **answer})
        if op == "close":
            self.stop.set()

    def _gone(self, client: Client) -> None:
        client.channel.close()
        with self.changed:
            self.clients = [c for c in self.clients if c is not client]
            self.waits = [w for w in self.waits if w.client is not client]
            for number in client.held:
                if b := self.holdings.buffers.get(number):
                    b.pins -= 1
            if client.role == "rank" and client.attempt == self.attempt:
                if not client.left:
                    self.deserted = self.attempt
                for b in self.holdings.of_rank(client.rank):
                    if b.state == CLAIMED and b.owner is client:
                        b.state = FREE
            self.serve_waits()
            if not self.clients:
                self.alone_since = time.monotonic()
            last = client.role == "rank" and not any(c.role == "rank" for c in self.clients)
            self.changed.notify_all()
        if not last or self.agent_known:
            return
        # Plain torchrun: nobody else makes the last snapshot durable now.
        if client.left and self.deserted != self.attempt:
            threading.Thread(target=self._end_when_done, daemon=True).start()
        else:
            threading.Thread(target=self._flush_quietly, daemon=True).start()

    def _end_when_done(self) -> None:
        with self.changed:
            while (self.writing.busy_with(self.attempt) or self._uploads()) and not self.clients:
                self.changed.wait(0.2)
            if self.clients:
                return
        self.finish(flush=False, deadline_s=0.0)

    def _flush_quietly(self) -> None:
        try:
            self.flush(self.settings.term_grace_s)
        except UnbrokenError as e:
            log(str(e))

    def emit(self, event: Message) -> None:
        """Sends an event to the agent and to the ranks of the attempt that it is about; `changed` is held."""
        for client in list(self.clients):
            if client.role == "agent" or (client.role == "rank" and client.attempt == event.get("attempt")):
                tell(client, event)

    # --- long requests, in threads of their own

    def flush(self, deadline_s: float, **how: Any) -> Message:
        """As `flushing.flush`. Raises Refused."""
        return self._flush(self, deadline_s, **how)

    def finish(self, flush: bool, deadline_s: float, **how: Any) -> Message:
        """Ends the keeper, after a flush if wanted (`how`: as for it); says what the flush gave."""
        answer: Message = {"step": None}
        if flush:
            try:
                until = time.monotonic() + deadline_s
                answer = self.flush(deadline_s, **how)
                with self.changed:
                    while self._uploads() and time.monotonic() < until:
                        self.changed.wait(0.2)
            except UnbrokenError as e:
                log(str(e))
                answer = {"step": None, "why": str(e)}
                self.exit_code = 1
        self.writing.end()
        self.stop.set()
        return answer

    def insist(self, client: Client, m: Message) -> Message:
        """A rank that ends and whose save the storage refused: tries on for the time that is set for it."""
        snapshot_id = SnapshotId(client.attempt, int(m["step"]))
        room_s = self.settings.room_s
        return self.flush(max(room_s, 30.0), snapshot_id=snapshot_id, room_s=room_s)

    def pull(self, client: Client, m: Message) -> Message:
        """Fetches this rank's snapshot from a peer into memory here, unless it is on its way, and comes."""
        snapshot_id = SnapshotId(int(m["attempt"]), int(m["step"]))
        with self.changed:
            self.ahead.wait_for(snapshot_id, client.rank)
            if (here := self.holdings.find(snapshot_id, client.rank)) is not None:
                return self._hold(client, here)
        b = self.peers.pull(str(m["address"]), snapshot_id, client.rank)
        with self.changed:
            return self._hold(client, b)

    def _hold(self, client: Client, b: Buffer) -> Message:
        """Pins a buffer that this client reads, until it lets go or is gone."""
        if b.id not in client.held:
            client.held.add(b.id)
            b.pins += 1
        return {"buffer": b.id}

    # --- helpers, with `changed` held

    def take_options(self, options: Message) -> None:
        """What a Checkpointer asks of its keeper, beyond the command line."""
        if "keep" in options:
            self.keep = Retention(
                int(options["keep"]), int(options.get("keep_every", 0)), self.keep.spare_below
            )
        self.peer_wanted = bool(options.get("peer", self.peer_wanted))
        if (url := options.get("remote")) and (self.uploading is None or self.uploading.url != url):
            self.uploading = Uploading(
                str(url), self.writing.storage, self.changed, self.emit, self.writing.gate, log
            )

    def take_place(self, m: Message) -> None:
        """What the supervisor says of the place: where to write, or why the ranks may not go on."""
        self.place_refused = m.get("refused")
        if (url := str(m.get("url") or self.place)) != self.place:
            log(f"checkpoints of attempt {self.attempt} go to {url}")
            self.place = self.writing.place = url
        # What is whole in memory of an earlier attempt goes where that one's checkpoints lie.
        self.writing.places[self.attempt] = url
        self.keep = Retention(self.keep.keep_last, self.keep.keep_every, int(m.get("spare_below", 0)))
        self.place_asked = ""

    def note_candidates(self, candidates: list[Any]) -> None:
        """Takes what may be restored from, and where each of it lies."""
        self.candidates = candidates
        for c in candidates:
            if c.get("place") and not c.get("brought"):
                self.writing.places.setdefault(int(c["attempt"]), str(c["place"]))

    def begin(
        self,
        attempt: int,
        world_size: int,
        ranks: dict[int, int],
        candidates: list[Any] | None,
        ring: Any = None,
    ) -> None:
        """Starts an attempt here; `ring` says which nodes' keepers have what its ranks will most likely restore."""
        log(f"attempt {attempt} begins: {world_size} ranks, here {sorted(ranks)}")
        self.attempt, self.world_size, self.local, self.restored = attempt, world_size, ranks, False
        self.note_candidates(candidates or [])
        self.place_asked = self.place_used = ""
        self.place_refused = None
        self.writing.closed = (
            max(self.writing.closed, attempt - 1) if self.agent_known else self.writing.closed
        )
        for client in self.clients:
            if client.role == "rank" and client.attempt < attempt:
                with contextlib.suppress(OSError):
                    client.channel.sock.shutdown(socket.SHUT_RDWR)
        everything = {b.snapshot.snapshot_id for b in self.holdings.buffers.values() if b.snapshot}
        wanted = (
            everything
            if candidates is None
            else {SnapshotId(int(c["attempt"]), int(c["step"])) for c in candidates}
        )
        self.holdings.begin(
            attempt, ranks if candidates is not None else everything_ranks(self.holdings), wanted
        )
        if candidates is None:
            # An earlier attempt of ours may still be writing; it has folders of its own, so let it finish.
            self.writing.lease_until = None
        self.ahead.begin(ranks, candidates or [], ring)

    def _uploads(self) -> int:
        """How many checkpoints wait to be copied to the object store."""
        return len(self.uploading.waiting) if self.uploading else 0

    def note_complete(self, snapshot_id: SnapshotId) -> None:
        """Every rank of the run has this snapshot in memory."""
        if self.holdings.complete(snapshot_id):
            self.peers.complete(snapshot_id)
            self.emit({"event": "complete", "attempt": snapshot_id.attempt, "step": snapshot_id.step})

    def own(self, client: Client, m: Message, state: str) -> Buffer:
        b = self.holdings.buffers.get(int(m["buffer"]))
        if b is None or b.rank != client.rank or b.state != state or client.attempt != self.attempt:
            raise OperationRefused(f"buffer {m['buffer']} is not a {state} one of rank {client.rank}")
        return b

    def claim(self, client: Client, size: int) -> Buffer | None:
        if client.attempt != self.attempt:
            raise OperationRefused(f"attempt {client.attempt} is over", where=f"rank {client.rank}")
        b = self._claim_for(client, size)
        if b is None and not self.restored and self.holdings.newest is not None:
            # It saves without having restored: of the earlier attempts only the newest whole snapshot stays.
            self.holdings.wanted = frozenset({self.holdings.newest})
            b = self._claim_for(client, size)
        return b

    def _claim_for(self, client: Client, size: int) -> Buffer | None:
        b = self.holdings.claim(client.rank, size)
        if b is not None:
            b.owner = client
        return b

    def serve_waits(self) -> None:
        for wait in list(self.waits):
            if b := self.claim(wait.client, wait.size):
                self.waits.remove(wait)
                reply(wait.client, wait.id, {"ok": True, "buffer": b.id})

    def _filled(self, b: Buffer, why: str) -> None:
        """A new buffer has its pages; or (`why`) there are none for it."""
        for client in self.clients:
            if client.role == "rank" and client.rank == b.rank:
                tell(client, {"event": "ready", "buffer": b.id, "why": why})
        self.serve_waits()

    # --- on other threads

    def _after_commit(self, storage: Storage, snapshot_id: SnapshotId, mine: bool) -> None:
        """On the committer's thread, after a checkpoint is durable: upload this node's share, remove older ones."""
        with self.changed:
            if self.uploading is not None:
                self.uploading.submit(snapshot_id, tuple(sorted(self.local)))
            protect = self.uploading.names() if self.uploading else {}
            # An older one that is begun just now may be a folder with nothing in it.
            protect |= {
                folder_name(m.step, m.attempt): "being written" for m in self.writing.busy_with(self.attempt)
            }
            # All that this keeper saw become durable: a newer one may be there before an older one, and must not be
            # read again as a whole to prove it.
            verified = [folder_name(m.step, m.attempt) for m in {snapshot_id, *self.holdings.durable}]
        if mine:
            outcome = retention.apply(storage, self.keep, verified=verified, protect=protect)
            for name, why in outcome.errors.items():
                log(f"retention: {name}: {why}")


def everything_ranks(holdings: Holdings) -> set[int]:
    """The ranks of all buffers."""
    return {b.rank for b in holdings.buffers.values()}


def _how(m: Message) -> dict[str, Any]:
    """Of a request to flush: which snapshot, whose shares of it, and how long to wait for a storage that refuses."""
    how: dict[str, Any] = {"room_s": float(m.get("room_s", 0.0))}
    if m.get("mark") is not None:
        attempt, step = m["mark"]
        how |= {
            "snapshot_id": SnapshotId(int(attempt), int(step)),
            "ranks": {int(r) for r in m.get("ranks", [])},
        }
    return how


_SLOW = ("settle", "flush", "close", "pull", "insist")
_MOST_RANKS = 1 << 22
_SLOW_AT_ONCE = 8
"""Of one connection."""
_OF_VISITOR = ("hello", "ping", "inventory", "candidates", "bye")
_OF_AGENT = ("attempt", "complete", "lease", "settle", "flush", "close", "hurry", "ring")
