"""A spare's keeper fetches what its ranks will restore before they ask: the same bytes, and nothing lost where the hint was wrong."""

from __future__ import annotations

import mmap
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.keepers import FakeAgent, FakeRank, until
from unbroken.checkpoint.client.links import KeeperRefused
from unbroken.checkpoint.keeper.ahead import FetchAhead
from unbroken.checkpoint.keeper.buffers.holdings import FINALIZED, FREE, Snapshot, SnapshotId
from unbroken.checkpoint.keeper.buffers.memory import NodeMemory
from unbroken.checkpoint.keeper.clients import KeeperSettings
from unbroken.checkpoint.keeper.peers import Peers
from unbroken.checkpoint.keeper.wire import Channel, Message
from unbroken.journal.checksummed import digest
from unbroken.link.address import Address, listen_unix
from unbroken.link.tls import Identity
from unbroken.progress.records.candidate import Candidate

from .test_holdings import holdings

TOKEN = "planted-secret-of-the-ring"
HERE, SPARE = "node-000", "node-001"


def read_share(rank: FakeRank, attempt: int, step: int) -> bytes | None:
    """The whole file of this rank's snapshot in its keeper's memory, checked as a restore checks it."""
    answer, fds = rank.link.request({"op": "fetch", "attempt": attempt, "step": step, "rank": rank.rank})
    if not answer["found"]:
        return None
    with mmap.mmap(fds[0], answer["bytes"]) as m:
        found = m[: answer["file_bytes"]]
    os.close(fds[0])
    assert answer["checksums"] in (None, [digest(memoryview(found))])
    rank.link.request({"op": "release"})
    return found


class Pair:
    """The node of ranks 0 and 1, of which 1 goes on on the spare; `shares` are rank 1's files by step."""

    def __init__(
        self, agents: Callable[..., FakeAgent], steps: tuple[int, ...] = (5, 7), **spare: Any
    ) -> None:
        self.old, self.spare = agents(), agents(node=SPARE, **spare)
        self.old.attempt(1, ranks=2)
        ranks = [FakeRank(self.old, rank=r, world_size=2) for r in range(2)]
        self.address = ranks[0].link.request({"op": "peer_listen"})[0]["address"]
        self.ask_of(ranks[0])
        for step in steps:
            for r in ranks:
                r.save(step, fill=10 * step + r.rank)
        self.shares = {step: read_share(ranks[1], 1, step) for step in steps}
        for r in ranks:
            r.die()
        held = {0: HERE, 1: HERE}
        self.offers = [Candidate(1, s, f"step-{s:08d}.a0001", held) for s in sorted(steps, reverse=True)]

    def ask_of(self, rank: FakeRank, token: str = TOKEN) -> None:
        """Makes its keeper one of the ring, as the first rank of a node does."""
        rank.link.request({"op": "peer_target", "token": token, "node": "", "address": ""})

    def begin(self, attempt: int = 2, ring: dict[str, Any] | None = None) -> None:
        """The attempt begins on the spare, which is told of the ring as a supervisor tells it."""
        member = self.old.link.ring()
        self.spare.attempt(attempt, {1: 0}, 2, self.offers, ring or {HERE: member})

    def join(self, attempt: int = 2) -> FakeRank:
        return FakeRank(self.spare, rank=1, world_size=2, attempt=attempt)

    def pull(self, rank: FakeRank, step: int) -> int:
        request = {"op": "pull", "attempt": 1, "step": step, "address": self.address}
        return int(rank.link.request(request)[0]["buffer"])

    def used(self) -> int:
        return int(self.spare.link.request({"op": "ping"})[0]["used"])


def release(rank: FakeRank, step: int) -> None:
    rank.link.request({"op": "release", "restored": {"attempt": 1, "step": step}})


def test_the_share_is_there_before_its_rank_is_with_the_same_bits(agents: Callable[..., FakeAgent]) -> None:
    pair = Pair(agents)
    assert pair.used() == 0
    pair.begin()
    until(lambda: pair.spare.heard("ahead", attempt=2, step=7, of=1, fetched=1, missed=0))
    assert [(h.step, h.rank) for h in pair.spare.link.inventory()] == [(7, 1)]
    rank = pair.join()
    assert rank.link.request({"op": "fetch", "attempt": 1, "step": 7, "rank": 1})[0]["ahead"]
    assert read_share(rank, 1, 7) == pair.shares[7]
    release(rank, 7)
    # It is one of the rank's own three buffers, and what it restored stays until a newer one is whole everywhere.
    before = pair.used()
    rank.count = 1
    assert len(rank.buffers()) == 1 and pair.used() == before
    assert rank.claim(now=True) is None


def test_a_restore_waits_for_what_is_on_its_way(agents: Callable[..., FakeAgent]) -> None:
    pair = Pair(agents)
    member = pair.old.link.ring()
    pair.old.kill(signal.SIGSTOP)
    try:
        pair.spare.attempt(2, {1: 0}, 2, pair.offers, {HERE: member})
        rank = pair.join()
        assert read_share(rank, 1, 7) is None
        with ThreadPoolExecutor(1) as pool:
            pulled = pool.submit(pair.pull, rank, 7)
            assert not pair.spare.heard("ahead")
            pair.old.kill(signal.SIGCONT)
            buffer = pulled.result(timeout=15)
    finally:
        pair.old.kill(signal.SIGCONT)
    # The rank's own token is none of the ring's: what it was given is what the keeper had asked for by itself.
    assert pair.spare.heard("ahead", fetched=1)
    assert read_share(rank, 1, 7) == pair.shares[7]
    assert rank.link.request({"op": "fetch", "attempt": 1, "step": 7, "rank": 1})[0]["buffer"] == buffer


@pytest.mark.slow
def test_where_the_ranks_agree_on_another_step_what_was_fetched_goes(
    agents: Callable[..., FakeAgent],
) -> None:
    pair = Pair(agents)
    pair.begin()
    until(lambda: pair.spare.heard("ahead", fetched=1))
    one = pair.used()
    rank = pair.join()
    pair.ask_of(rank)
    pair.pull(rank, 5)
    assert pair.used() == 2 * one
    assert [(h.step, h.rank) for h in pair.spare.link.inventory()] == [
        (7, 1),
        (5, 1),
    ]  # nothing is settled yet
    rank.link.request({"op": "release", "restored": None, "skipped": [["all", "for a while"]]})
    assert [(h.step, h.rank) for h in pair.spare.link.inventory()] == [(7, 1), (5, 1)]
    release(rank, 5)
    assert [(h.step, h.rank) for h in pair.spare.link.inventory()] == [(5, 1)] and pair.used() == one
    assert read_share(rank, 1, 5) == pair.shares[5]
    assert {(h.step, h.rank) for h in pair.old.link.inventory()} == {(s, r) for s in (5, 7) for r in (0, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["another secret", "nobody there", "no room", "nonsense"])
def test_what_fails_is_counted_and_a_restore_fetches_by_itself(
    agents: Callable[..., FakeAgent], how: str
) -> None:
    pair = Pair(agents, **({"budget": 1 << 20} if how == "no room" else {}))
    member: Any = pair.old.link.ring()
    member |= {"another secret": {"token": "x"}, "nobody there": {"here": "unix:/nowhere"}}.get(how, {})
    pair.begin(ring={HERE: [] if how == "nonsense" else member})
    if how != "nonsense":
        until(lambda: pair.spare.heard("ahead", fetched=0, missed=1, bytes=0))
    assert pair.spare.link.inventory() == []
    rank = pair.join()
    pair.ask_of(rank)
    if how == "no room":
        assert pair.used() == 0
        with pytest.raises(KeeperRefused, match="no room"):
            pair.pull(rank, 7)
        return
    pair.pull(rank, 7)
    assert read_share(rank, 1, 7) == pair.shares[7]


def test_an_attempt_that_begins_meanwhile_is_never_given_the_memory_that_is_received_into(
    agents: Callable[..., FakeAgent], tmp_path: Path
) -> None:
    """A claimed buffer was free again with the next attempt, while the bytes of the one before still came into it."""
    pair = Pair(agents)
    member, half, go = pair.old.link.ring(), threading.Event(), threading.Event()
    path = pair.spare.scratch / "slow.sock"
    listener = listen_unix(path)

    def serve() -> None:
        channel = Channel(listener.accept()[0])
        channel.receive(), channel.receive()
        content = bytes([99]) * (1 << 20)
        channel.send({"found": True, "file_bytes": len(content), "part": {}, "world_size": 2})
        channel.send_bytes(memoryview(content)[: 1 << 19])
        half.set()
        go.wait(15)
        channel.send_bytes(memoryview(content)[1 << 19 :])
        channel.send({"checksums": [digest(memoryview(content))]})

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    pair.begin(ring={HERE: member | {"here": str(Address.unix(path))}})
    assert half.wait(15)
    pair.spare.attempt(3, {1: 0}, 2, pair.offers)
    start = pair.join(3).layout.data_start
    rank = FakeRank(pair.spare, rank=1, world_size=2, attempt=3, size=(1 << 20) - start)
    assert len(rank.buffers()) == 3  # that one is among them, once it has ended
    for step in (8, 9):
        rank.save(step, fill=step)
    assert rank.claim(now=True) is None
    go.set()
    until(lambda: pair.spare.heard("ahead", attempt=2))
    thread.join(15)
    listener.close()
    for step in (8, 9):
        share = read_share(rank, 3, step)
        assert share is not None and set(share[start:]) == {step}


class Home:
    """What fetching ahead needs of its keeper, in this process."""

    def __init__(self, folder: Path, identity: Identity | None) -> None:
        self.settings = KeeperSettings(
            folder / "k.sock", SPARE, "test", str(folder), 64 << 20, identity=identity
        )
        self.changed = threading.Condition(threading.RLock())
        self.memory = NodeMemory(self.settings, self.changed, lambda b, why: None)
        self.peers = Peers(self, print)
        self.attempt, self.local = 2, {1: 0}
        self.events: list[Message] = []

    def note_complete(self, snapshot_id: SnapshotId) -> None: ...

    def emit(self, event: Message) -> None:
        self.events.append(event)


@pytest.mark.slow
def test_from_another_machine_it_comes_over_tls_with_the_runs_certificate_alone(
    agents: Callable[..., FakeAgent], tmp_path: Path
) -> None:
    old, identity = agents(), Identity.make("keepers")
    old.attempt(1, ranks=2)
    ranks = [FakeRank(old, rank=r, world_size=2) for r in range(2)]
    ranks[0].link.request({"op": "peer_listen", "host": "127.0.0.1", "identity": identity.pem})
    ranks[0].link.request({"op": "peer_target", "token": TOKEN, "node": "", "address": ""})
    for r in ranks:
        r.save(7, fill=3)
    share = read_share(ranks[1], 1, 7)
    member = old.link.ring() | {"machine": "another one"}
    candidate = {"attempt": 1, "step": 7, "brought": False, "memory": {"1": HERE}}
    for own, fetched in ((identity, 1), (Identity.make("others"), 0), (None, 0)):
        home = Home(tmp_path, own)
        ahead = FetchAhead(home)
        with home.changed:
            ahead.begin([1], [candidate], {HERE: member})
            ahead.wait_for(SnapshotId(1, 7), 1)
        (event,) = home.events
        assert (event["fetched"], event["missed"]) == (fetched, 1 - fetched), event
        found = home.memory.holdings.find(SnapshotId(1, 7), 1)
        assert (found is not None) == bool(fetched)
        if found is not None and share is not None:
            assert bytes(home.memory.view(found, len(share))) == share


def test_no_snapshot_makes_way_for_a_hint() -> None:
    h = holdings(1, count=1)
    (b,) = h.buffers.values()
    b.state, b.snapshot = FINALIZED, Snapshot(SnapshotId(1, 3), 0, 2, 100, {})
    h.begin(3, [0], [SnapshotId(1, 3), SnapshotId(2, 7)])
    h.complete(SnapshotId(2, 7))
    assert h.claim(0, 100, only_free=True) is None and h.find(SnapshotId(1, 3), 0) is b
    assert h.claim(0, 100) is b  # what a restore may take
    b.state = FREE
    assert h.claim(0, 100, only_free=True) is b
