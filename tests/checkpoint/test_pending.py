"""What waits to be written: bounded, the newest wins on a slow storage, and each snapshot goes where its attempt's lie."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.keepers import FakeAgent, FakeRank, until
from unbroken.checkpoint.catalogue import contents as catalogue
from unbroken.checkpoint.storage import open_storage
from unbroken.progress.records.candidate import Candidate
from unbroken.testing.http_faults import Fault
from unbroken.testing.object_store import FakeS3

Agents = Callable[..., FakeAgent]


def committed(place: str | Path) -> list[int]:
    return sorted(f.step for f in catalogue.listing(open_storage(str(place))) if f.committed)


class Gate:
    """A storage that takes nothing while it is shut."""

    def __init__(self, server: FakeS3) -> None:
        self.open = threading.Event()
        self.waits = 0
        server.fault = self._hold

    def _hold(self, request: object) -> Fault | None:
        if getattr(request, "method", "") in ("PUT", "POST") and not self.open.is_set():
            self.waits += 1
            self.open.wait(30)
        return None


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    with FakeS3() as server:
        for name, value in (
            ("ENDPOINT_URL", server.endpoint), ("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "y"), ("REGION", "us-east-1"),
        ):  # fmt: skip
            monkeypatch.setenv(f"AWS_{name}", value)
        made = Gate(server)
        yield made
        made.open.set()


def superseded(agent: FakeAgent) -> list[tuple[int, int]]:
    return [(e["step"], e["by"]) for e in agent.events if e.get("event") == "superseded"]


def test_on_a_slow_storage_the_newest_is_written_and_training_never_waits(agents: Agents, gate: Gate) -> None:
    agent = agents(checkpoints="s3://bucket/slow")
    agent.attempt(1)
    rank = FakeRank(agent)
    rank.save(10, persist=True, periodic=True)
    until(lambda: gate.waits)
    for step in range(
        20, 400, 10
    ):  # each of them would wait for ever if a buffer were held by what is left out
        rank.save(step, persist=True, periodic=True)
    until(lambda: len(superseded(agent)) == 37)
    assert superseded(agent) == [(s, s + 10) for s in range(20, 390, 10)]
    assert len(agent.link.request({"op": "ping"})[0]["writing"]) <= 2
    gate.open.set()
    until(lambda: agent.heard("durable", step=390))
    assert committed("s3://bucket/slow") == [10, 390]
    durable = {e["step"] for e in agent.events if e.get("event") == "durable"}
    assert durable == {10, 390} and not agent.heard("failed")


def test_what_was_asked_for_by_name_is_never_left_out(agents: Agents, gate: Gate) -> None:
    agent = agents(checkpoints="s3://bucket/slow")
    agent.attempt(1)
    rank = FakeRank(agent)
    rank.save(10, persist=True, periodic=True)
    until(lambda: gate.waits)
    rank.save(20, persist=True)
    rank.save(25)
    assert rank.claim(now=True) is None, "the rank waits rather than lose it"
    gate.open.set()
    until(lambda: agent.heard("durable", step=20))
    assert superseded(agent) == [] and committed("s3://bucket/slow") == [10, 20]


def test_a_flush_writes_the_newest_first_and_also_one_that_was_left_out(agents: Agents, gate: Gate) -> None:
    agent = agents(checkpoints="s3://bucket/slow")
    agent.attempt(1)
    rank = FakeRank(agent)
    rank.save(10, persist=True, periodic=True)
    until(lambda: gate.waits)
    rank.save(20, persist=True, periodic=True)
    rank.save(30, persist=True, periodic=True)
    until(lambda: superseded(agent) == [(20, 30)])
    asked = {"op": "flush", "deadline_s": 20, "mark": [1, 20], "ranks": [0]}  # its buffer was not used again
    got: list[int] = []
    asking = threading.Thread(target=lambda: got.append(agent.link.request(asked, timeout_s=30)[0]["step"]))
    asking.start()
    gate.open.set()
    asking.join(30)
    assert got == [20] and agent.link.flush(20) == 30
    assert committed("s3://bucket/slow") == [10, 20, 30]


def test_with_ranks_elsewhere_nothing_is_left_out(agents: Agents, gate: Gate) -> None:
    """Each node would leave out others, and no checkpoint would be whole."""
    agent = agents(checkpoints="s3://bucket/slow")
    agent.attempt(1, ranks={0: 0}, world_size=2)
    rank = FakeRank(agent, world_size=2)
    for step in (10, 20, 30):
        rank.save(step, persist=True, periodic=True)
        agent.link.complete(1, step)
    assert superseded(agent) == []
    gate.open.set()
    until(lambda: agent.heard("written", step=30))


def test_what_is_in_memory_goes_where_its_attempt_kept_its_checkpoints(
    agent: FakeAgent, tmp_path: Path
) -> None:
    """The script names another folder in its second attempt, and a stop comes before that has made anything."""
    old, new = tmp_path / "old", tmp_path / "new"
    request = {"op": "attempt", "world_size": 1, "ranks": {"0": 0}, "candidates": []}
    agent.link.request({**request, "attempt": 1, "place": {"url": str(old)}})
    rank = FakeRank(agent)
    rank.save(35, fill=7)
    rank.die()
    assert agent.link.settle(1, deadline_s=5) == []
    offered = Candidate(1, 35, "step-00000035.a0001", {0: agent.node}, on_disk=False)
    agent.attempt(2, candidates=[offered])
    agent.link.request({**request, "attempt": 2, "place": {"url": str(new)}, "candidates": []})
    assert agent.link.flush(10) == 35
    assert committed(old) == [35] and not new.exists()


def test_a_new_keeper_learns_of_the_places_from_what_it_is_offered(agent: FakeAgent, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    offered = {
        "attempt": 1, "step": 35, "name": None, "folder": "step-00000035.a0001", "place": str(old), "brought": False,
        "memory": {"0": agent.node},
    }  # fmt: skip
    agent.link.request({
        "op": "attempt", "attempt": 2, "world_size": 1, "ranks": {"0": 0}, "candidates": [offered],
        "place": {"url": str(new)},
    })  # fmt: skip
    rank = FakeRank(agent, attempt=2)
    rank.save(40, persist=True)
    until(lambda: agent.heard("durable", step=40))
    assert committed(new) == [40] and not old.exists()
