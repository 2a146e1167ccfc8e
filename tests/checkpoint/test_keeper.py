"""The keeper as a process: what it keeps, writes, refuses, and what it leaves when it or others are killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.keepers import FakeAgent, FakeRank, alive, until
from unbroken.checkpoint.catalogue import contents as catalogue
from unbroken.checkpoint.client.links import KeeperGone, KeeperRefused, NotAnnounced
from unbroken.checkpoint.storage import open_storage
from unbroken.errors import DoesNotFit
from unbroken.progress.records.candidate import Candidate


def committed(agent: FakeAgent) -> list[str]:
    return [f.name for f in catalogue.listing(open_storage(agent.checkpoints)) if f.committed]


def verified(agent: FakeAgent, name: str) -> bool:
    return catalogue.verify_in(open_storage(agent.checkpoints), name).ok


def test_a_snapshot_is_kept_and_made_durable(agent: FakeAgent) -> None:
    agent.attempt(1)
    rank = FakeRank(agent)
    rank.save(5, fill=3)
    rank.save(6, fill=4, persist=True)
    # Rank and agent each hear it on a connection of their own, in no order.
    until(lambda: rank.heard("durable", step=6) and agent.heard("durable", step=6))
    assert agent.heard("host", step=5, rank=0, attempt=1)
    assert agent.heard("written", step=6)["bytes"] == rank.layout.file_bytes
    assert agent.heard("durable", step=6)["path"] == "step-00000006.a0001"
    assert committed(agent) == ["step-00000006.a0001"]
    assert verified(agent, "step-00000006.a0001")
    assert rank.fetch(1, 5) == (3, 3)
    assert {(h.step, h.rank, h.everywhere) for h in agent.link.inventory()} == {(5, 0, True), (6, 0, True)}


def test_a_checkpoint_commits_by_itself_although_its_rank_is_dead(agent: FakeAgent) -> None:
    """Scenario 7: the marker does not wait for the next save, nor for anyone."""
    agent.attempt(1)
    rank = FakeRank(agent)
    rank.save(5, persist=True)
    rank.die()
    until(lambda: agent.heard("durable", step=5))
    assert committed(agent) == ["step-00000005.a0001"]


def test_snapshots_outlive_their_rank_and_the_next_attempt_finds_them(agent: FakeAgent) -> None:
    agent.attempt(1, ranks=2)
    ranks = [FakeRank(agent, rank=r, world_size=2) for r in range(2)]
    for r in ranks:
        r.save(7, fill=10 + r.rank)
    for r in ranks:
        r.die()
    assert {(h.step, h.rank) for h in agent.link.inventory()} == {(7, 0), (7, 1)}
    agent.attempt(
        2, ranks=2, candidates=[Candidate(1, 7, "step-00000007.a0001", {0: "node-000", 1: "node-000"})]
    )
    again = [FakeRank(agent, rank=r, world_size=2, attempt=2) for r in range(2)]
    assert [r.fetch(1, 7) for r in again] == [(10, 10), (11, 11)]
    # And what the new attempt saves never overwrites it before a newer one is whole on all ranks.
    again[0].link.request({"op": "release", "restored": {"attempt": 1, "step": 7}})
    again[0].save(8, fill=20)
    again[0].save(9, fill=21)
    assert again[0].claim(now=True) is None
    assert again[0].fetch(1, 7) == (10, 10)
    again[1].save(8, fill=22)
    assert again[0].claim(now=True) is not None
    assert again[0].fetch(1, 7) is None


def test_each_node_tells_once_what_its_ranks_went_on_from(agent: FakeAgent) -> None:
    """Rank 0's node may be lost with what it knows before anybody has heard it."""
    agent.attempt(2, ranks={2: 0, 3: 1}, world_size=4)
    for r in (2, 3):
        rank = FakeRank(agent, rank=r, world_size=4, attempt=2)
        rank.link.request({"op": "release", "restored": {"attempt": 1, "step": 7}, "skipped": []})
    until(lambda: agent.heard("restored"))
    agent.link.inventory()  # what was sent before is there
    told = [e for e in agent.events if e.get("event") == "restored"]
    assert [(e["attempt"], e["of"], e["step"], e["rank"]) for e in told] == [(2, 1, 7, 2)]


def test_an_older_attempt_is_refused(agent: FakeAgent) -> None:
    agent.attempt(1)
    old = FakeRank(agent)
    buffer = old.claim()
    agent.attempt(2)
    with pytest.raises((KeeperGone, KeeperRefused)):
        old.finalize(buffer or 0, 5, persist=True)
    with pytest.raises(KeeperRefused, match="attempt 1 is over"):
        FakeRank(agent, attempt=1)
    with pytest.raises(NotAnnounced):
        FakeRank(agent, attempt=3)
    assert committed(agent) == []


def test_a_buffer_is_used_again_only_after_a_newer_snapshot_is_complete_on_all_ranks(
    agent: FakeAgent,
) -> None:
    # This node has one of two ranks; the other is known only through the agent.
    agent.attempt(1, ranks={0: 0}, world_size=2)
    rank = FakeRank(agent, world_size=2)
    for step in (1, 2, 3):
        rank.save(step, fill=step)
    assert rank.claim(now=True) is None
    agent.link.complete(1, 2)
    assert rank.claim(now=True) is not None  # step 1 went
    assert rank.fetch(1, 1) is None
    assert rank.fetch(1, 2) == (2, 2)
    assert rank.claim(now=True) is None


def test_a_rank_that_waits_for_a_buffer_gets_it_when_one_is_free(agent: FakeAgent) -> None:
    agent.attempt(1, ranks={0: 0}, world_size=2)
    rank = FakeRank(agent, world_size=2)
    for step in (1, 2, 3):
        rank.save(step)
    future = rank.link.post({"op": "claim", "bytes": rank.layout.file_bytes})
    time.sleep(0.05)
    assert not future.done()
    agent.link.complete(1, 3)
    assert future.result(5)[0]["buffer"] is not None


def test_a_rank_that_dies_with_a_claimed_buffer_leaves_nothing_that_passes_as_whole(agent: FakeAgent) -> None:
    agent.attempt(1)
    rank = FakeRank(agent)
    buffer = rank.claim()
    rank.fill(buffer or 0, 9)
    rank.die()
    until(lambda: agent.link.ping() == [])
    assert agent.link.inventory() == []


def test_the_marker_comes_only_when_every_node_has_written(agents: Callable[..., FakeAgent]) -> None:
    a, b = agents(node="a"), agents(node="b")
    for agent, r in ((a, 0), (b, 1)):
        agent.attempt(1, ranks={r: 0}, world_size=2)
    ranks = [FakeRank(a, rank=0, world_size=2), FakeRank(b, rank=1, world_size=2)]
    ranks[0].save(5, persist=True)
    until(lambda: a.heard("written", step=5))
    time.sleep(0.1)
    assert committed(a) == []
    ranks[1].save(5, persist=True)
    until(lambda: a.heard("durable", step=5) and b.heard("durable", step=5))
    assert verified(a, committed(a)[0])


def test_settle_abandons_what_cannot_commit_and_nothing_is_written_afterwards(agent: FakeAgent) -> None:
    agent.attempt(1, ranks={0: 0}, world_size=2)
    rank = FakeRank(agent, world_size=2)
    rank.save(5, persist=True)
    until(lambda: agent.heard("written", step=5))
    began = time.monotonic()
    assert agent.link.settle(1, deadline_s=20) == []
    assert time.monotonic() - began < 10  # its other rank will never come: no waiting for it
    until(lambda: agent.heard("failed", step=5))
    rank.save(6, persist=True)
    with pytest.raises(KeeperRefused, match=r"sealed|is over"):
        agent.link.complete(1, 6)
        agent.link.flush(5)
    assert not (Path(agent.checkpoints) / "step-00000006.a0001").exists()


def test_settle_waits_for_no_share_of_a_lost_node(agent: FakeAgent) -> None:
    """All ranks had it in memory, so it might still have committed; but rank 1's node is gone."""
    agent.attempt(1, ranks={0: 0}, world_size=2)
    rank = FakeRank(agent, world_size=2)
    rank.save(5, persist=True)
    agent.link.complete(1, 5)
    until(lambda: agent.heard("written", step=5))
    began = time.monotonic()
    assert agent.link.settle(1, deadline_s=30, gone=[1]) == []
    assert time.monotonic() - began < 10
    until(lambda: agent.heard("failed", step=5))
    assert committed(agent) == []


def test_flush_makes_the_newest_complete_snapshot_durable(agent: FakeAgent) -> None:
    agent.attempt(1)
    rank = FakeRank(agent)
    rank.save(5)
    rank.save(6, fill=8)
    rank.die()
    assert agent.link.flush(10) == 6
    assert committed(agent) == ["step-00000006.a0001"]
    assert agent.link.flush(10) == 6


def test_close_flushes_frees_and_exits(agent: FakeAgent) -> None:
    agent.attempt(1)
    FakeRank(agent).save(5)
    assert agent.link.close(flush=True, deadline_s=10) == 5
    until(lambda: not alive(agent.pid))
    assert committed(agent) == ["step-00000005.a0001"]


def test_without_an_agent_a_keeper_stays_where_a_rank_died_although_the_last_one_closed(
    agents: Callable[..., FakeAgent],
) -> None:
    """Plain torchrun: the ranks that still live may end in good order before torchrun notices, and starts again."""
    alone = agents(connect=False)
    ranks = [FakeRank(alone, rank=r, world_size=2) for r in range(2)]
    for r in ranks:
        r.save(5)
    ranks[1].die()
    ranks[0].link.request({"op": "bye"})
    ranks[0].die()
    until(lambda: committed(alone) == ["step-00000005.a0001"])  # what a goodbye of all would not have written
    assert alive(alone.pid)
    again = [FakeRank(alone, rank=r, world_size=2, attempt=2) for r in range(2)]
    for r in again:
        r.link.request({"op": "bye"})
        r.die()
    until(lambda: not alive(alone.pid))


def test_a_lapsed_lease_stops_all_writing_and_a_renewal_lets_it_go_on(
    agents: Callable[..., FakeAgent],
) -> None:
    agent = agents(lease_s=0.05)
    agent.attempt(1)
    time.sleep(0.1)
    rank = FakeRank(agent)
    rank.save(5, persist=True)
    time.sleep(0.3)
    assert not Path(agent.checkpoints).exists()
    agent.link.lease(30)
    until(lambda: agent.heard("durable", step=5))


def test_an_orphan_without_a_lease_writes_nothing_and_ends(agents: Callable[..., FakeAgent]) -> None:
    agent = agents(lease_s=0.05, orphan_grace_s=0.3, extra=["--term-grace", "0.5"])
    agent.attempt(1)
    time.sleep(0.1)
    rank = FakeRank(agent)
    rank.save(5)
    rank.die()
    agent.link.disconnect()
    until(lambda: not alive(agent.pid))
    assert not Path(agent.checkpoints).exists()
    assert not agent.socket.exists()


def test_an_orphan_with_a_lease_flushes_and_ends(agents: Callable[..., FakeAgent]) -> None:
    agent = agents(lease_s=60, orphan_grace_s=0.3)
    agent.attempt(1)
    rank = FakeRank(agent)
    rank.save(5)
    rank.die()
    agent.link.disconnect()
    until(lambda: not alive(agent.pid))
    assert committed(agent) == ["step-00000005.a0001"]


def test_an_agent_may_come_back(agent: FakeAgent) -> None:
    agent.attempt(1)
    rank = FakeRank(agent)
    rank.save(5)
    agent.link.disconnect()
    agent.connect()
    assert [h.step for h in agent.link.inventory()] == [5]
    rank.save(6, persist=True)
    until(lambda: agent.heard("durable", step=6))


def test_sigterm_makes_the_last_snapshot_durable(agent: FakeAgent) -> None:
    agent.attempt(1)
    rank = FakeRank(agent)
    rank.save(5)
    agent.kill(signal.SIGTERM)
    until(lambda: not alive(agent.pid))
    assert committed(agent) == ["step-00000005.a0001"]


def test_a_killed_keeper_leaves_no_checkpoint_that_passes_as_whole(agent: FakeAgent) -> None:
    agent.attempt(1)
    rank = FakeRank(agent, size=24 << 20, count=2)
    rank.save(5, persist=True)
    until(lambda: (Path(agent.checkpoints) / "step-00000005.a0001").exists())
    agent.kill()
    for name in committed(agent):  # it may have been quick
        assert verified(agent, name)


def test_the_budget_is_a_guarantee(agents: Callable[..., FakeAgent]) -> None:
    agent = agents(budget=5 << 20)
    agent.attempt(1)
    rank = FakeRank(agent, size=2 << 20)
    assert len(rank.buffers()) == 2  # a third would be above
    with pytest.raises(DoesNotFit, match="share of the node's budget"):
        FakeRank(agent, rank=0, size=8 << 20).buffers()


def test_a_single_buffer_is_used_again_once_the_disk_has_it(agents: Callable[..., FakeAgent]) -> None:
    agent = agents(budget=3 << 20)
    agent.attempt(1)
    rank = FakeRank(agent, size=2 << 20)
    assert len(rank.buffers()) == 1
    rank.save(1)
    assert rank.claim(now=True) is None
    rank.link.request({"op": "flush", "deadline_s": 10}) if False else agent.link.flush(10)
    assert rank.claim(now=True) is not None


def test_a_full_or_forbidden_disk_fails_the_save_and_everyone_hears(
    agents: Callable[..., FakeAgent], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    agent = agents(checkpoints=tmp_path / "file" / "checkpoints")
    agent.attempt(1, ranks=2)
    ranks = [FakeRank(agent, rank=r, world_size=2) for r in range(2)]
    for r in ranks:
        r.save(5, persist=True)
    for r in ranks:
        until(lambda r=r: r.heard("failed", step=5))
    assert "directory" in ranks[0].heard("failed", step=5)["why"]
    for r in ranks:  # training goes on
        r.save(6)
    assert {h.step for h in agent.link.inventory()} >= {6}


def test_a_flipped_bit_in_memory_is_noticed_before_it_reaches_the_disk(agent: FakeAgent) -> None:
    agent.attempt(1)
    rank = FakeRank(agent)
    buffer = rank.save(5)
    until(lambda: rank.link.request({"op": "fetch", "attempt": 1, "step": 5, "rank": 0})[0]["checksums"])
    rank.link.request({"op": "release"})
    rank.maps[buffer][rank.layout.data_start + 77] ^= 1
    with pytest.raises(KeeperRefused, match="changed in memory"):
        agent.link.flush(10)
    assert committed(agent) == []


def test_a_stopped_rank_does_not_stop_the_keeper(agent: FakeAgent) -> None:
    agent.attempt(1, ranks=2)
    mute = FakeRank(agent, rank=1, world_size=2)
    mute.events = None  # type: ignore[assignment]  # its reader dies at the first event: nothing is read any more
    rank = FakeRank(agent, rank=0, world_size=2)
    for step in range(1, 4):
        rank.save(step)
    assert agent.link.ping() == []


def test_many_saves_leak_neither_descriptors_nor_memory(agent: FakeAgent) -> None:
    agent.attempt(1)
    rank = FakeRank(agent, size=1 << 16)

    def open_files() -> int:
        return len(os.listdir(f"/proc/{agent.pid}/fd"))

    for step in range(1, 11):
        rank.save(step, persist=step % 5 == 0)
    until(lambda: agent.heard("durable", step=10))
    before = open_files()
    for step in range(11, 61):
        rank.save(step, persist=step % 5 == 0)
    until(lambda: agent.heard("durable", step=60))
    assert open_files() <= before + 1


def test_writing_and_proving_many_checkpoints_leaves_the_keepers_own_memory_flat(
    agents: Callable[..., FakeAgent],
) -> None:
    """Chunks of 16 MiB in threads that come and go: the C library kept one in the arena of each of them."""
    agent = agents(budget=1 << 30)
    agent.attempt(1)
    rank = FakeRank(agent, size=20 << 20, count=4)

    def private_kib() -> int:
        lines = Path(f"/proc/{agent.pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))

    rows = []
    for pair in range(1, 17):
        for step in (2 * pair + 1, 2 * pair):  # the older one commits last: the newest is to be proven again
            rank.save(step, persist=True)
        until(lambda step=2 * pair: rank.heard("durable", step=step))
        if pair > 4:
            rows.append(private_kib())
    assert max(rows) - min(rows) < 8 * 1024, rows


def test_a_malformed_message_ends_nothing(agent: FakeAgent) -> None:
    agent.attempt(1)
    rank = FakeRank(agent)
    for message in ({"op": "claim"}, {"op": "nonsense"}, {"op": "seal", "buffer": 99}, {"op": "_begin"}):
        with pytest.raises(KeeperRefused):
            rank.link.request(message)
    rank.link.channel.sock.sendall(b"\xff\xff\xff\xff")
    rank.save if rank.link.closed.wait(5) else pytest.fail("the connection stays open")
    FakeRank(agent).save(5)
