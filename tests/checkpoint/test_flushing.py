"""The last snapshot at an end: what is whole in memory becomes durable, also of a sealed attempt, also on a full disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.keepers import FakeAgent, FakeRank, alive, until
from unbroken.checkpoint.catalogue import contents as catalogue
from unbroken.checkpoint.client.links import KeeperRefused
from unbroken.checkpoint.storage import open_storage
from unbroken.progress.records.candidate import Candidate
from unbroken.testing.http_faults import Fault
from unbroken.testing.object_store import FakeS3

Agents = Callable[..., FakeAgent]


def committed(agent: FakeAgent) -> list[str]:
    return [f.name for f in catalogue.listing(open_storage(agent.checkpoints)) if f.committed]


def saved_and_sealed(agent: FakeAgent) -> None:
    """A snapshot of attempt 1 in memory only, whole on its rank; then attempt 1 is sealed."""
    agent.attempt(1)
    rank = FakeRank(agent)
    rank.save(35, fill=7)
    rank.die()
    assert agent.link.settle(1, deadline_s=5) == []


@pytest.mark.parametrize("moment", ["sealed", "announced", "connected", "restored", "without a restore"])
def test_what_a_sealed_attempt_left_in_memory_becomes_durable_at_the_end(
    agent: FakeAgent, moment: str
) -> None:
    """A stop while the next attempt starts: it has made nothing, so the snapshot it starts from is the newest."""
    saved_and_sealed(agent)
    if moment != "sealed":
        agent.attempt(2, candidates=[Candidate(1, 35, "step-00000035.a0001", {0: agent.node}, on_disk=False)])
    if moment in ("connected", "restored", "without a restore"):
        rank = FakeRank(agent, attempt=2)
        if moment != "connected":
            chosen = {"attempt": 1, "step": 35} if moment == "restored" else None
            rank.link.request({"op": "release", "restored": chosen})
        rank.die()
    assert agent.link.close(flush=True, deadline_s=10) == 35
    until(lambda: not alive(agent.pid))
    assert committed(agent) == ["step-00000035.a0001"]
    assert catalogue.verify_in(open_storage(agent.checkpoints), "step-00000035.a0001").ok


def test_what_comes_after_the_seal_is_no_part_of_it(agent: FakeAgent) -> None:
    """A process that outlives its attempt saves on: that snapshot is whole, and counts for nothing."""
    agent.attempt(1)
    rank = FakeRank(agent)
    rank.save(35)
    assert agent.link.settle(1, deadline_s=5) == []
    rank.save(36)
    assert agent.link.flush(5) == 35
    assert committed(agent) == ["step-00000035.a0001"]


def test_a_checkpoint_that_the_seal_cut_short_is_written_at_the_end(agents: Agents, tmp_path: Path) -> None:
    """The disk refused until after the seal; the snapshot is still in memory and offered to attempt 2."""
    (tmp_path / "way").write_text("a file where the folder should be")
    agent = agents(checkpoints=tmp_path / "way" / "checkpoints")
    agent.attempt(1)
    rank = FakeRank(agent)
    rank.save(5, persist=True)
    until(lambda: agent.heard("failed", step=5))
    rank.die()
    agent.link.settle(1, deadline_s=5)
    (tmp_path / "way").unlink()
    agent.attempt(2, candidates=[Candidate(1, 5, "step-00000005.a0001", {0: agent.node}, on_disk=False)])
    assert agent.link.close(flush=True, deadline_s=10) == 5
    assert committed(agent) == ["step-00000005.a0001"]


def test_a_storage_that_refuses_is_asked_until_it_takes_the_checkpoint(
    agents: Agents, tmp_path: Path
) -> None:
    way = tmp_path / "way"
    way.write_text("a file where the folder should be")
    agent = agents(checkpoints=way / "checkpoints")
    agent.attempt(1)
    rank = FakeRank(agent)
    rank.save(5)
    got: list[int | None] = []
    waiting = threading.Thread(target=lambda: got.append(agent.link.flush(10, room_s=60)))
    waiting.start()
    until(lambda: agent.heard("waiting", step=5))
    told = agent.heard("waiting", step=5)
    assert told is not None and "directory" in told["why"] and 50 < told["seconds"] <= 60
    time.sleep(0.6)  # at least one more try
    assert [e["event"] for e in agent.events if e["event"] in ("waiting", "failed")] == ["waiting"]
    way.unlink()
    waiting.join(20)
    assert got == [5] and committed(agent) == ["step-00000005.a0001"]


def test_the_wait_for_room_ends_with_its_time_or_when_somebody_is_in_a_hurry(
    agents: Agents, tmp_path: Path
) -> None:
    (tmp_path / "way").write_text("a file where the folder should be")
    agent = agents(checkpoints=tmp_path / "way" / "checkpoints")
    agent.attempt(1)
    FakeRank(agent).save(5)
    began = time.monotonic()
    with pytest.raises(KeeperRefused, match="could not be made durable"):
        agent.link.flush(10, room_s=1.5)
    assert 1.0 < time.monotonic() - began < 8
    agent.events.clear()
    answers: list[str] = []

    def ask() -> None:
        try:
            agent.link.flush(10, room_s=300)
        except KeeperRefused as e:
            answers.append(str(e))

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: agent.heard("waiting", step=5))
    agent.link.hurry()
    asking.join(10)
    assert "could not be made durable" in answers[0]


def test_a_slow_storage_is_waited_for_while_it_gets_on(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeS3() as s3:
        for name, value in (
            ("ENDPOINT_URL", s3.endpoint),
            ("ACCESS_KEY_ID", "x"),
            ("SECRET_ACCESS_KEY", "y"),
        ):
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        s3.fault = lambda r: Fault(delay=0.4) if r.is_part or r.method == "POST" else None
        agent = agents(checkpoints="s3://bucket/slow", budget=512 << 20)
        agent.attempt(1)
        FakeRank(agent, size=40 << 20).save(5)
        began = time.monotonic()
        assert agent.link.flush(0.2, room_s=60) == 5
        assert time.monotonic() - began > 0.4
        with pytest.raises(KeeperRefused, match="could not be made durable within"):
            FakeRank(agent, size=40 << 20).save(6)
            agent.link.flush(0.2)


def test_two_nodes_wait_for_the_one_whose_disk_refuses(agents: Agents, tmp_path: Path) -> None:
    """One folder for both; node 1 is refused at first, and leaves a note of it that must not end the other's try."""
    agent = [agents(node=f"node-00{n}", checkpoints=tmp_path / "checkpoints") for n in range(2)]
    for n, a in enumerate(agent):
        a.attempt(1, ranks={n: 0}, world_size=2)
        FakeRank(a, rank=n, world_size=2).save(5)
        a.link.complete(1, 5)
    folder = tmp_path / "checkpoints" / "step-00000005.a0001"
    folder.mkdir(parents=True)
    in_the_way = folder / "rank-00001.safetensors"
    in_the_way.mkdir()
    got: dict[int, int | None] = {}

    def ask(n: int) -> None:
        got[n] = agent[n].link.flush(20, room_s=60)

    asking = [threading.Thread(target=ask, args=(n,)) for n in range(2)]
    for t in asking:
        t.start()
    until(lambda: agent[1].heard("waiting", step=5))
    until(lambda: agent[0].heard("waiting", step=5))
    in_the_way.rmdir()
    for t in asking:
        t.join(30)
    assert got == {0: 5, 1: 5} and committed(agent[0]) == ["step-00000005.a0001"]


def test_shares_of_a_node_that_is_gone_are_written_by_the_peer_that_holds_copies(agents: Agents) -> None:
    """What is named is written, whoever's it was; what is not named is left to others."""
    agent = agents()
    agent.attempt(1, ranks={0: 0, 1: 1}, world_size=2)
    for r in range(2):
        FakeRank(agent, rank=r, world_size=2).save(5)
    request = {"op": "flush", "deadline_s": 10, "mark": [1, 5]}
    answer, _ = agent.link.request({**request, "ranks": []})
    assert answer["step"] is None and committed(agent) == []
    answer, _ = agent.link.request({**request, "ranks": [0, 1]})
    assert (answer["step"], answer["attempt"]) == (5, 1)
    assert committed(agent) == ["step-00000005.a0001"]
