"""What ranks and the agent may ask of a keeper: one function for each request, called with `keeper.changed` held.

Each takes (keeper, client, message, descriptors) and gives the answer with the descriptors that go with it, or None
where the answer comes later. What lasts (settle, flush, close, pull) is in keeping.py, in threads of its own.
docs/architecture.md has the table.
"""

from __future__ import annotations

import os
import threading
import time

from ...errors import DoesNotFit
from ...link import bounds
from ...link.address import Address
from ...link.tls import Identity
from ...units import Bytes
from ..catalogue import announcement
from ..catalogue.placement import same_place
from .ahead import RingMember
from .buffers.holdings import CLAIMED, FINALIZED, FREE, Snapshot, SnapshotId
from .clients import Client, NotYet, OperationRefused, Wait
from .durability.commit import note_failure
from .keeping import Answer, Keeper, Operation
from .peers import PeerTarget, machine_of
from .wire import PROTOCOL, VERSION, Message

WAITS = 64
"""Buffers that one rank may wait for at a time."""


def hello(keeper: Keeper, client: Client, m: Message, fds: list[int]) -> Answer:
    """Who speaks. A rank of an older attempt is refused; without an agent a newer one begins its attempt."""
    if int(m["version"]) != VERSION:
        raise OperationRefused(
            f"the keeper speaks version {VERSION}, the other side {m['version']}",
            hint="Use one version of unbroken in the whole run",
        )
    role = str(m["role"])
    if role == "rank":
        attempt, rank = int(m["attempt"]), int(m["rank"])
        if attempt < keeper.attempt or attempt <= keeper.writing.closed:
            raise OperationRefused(
                f"attempt {attempt} is over", where=f"rank {rank}", hint="End this process"
            )
        if attempt > keeper.attempt:
            if keeper.agent_known:
                raise NotYet(f"attempt {attempt} was not announced", where=f"rank {rank}")
            keeper.begin(attempt, int(m["world_size"]), {rank: int(m.get("local_rank", 0))}, None)
        keeper.local.setdefault(rank, int(m.get("local_rank", 0)))
        client.rank, client.attempt = rank, attempt
        keeper.take_options(dict(m.get("wishes") or {}))
    elif role == "agent":
        keeper.agent_known = True
    elif role != "visitor":
        raise OperationRefused(f"there is no role '{role}'")
    client.role = role
    return {
        "keeper": keeper.id, "pid": os.getpid(), "node": keeper.settings.node, "attempt": keeper.attempt,
        "budget": keeper.settings.budget, "checkpoints": keeper.settings.checkpoints, "agent": keeper.agent_known,
        "run_id": keeper.settings.run_id, "room_s": keeper.settings.room_s,
        "machine": machine_of(keeper.settings.socket), "identified": keeper.settings.identity is not None, "protocol": PROTOCOL,
    }, []  # fmt: skip


def ping(keeper: Keeper, client: Client, m: Message, fds: list[int]) -> Answer:
    """That the keeper lives, and how long each writer has been without progress."""
    now = time.monotonic()
    writers = [
        {
            "attempt": j.snapshot.snapshot_id.attempt,
            "step": j.snapshot.snapshot_id.step,
            "rank": j.snapshot.rank,
            "idle_s": round(now - j.moved, 2) if j.running else 0.0,
        }
        for j in keeper.writing.jobs
    ]
    return {"writing": writers, "used": keeper.holdings.used(), "waits": len(keeper.waits)}, []


def inventory(keeper: Keeper, client: Client, m: Message, fds: list[int]) -> Answer:
    """What is in memory; where `runs` is asked for, ranks of the same snapshot as one row."""
    if m.get("runs"):
        return {
            "runs": keeper.holdings.inventory_in_runs(), "attempt": keeper.attempt, "restored": keeper.told_restored,
        }, []  # fmt: skip
    return {"inventory": keeper.holdings.inventory(), "attempt": keeper.attempt}, []


def attempt(keeper: Keeper, client: Client, m: Message, fds: list[int]) -> Answer:
    """Begins an attempt."""
    attempt = int(m["attempt"])
    if attempt < keeper.attempt or attempt <= keeper.writing.closed:
        raise OperationRefused(f"attempt {attempt} is over; attempt {keeper.attempt} is the newest here")
    ranks, candidates = announcement.unpack(m)
    if attempt > keeper.attempt:
        keeper.begin(attempt, int(m["world_size"]), ranks, candidates, m.get("ring"))
    else:
        keeper.world_size, keeper.local = int(m["world_size"]), ranks
        keeper.note_candidates(candidates)
    if m.get("place"):
        keeper.take_place(dict(m["place"]))
    return {}, []


def ring(keeper: Keeper, client: Client, m: Message, fds: list[int]) -> Answer:
    """Where this keeper gives snapshots to those of other nodes, and the secret of that: for the next attempt's keepers."""
    return {"ring": RingMember.of(keeper.peers, keeper.settings.socket).as_json()}, []


def place(keeper: Keeper, client: Client, m: Message, fds: list[int]) -> Answer:
    """Whether checkpoints go to the place that this rank names; while the supervisor has not answered: not yet."""
    wanted = str(m["place"])
    refused = keeper.place_refused
    if refused and same_place(wanted, str(refused.get("place") or wanted)):
        raise OperationRefused(
            str(refused["message"]), where=refused.get("where"), hint=refused.get("hint"),
        )  # fmt: skip
    if same_place(wanted, keeper.place):
        keeper.place_used = keeper.place
        return {"settled": True, "place": keeper.place}, []
    before = keeper.place_used or keeper.place_asked
    if not keeper.agent_known or (before and not same_place(before, wanted)):
        raise OperationRefused(
            f"checkpoints of this attempt go to {before or keeper.place}, not to {wanted} as well",
            where=f"{keeper.settings.node}, rank {client.rank}",
            hint="Give every Checkpointer of a training, on every rank, the same folder",
        )
    if not keeper.place_asked:
        keeper.place_asked = wanted
        keeper.emit({"event": "place", "attempt": client.attempt, "rank": client.rank, "place": wanted})
    return {"settled": False}, []


def complete(keeper: Keeper, client: Client, m: Message, fds: list[int]) -> Answer:
    """Every rank of the run has this snapshot in memory."""
    keeper.note_complete(SnapshotId(int(m["attempt"]), int(m["step"])))
    return {}, []


def whole(keeper: Keeper, client: Client, m: Message, fds: list[int]) -> Answer:
    """The ranks of this attempt found out among themselves that all of them have this snapshot in memory."""
    if client.role != "rank" or client.attempt != keeper.attempt:
        raise OperationRefused(f"attempt {client.attempt} is over", where=f"rank {client.rank}")
    keeper.note_complete(SnapshotId(client.attempt, int(m["step"])))
    return {}, []


def hurry(keeper: Keeper, client: Client, m: Message, fds: list[int]) -> Answer:
    """Nobody waits any longer for a storage that refuses."""
    keeper.hurried = True
    return {}, []


def lease(keeper: Keeper, client: Client, m: Message, fds: list[int]) -> Answer:
    """Renews the lease."""
    keeper.writing.lease_until = time.monotonic() + float(m["seconds"])
    return {}, []


def arena(keeper: Keeper, client: Client, m: Message, fds: list[int]) -> Answer:
    """Up to `count` buffers of `bytes` each for this rank, those that it has included, with their memfds."""
    size, count, rank = (
        bounds.whole(m["bytes"], "bytes", 1, 1 << 62),
        bounds.whole(m["count"], "count", 1, 64),
        client.rank,
    )
    keeper.holdings.shrink(rank, size)
    have = [b for b in keeper.holdings.of_rank(rank) if b.bytes == size]
    # Where another node's snapshots are held too (two buffers a rank), three fifths are for our own.
    own = keeper.settings.budget * 3 // 5 if keeper.peer_wanted else keeper.settings.budget
    share = own // max(1, len(keeper.local))
    while len(have) < count:
        others = sum(b.bytes for b in keeper.holdings.buffers.values() if b.rank == rank and b not in have)
        if (len(have) + 1) * size + others > share:
            break
        have.append(keeper.memory.create(rank, size))
    if not have:
        raise DoesNotFit(
            f"a snapshot of this rank takes {Bytes(size)}, its share of the node's budget is {Bytes(share)}",
            where=f"{keeper.settings.node}, rank {rank}",
            hint=f"Give the keeper {Bytes(3 * size * max(1, len(keeper.local)))} or more of memory",
        )
    told = [{"id": b.id, "bytes": b.bytes, "ready": b.ready} for b in have]
    return {"buffers": told}, [b.fd for b in have]


def claim(keeper: Keeper, client: Client, m: Message, fds: list[int]) -> Answer | None:
    """A buffer to fill; the answer waits until one may be used, unless `now`."""
    size = int(m["bytes"])
    b = keeper.claim(client, size)
    if b is not None:
        return {"buffer": b.id}, []
    if m.get("now"):
        return {"buffer": None}, []
    if sum(w.client is client for w in keeper.waits) >= WAITS:
        raise OperationRefused(f"this rank waits for {WAITS} buffers already", where=f"rank {client.rank}")
    keeper.waits.append(Wait(client, int(m.get("id", 0)), size))
    return None


def unclaim(keeper: Keeper, client: Client, m: Message, fds: list[int]) -> Answer:
    """Gives a claimed buffer back unfilled (its content is lost)."""
    keeper.own(client, m, CLAIMED).state = FREE
    return {}, []


def seal(keeper: Keeper, client: Client, m: Message, fds: list[int]) -> Answer:
    """The claimed buffer holds a whole snapshot now."""
    b = keeper.own(client, m, CLAIMED)
    snapshot_id = SnapshotId(client.attempt, int(m["step"]))
    size = int(m["file_bytes"])
    if not 0 < size <= b.bytes:
        raise OperationRefused(f"a file of {size} bytes is no content of a buffer of {b.bytes}")
    snapshot = Snapshot(snapshot_id, client.rank, int(m["world_size"]), size, dict(m["part"]))
    finished = keeper.holdings.finalize(b, snapshot)
    keeper.emit(
        {
            "event": "host", "attempt": snapshot_id.attempt, "step": snapshot_id.step, "rank": client.rank,
            "seconds": float(m.get("seconds", 0.0)),
        }
    )  # fmt: skip
    if finished:
        keeper.peers.complete(snapshot_id)
        keeper.emit({"event": "complete", "attempt": snapshot_id.attempt, "step": snapshot_id.step})
    if m.get("persist"):
        keeper.writing.submit(b, periodic=bool(m.get("periodic")))
    return {}, []


def adopt(keeper: Keeper, client: Client, m: Message, fds: list[int]) -> Answer:
    """Buffers that a rank kept when another keeper died; they are this one's now, re-issued from memory."""
    ids: dict[str, int] = {}
    entries = list(m["buffers"])
    if len(fds) != len(entries):
        raise OperationRefused(f"{len(entries)} buffers came with {len(fds)} descriptors")
    for entry in entries:
        b = keeper.memory.take_over(client.rank, fds.pop(0))
        ids[str(entry["id"])] = b.id
        if kept := entry.get("snapshot"):
            snapshot_id = SnapshotId(int(kept["attempt"]), int(kept["step"]))
            keeper.holdings.finalize(
                b,
                Snapshot(
                    snapshot_id,
                    client.rank,
                    int(kept["world_size"]),
                    int(kept["file_bytes"]),
                    dict(kept["part"]),
                ),
            )
            if kept.get("complete"):
                keeper.holdings.complete(snapshot_id)
            if kept.get("persist"):
                keeper.writing.submit(b, periodic=bool(kept.get("periodic")))
        elif entry.get("claimed"):
            b.state, b.owner = CLAIMED, client
    return {"ids": ids}, []


def reclaim(keeper: Keeper, client: Client, m: Message, fds: list[int]) -> Answer:
    """The rank's connection broke while it was filling these buffers; those that are not finalized are its again."""
    taken = []
    for number in m["buffers"]:
        b = keeper.holdings.buffers.get(int(number))
        if b is not None and b.rank == client.rank and not b.replica and b.state != FINALIZED:
            b.state, b.owner = CLAIMED, client
            taken.append(b.id)
    return {"buffers": taken}, []


def candidates(keeper: Keeper, client: Client, m: Message, fds: list[int]) -> Answer:
    """What the supervisor allows to restore from, newest first; `supervised` tells whether there is one."""
    found = keeper.candidates
    if client.role == "rank":  # each looks for its own snapshot only
        mine = str(client.rank)
        found = [
            {**c, "memory": {r: n for r, n in (c.get("memory") or {}).items() if r == mine}} for c in found
        ]
    return {"candidates": found, "supervised": keeper.agent_known}, []


def fetch(keeper: Keeper, client: Client, m: Message, fds: list[int]) -> Answer:
    """A rank's snapshot out of memory, pinned until `release`; `found` is false if it is not here."""
    b = keeper.holdings.find(SnapshotId(int(m["attempt"]), int(m["step"])), int(m["rank"]))
    if b is None or b.snapshot is None:
        return {"found": False}, []
    if b.id not in client.held:
        client.held.add(b.id)
        b.pins += 1
    s = b.snapshot
    return {
        "found": True, "buffer": b.id, "file_bytes": s.file_bytes, "part": s.part, "bytes": b.bytes,
        "world_size": s.world_size, "checksums": s.checksums, "peer": b.replica,
        "ahead": keeper.ahead.holds(s.snapshot_id, b.rank),
    }, [b.fd]  # fmt: skip


def release(keeper: Keeper, client: Client, m: Message, fds: list[int]) -> Answer:
    """The rank is done with what it fetched. `restored`, if given, is what the run goes on from."""
    for number in client.held:
        if b := keeper.holdings.buffers.get(number):
            b.pins -= 1
    client.held.clear()
    if "restored" in m:
        chosen = m["restored"]
        keeper.restored = True
        keeper.holdings.wanted = (
            frozenset()
            if chosen is None
            else frozenset({SnapshotId(int(chosen["attempt"]), int(chosen["step"]))})
        )
        keeper.ahead.settle(next(iter(keeper.holdings.wanted), None))
        told = (client.attempt, chosen and (chosen["attempt"], chosen["step"]))
        # What is chosen, and what is passed over, is the same on every rank. Each node tells it once: an agent may be lost with it.
        if client.rank == 0 or keeper.told_restored != told:
            keeper.told_restored = told
            skipped = [[str(name), str(why)[:300]] for name, why in m.get("skipped") or ()][:20]
            keeper.emit(
                {
                    "event": "restored", "attempt": client.attempt, "step": chosen["step"] if chosen else None,
                    "of": chosen["attempt"] if chosen else None, "skipped": skipped, "rank": client.rank,
                }
            )  # fmt: skip
    return {}, []


def give_up(keeper: Keeper, client: Client, m: Message, fds: list[int]) -> Answer:
    """This rank will never have this snapshot: the others need not wait for it."""
    snapshot_id = SnapshotId(client.attempt, int(m["step"]))
    keeper.writing.give_up(snapshot_id, client.rank, str(m["why"])[:500])
    snapshot = Snapshot(snapshot_id, client.rank, int(m["world_size"]), 0, {})
    threading.Thread(
        target=note_failure, args=(keeper.writing.storage(snapshot_id), snapshot, str(m["why"])), daemon=True
    ).start()
    return {}, []


def wrote(keeper: Keeper, client: Client, m: Message, fds: list[int]) -> Answer:
    """The rank wrote its own share (no buffer fits into the budget): watch for the others and commit."""
    snapshot_id = SnapshotId(client.attempt, int(m["step"]))
    if snapshot_id.attempt <= keeper.writing.closed:
        raise OperationRefused(f"attempt {snapshot_id.attempt} is sealed")
    keeper.writing.watch(snapshot_id, int(m["world_size"]), client.rank)
    return {}, []


def peer_listen(keeper: Keeper, client: Client, m: Message, fds: list[int]) -> Answer:
    """Where this keeper takes other nodes' snapshots: on a Unix socket, or with TLS where a host is named."""
    host, pem = m.get("host"), str(m.get("identity") or "")
    try:
        if host is None:
            return {"address": str(keeper.peers.listen_here(keeper.settings.socket))}, []
        identity = Identity.from_pem(pem, "peer_listen") if pem else keeper.settings.identity
        if identity is None:
            raise OperationRefused("keepers of several machines need a certificate, and there is none")
        return {"address": str(keeper.peers.listen(str(host), identity))}, []
    except OSError as e:
        raise OperationRefused(f"the keeper cannot listen for its peers: {e.strerror or e}") from e


def peer_target(keeper: Keeper, client: Client, m: Message, fds: list[int]) -> Answer:
    """Who holds this node's copies."""
    target = PeerTarget(str(m["node"]), Address.parse(m["address"])) if m.get("address") else None
    keeper.peers.send_to(str(m["token"]), target)
    return {}, []


def bye(keeper: Keeper, client: Client, m: Message, fds: list[int]) -> Answer:
    """The rank ends in good order."""
    client.left = True
    return {}, []


OPERATIONS: dict[str, Operation] = {
    f.__name__: f
    for f in (
        hello,
        ping,
        inventory,
        attempt,
        ring,
        place,
        complete,
        lease,
        hurry,
        whole,
        arena,
        claim,
        unclaim,
        seal,
        adopt,
        reclaim,
        candidates,
        fetch,
        release,
        give_up,
        wrote,
        peer_listen,
        peer_target,
        bye,
    )
}
