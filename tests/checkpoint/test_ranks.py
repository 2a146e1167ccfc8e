"""Several ranks on one and two nodes, as threads of this process that agree as ranks do; keepers are real processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.keepers import FakeAgent, SharedAgreement, alive, until
from unbroken.checkpoint import Checkpointer, checkpointer
from unbroken.checkpoint.catalogue import contents as catalogue
from unbroken.checkpoint.client import session
from unbroken.checkpoint.interval import Bounds
from unbroken.checkpoint.ranks.environment import Place
from unbroken.checkpoint.restore.selection import Restored
from unbroken.checkpoint.storage import open_storage
from unbroken.errors import CheckpointError, NotDurable, StorageError
from unbroken.progress.records.candidate import Candidate


class Ranks:
    """`world` ranks over `nodes` nodes; `each(f)` runs f(rank) on all of them at once."""

    def __init__(self, folder: Path, world: int, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.world, self.nodes, self.monkeypatch = folder, world, nodes, monkeypatch
        self.all: list[Checkpointer] = []

    def open(self, agents: list[FakeAgent] | None = None, attempt: int = 0, **options: Any) -> None:
        tries: dict[str, SharedAgreement] = defaultdict(lambda: SharedAgreement(self.world))

        def agreement(rank: int, world: int, name: str) -> Any:
            with guard:
                return tries[name.partition(".")[2]].of(rank)

        guard = threading.Lock()
        self.monkeypatch.setattr(session, "agreement", agreement)
        self.all = []
        local = self.world // self.nodes
        for r in range(self.world):
            node = f"node-{r // local:03d}"
            agent = agents[r // local] if agents else None
            where = Place(
                r, self.world, r % local, node, "test", attempt if agent else None,
                agent.socket if agent else None, None,
            )  # fmt: skip
            self.monkeypatch.setattr(checkpointer, "place", lambda where=where: where)
            settings = {"snapshot_every": 1, "persist_every": 2, "memory": "64MiB", **options}
            self.all.append(Checkpointer(self.folder, **settings))

    def each(self, f: Callable[[int, Checkpointer], Any]) -> list[Any]:
        results: list[Any] = [None] * self.world

        def run(r: int) -> None:
            try:
                results[r] = f(r, self.all[r])
            except Exception as e:  # noqa: BLE001 - the test looks at it
                results[r] = e

        threads = [threading.Thread(target=run, args=(r,)) for r in range(self.world)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        return results

    def save(self, step: int, **how: Any) -> list[Any]:
        return self.each(
            lambda r, c: c.save(step, {"w": torch.full((1000,), 100.0 * r + step), "step": step}, **how)
        )

    def restore(self) -> tuple[list[Any], list[float]]:
        states = [{"w": torch.zeros(1000), "step": 0} for _ in range(self.world)]
        got = self.each(lambda r, c: c.restore(states[r]))
        return got, [float(s["w"][0]) for s in states]

    def vanish(self) -> None:
        for c in self.all:
            if c._parts is not None:
                c.memory.closing = True
                c.memory.link.disconnect()
            c._closed = True


@pytest.fixture
def ranks(
    own_keepers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(world: int, nodes: int = 1) -> Ranks:
        made.append(Ranks(tmp_path / "c", world, nodes, monkeypatch))
        return made[-1]

    yield make
    for m in made:
        m.vanish()


def kill_keepers(own_keepers: Path, node: int | None = None) -> None:
    for log in own_keepers.glob("*/*/keeper.log"):
        if node is None or f"node node-{node:03d}" in log.read_text():
            pid = int(log.read_text().splitlines()[-1].split("keeper ")[1].split(":")[0])
            os.kill(pid, signal.SIGKILL)


def test_all_ranks_take_the_same_checkpoint_also_when_one_finds_damage(
    ranks: Callable[..., Ranks], own_keepers: Path
) -> None:
    """Scenario 15: rank 1's newest is flipped, so all four take the one before."""
    r = ranks(4)
    r.open()
    for step in (2, 4):
        for saved in r.save(step):
            saved.wait("disk", 30)
    r.vanish()
    kill_keepers(own_keepers)
    path = r.folder / "step-00000004.a0001" / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    r.open()
    got, values = r.restore()
    assert [g.step for g in got] == [2] * 4 and {g.source for g in got} == {"disk"}
    assert values == [2, 102, 202, 302]
    assert all("rank 1" in g.skipped[0][1] for g in got)


def test_a_snapshot_that_one_rank_never_finished_is_not_taken(ranks: Callable[..., Ranks]) -> None:
    r = ranks(2)
    r.open()
    for saved in r.save(2):
        saved.wait("disk", 30)
    r.save(3)
    r.all[0].save(5, {"w": torch.zeros(1000), "step": 5})  # rank 1 was killed before
    r.vanish()
    r.open()
    got, values = r.restore()
    assert [g.step for g in got] == [3, 3] and values == [3, 103]
    assert {g.source for g in got} == {"memory"}


def test_two_nodes_without_a_supervisor_commit_and_free_their_buffers(ranks: Callable[..., Ranks]) -> None:
    r = ranks(4, nodes=2)
    r.open()
    for step in range(
        1, 9
    ):  # three buffers each: would stop at step 4 if nobody said what is whole everywhere
        for saved in r.save(step):
            assert saved.skipped is None
    r.each(lambda _, c: c.wait("disk", 30))
    storage = open_storage(r.folder)
    until(lambda: [f.step for f in catalogue.listing(storage) if f.committed] == [8, 6, 4])  # keep=3


def on_machines(monkeypatch: pytest.MonkeyPatch, machine_of: Callable[[str], str]) -> None:
    """As if each node were on that machine."""
    gather = session.gather_nodes
    monkeypatch.setattr(session, "gather_nodes", lambda *a: {n: machine_of(n) for n in gather(*a)})


@pytest.mark.parametrize("apart", [False, True])
def test_losing_a_node_loses_nothing_that_its_peer_holds(
    ranks: Callable[..., Ranks], own_keepers: Path, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    """On one machine over Unix sockets, on several over TLS."""
    if apart:
        on_machines(monkeypatch, lambda node: f"the machine of {node}")
    r = ranks(4, nodes=2)
    r.open(peer=True, persist_every=100)
    for saved in r.save(7):
        saved.wait("peer", 15)
    kind = "tls:" if apart else "unix:"
    assert all(a.startswith(kind) for c in r.all for a in c._open().session.addresses.values())
    r.vanish()
    kill_keepers(own_keepers, node=1)
    r.open(peer=True, persist_every=100)
    got, values = r.restore()
    assert [getattr(g, "step", g) for g in got] == [7] * 4
    assert values == [7, 107, 207, 307]
    assert [g.source for g in got] == ["memory", "memory", "peer", "peer"]


@pytest.mark.slow
def test_a_copy_that_was_left_out_or_failed_holds_no_end_up(ranks: Callable[..., Ranks]) -> None:
    """Keepers copy the newest alone: closing had waited for ten minutes for the copies of those before it."""
    r = ranks(2, nodes=2)
    r.open(peer=True, persist_every=100)
    saves = [s for step in range(1, 9) for s in r.save(step)]
    for last in saves[-2:]:
        last.wait("peer", 15)
    assert all(s.done for s in saves[:-2])
    away = {"op": "peer_target", "token": "x", "node": "node-001", "address": "unix:/nowhere"}
    r.each(lambda _, c: c.memory.link.request(away))
    for saved in r.save(9):
        with pytest.raises(StorageError, match="did not reach peer"):
            saved.wait("peer", 15)
    assert r.each(lambda _, c: c.close(10)) == [None, None]


@pytest.mark.parametrize("missing", ["a keeper's version", "openssl"])
def test_where_keepers_cannot_reach_each_other_safely_every_rank_is_told(
    ranks: Callable[..., Ranks], own_keepers: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """No copy goes over a plain connection."""
    r = ranks(4, nodes=2)
    if missing == "openssl":
        on_machines(monkeypatch, lambda node: f"the machine of {node}")
        monkeypatch.setenv("PATH", "/nowhere")
    else:
        on_machines(monkeypatch, lambda node: "" if node == "node-001" else "this one")
    r.open(peer=True)
    errors = r.save(1)
    assert all(isinstance(e, CheckpointError) for e in errors), errors
    assert all(("openssl" if missing == "openssl" else "earlier version") in str(e) for e in errors), errors


def test_whether_a_restored_checkpoint_is_durable_is_the_same_on_all_ranks(
    ranks: Callable[..., Ranks], own_keepers: Path
) -> None:
    """Sources differ where a keeper was lost; whoever decides by them whether to save again waits for the others."""
    r = ranks(2, nodes=2)
    r.open()
    for saved in r.save(2):
        saved.wait("disk", 15)
    r.vanish()
    kill_keepers(own_keepers, node=1)
    r.open()
    got, _ = r.restore()
    assert [(g.step, g.source, g.durable) for g in got] == [(2, "memory", True), (2, "disk", True)]
    for saved in r.save(3):
        saved.wait("host", 15)
    r.vanish()
    r.open()
    got, _ = r.restore()
    assert [(g.step, g.source, g.durable) for g in got] == [(3, "memory", False)] * 2


@pytest.mark.parametrize("made_up_for", [True, False])
def test_a_rank_whose_disk_fails_is_known_to_all_and_training_goes_on(
    ranks: Callable[..., Ranks], made_up_for: bool
) -> None:
    """Scenario 9: another node's rank cannot write; all know at once, not when somebody's time is up."""
    r = ranks(2, nodes=2)
    r.open(wait_for_room="2s")
    for saved in r.save(2):
        saved.wait("disk", 30)
    folder = r.folder / "step-00000004.a0001"
    folder.mkdir()
    (folder / "rank-00001.safetensors").mkdir()  # rename onto a folder fails
    began = time.monotonic()
    for saved in r.save(4):
        with pytest.raises(StorageError, match="rank 1"):
            saved.wait("disk", 30)
    assert time.monotonic() - began < 10
    if made_up_for:
        r.save(5)  # written at the end, although no step of the disk's: it makes up for step 4
    ended = r.each(lambda _, c: c.close())
    assert all(e is None if made_up_for else isinstance(e, NotDurable) for e in ended), ended
    newest = catalogue.newest(open_storage(r.folder))
    assert newest is not None and newest.step == (5 if made_up_for else 2)


def test_a_supervisor_names_the_candidates(
    ranks: Callable[..., Ranks], agents: Callable[..., FakeAgent]
) -> None:
    r = ranks(2)
    agent = agents(node="node-000", checkpoints=r.folder)
    agent.attempt(1, ranks=2)
    r.open([agent], attempt=1)
    assert r.restore()[0] == [None, None]
    for step in (2, 3):
        r.save(step)
    r.each(lambda _, c: c.wait("disk", 30))
    r.vanish()
    agent.link.settle(1, 5)
    name = "step-00000002.a0001"
    # The supervisor does not want step 3, although it is in memory (a loss spike began there).
    agent.attempt(2, ranks=2, candidates=[Candidate(1, 2, name, {0: "node-000", 1: "node-000"})])
    r.open([agent], attempt=2)
    got, values = r.restore()
    assert [g.step for g in got] == [2, 2] and values == [2, 102]
    assert isinstance(got[0], Restored) and got[0].attempt == 1
    for saved in r.save(4):
        saved.wait("disk", 30)
    assert (r.folder / "step-00000004.a0002" / "COMMITTED").exists()
    # A rank of the first attempt that comes back late is sent away.
    r.open([agent], attempt=1)
    assert all("is over" in str(e) for e in r.restore()[0])


def test_a_mute_keeper_of_a_supervisor_is_ended_and_its_successor_gets_everything(
    ranks: Callable[..., Ranks], agents: Callable[..., FakeAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scenario 10, under an agent: the ranks notice, the agent starts another, the memory changes hands."""
    monkeypatch.setattr("unbroken.checkpoint.client.rank_memory.MUTE_AFTER", 2)
    r = ranks(2)
    agent = agents(node="node-000", checkpoints=r.folder)
    agent.attempt(1, ranks=2)
    r.open([agent], attempt=1)
    r.save(1)
    old = agent.pid
    until(lambda: all(c.memory._ahead and c.memory._ahead.buffer for c in r.all))
    os.kill(old, signal.SIGSTOP)
    saves = r.save(2)  # claimed ahead, so nobody waits for the keeper
    until(lambda: not alive(old), 30)
    agent.respawn()
    agent.attempt(1, ranks=2)
    for saved in saves:
        assert saved.wait("disk", 30) > 0
    assert {(h.step, h.rank) for h in agent.link.inventory()} >= {(1, 0), (1, 1), (2, 0), (2, 1)}


def test_skipping_is_one_decision_for_all_ranks(ranks: Callable[..., Ranks], own_keepers: Path) -> None:
    """Scenario 3: saves faster than they can be written; no buffer in use is ever overwritten."""
    r = ranks(2)
    r.open(when_busy="skip", buffers=2, persist_every=1, keep=100)
    for step in range(1, 15):
        saved = r.save(step)
        assert (saved[0].skipped is None) == (saved[1].skipped is None)
    r.each(lambda _, c: c.wait("disk", 60))
    storage = open_storage(r.folder)
    for f in catalogue.listing(storage):
        if f.committed:
            assert catalogue.verify_in(storage, f.name).ok
            for rank in range(2):
                layout = catalogue.read_header(
                    storage,
                    f"{f.name}/rank-{rank:05d}.safetensors",
                    (r.folder / f.name / f"rank-{rank:05d}.safetensors").stat().st_size,
                )
                start, _ = layout.span("w")
                raw = storage.read(f"{f.name}/rank-{rank:05d}.safetensors", start, start + 4)
                assert torch.frombuffer(bytearray(raw), dtype=torch.float32).item() == 100.0 * rank + f.step


def test_another_world_size_reshards(ranks: Callable[..., Ranks], own_keepers: Path, tmp_path: Path) -> None:
    """Scenario 12: saved by two ranks, restored by one; the data position is global."""
    r = ranks(2)
    r.open()
    same = {"w": torch.arange(10.0), "step": 4}
    for saved in r.each(lambda _, c: c.save(4, same, position={"samples": [[0, 64]]})):
        saved.wait("disk", 30)
    r.vanish()
    one = Ranks(r.folder, 1, 1, r.monkeypatch)
    one.open()
    state = {"w": torch.zeros(10), "step": 0}
    restored = one.all[0].restore(state)
    assert restored is not None and restored.resharded and restored.step == 4
    assert state["w"].tolist() == list(range(10)) and state["step"] == 4
    assert restored.position.samples == ((0, 64),)
    one.vanish()


def test_a_budget_without_room_takes_the_slower_path(ranks: Callable[..., Ranks]) -> None:
    """Scenario 11: host memory too small at the first save."""
    r = ranks(2)
    r.open(memory="4KiB")
    saved = r.save(2)
    for s in saved:
        s.wait("disk", 30)
        with pytest.raises(StorageError, match="no room"):
            s.wait("host", 1)
    assert all(s.skipped for s in r.save(3))  # a snapshot alone has no place to go
    r.vanish()
    r.open(memory="4KiB")
    got, values = r.restore()
    assert [g.step for g in got] == [2, 2] and values == [2, 102]


def test_checkpoints_are_copied_to_the_remote_after_their_commit(
    ranks: Callable[..., Ranks], tmp_path: Path
) -> None:
    r = ranks(2)
    r.open(remote=str(tmp_path / "remote"))
    for saved in r.save(2):
        assert saved.wait("disk", 30) <= saved.wait("remote", 30)
    storage = open_storage(tmp_path / "remote")
    assert catalogue.verify_in(storage, "step-00000002.a0001").ok
    r.each(lambda _, c: c.close())


def test_a_session_that_could_not_be_opened_leaves_nothing_and_is_opened_whole_later(
    ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a rank is missing when the others look for it."""
    r = ranks(2)
    r.open()
    opened: list[Any] = []
    make = session.RankMemory

    def noted(*args: Any, **how: Any) -> Any:
        opened.append(make(*args, **how))
        return opened[-1]

    def missing(*_: Any) -> Any:
        raise CheckpointError("another rank did not say 'node/1' within 300 s")

    monkeypatch.setattr(session, "RankMemory", noted)
    with monkeypatch.context() as m:
        m.setattr(session, "gather_nodes", missing)
        errors = r.each(lambda rank, c: c.save(1, {"w": torch.zeros(10)}))
    assert all("did not say" in str(e) for e in errors), errors
    assert all(c._parts is None for c in r.all)
    until(lambda: len(opened) == 2 and all(memory.link.closed.is_set() for memory in opened))
    for saved in r.save(2):
        saved.wait("disk", 30)
    assert {c.attempt for c in r.all} == {2}
    r.each(lambda _, c: c.close())


def test_automatic_intervals_are_the_same_on_all_ranks(ranks: Callable[..., Ranks]) -> None:
    r = ranks(2)
    r.open(snapshot_every="auto", persist_every="auto")
    r.restore()
    for c in r.all:
        controller = c._open().schedule.controller
        assert controller is not None
        controller.bounds = Bounds(0.05, 0.1)
    due: list[list[int]] = [[], []]

    def train(rank: int, c: Checkpointer) -> None:
        for step in range(1, 60):
            time.sleep(0.005 * (rank + 1))
            if c.due(step):
                due[rank].append(step)
                c.save(step, {"w": torch.zeros(10)})

    assert r.each(train) == [None, None]
    assert due[0] == due[1] and due[0][0] == 5 and len(due[0]) >= 2
