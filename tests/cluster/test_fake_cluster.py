"""The virtual agents speak the supervisor's messages over its own link, and break as real ones do."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from unbroken.checkpoint.catalogue import announcement
from unbroken.cluster.clocks import find_first
from unbroken.cluster.contract import AgentCommand, Exited, Lost, Request, Returned, Started
from unbroken.cluster.hello import Hello
from unbroken.errors import RunError
from unbroken.link.bounds import Message, proof, same_secret
from unbroken.link.runs import unpack
from unbroken.recover.supervise.nodes import received
from unbroken.recover.wire import Link
from unbroken.testing.fake_cluster import (
    FakeCluster,
    FakeHardware,
    Faults,
    MemoryJournal,
    Script,
    SimulatedLoop,
    Stuck,
    run_simulated,
)

from .contract import Watch

TOKEN = "a-token-of-this-run"
LEASE_S = 12.0
NPROC = 2


class Desk:
    """A supervisor's side, reduced to its link: takes agents in as `nodes.NodeTable` does, and keeps what they say."""

    def __init__(self, cluster: FakeCluster, term: int = 1) -> None:
        self.cluster, self.term = cluster, term
        self.door = cluster.network.listen(self._serve)
        self.links: dict[str, Link] = {}
        self.hellos: dict[str, Hello] = {}
        self.first: dict[str, Message] = {}
        self.news: list[tuple[float, str, Message]] = []

    async def _serve(self, reader: asyncio.StreamReader, writer: Any) -> None:
        node = ""

        async def handle(m: Message) -> Message | None:
            nonlocal node
            match m["op"]:
                case "prove":
                    return {"proof": proof(TOKEN, "supervisor", m["nonce"], self.door.address.name)}
                case "token":
                    if not same_secret(m["token"], TOKEN):
                        raise RunError("wrong token")
                    return {}
                case "clock":
                    now = self.cluster.loop.time()
                    return {"monotonic": now, "wall": now + self.cluster.wall_offset_s}
                case "hello":
                    node = received.hello(m)["node"]
                    self.links[node], self.first[node] = link, m
                    self.hellos[node] = Hello.from_message(m)
                    return {"epoch": self.term}
                case "beat":
                    link.tell(op="lease", number=m["number"], seconds=LEASE_S)
                    return None
            received.check(m, 1 << 20)
            self.news.append((self.cluster.loop.time(), node, m))
            return None

        link = Link(reader, writer, handle)
        await link.serve()

    def of(self, op: str, node: str | None = None) -> list[Message]:
        return [m for _, n, m in self.news if m["op"] == op and node in (None, n)]

    def steps(self, node: str) -> list[int]:
        """The steps that a node's first rank has reported."""
        news = [next(iter(m["steps"].values()), []) for m in self.of("progress", node)]
        return [s for steps in news for s, *_ in steps]

    async def launch(
        self, nodes: list[str], attempt: int = 1, candidates: list[Message] | None = None
    ) -> None:
        for i, node in enumerate(nodes):
            ranks = {r: r - i * NPROC for r in range(i * NPROC, (i + 1) * NPROC)}
            announced = {"op": "attempt", "attempt": attempt, **announcement.pack(ranks, candidates or [])}
            await self.links[node].call("keeper", request=announced)
            local = {str(r): i for r, i in ranks.items()}
            await self.links[node].call("launch", attempt=attempt, ranks=local, world_size=len(nodes) * NPROC)

    async def held(self, node: str) -> set[tuple[int, int]]:
        """{(step, rank)} that a node's keeper holds."""
        answer = await self.links[node].call("keeper", request={"op": "inventory", "runs": True})
        return {(row[1], rank) for row in answer["runs"] for rank in unpack(row[6], "ranks", 99)}


class Scene:
    """A run on some nodes of a fake cluster, with its desk, its events and its faults."""

    def __init__(
        self, loop: SimulatedLoop, nodes: int, script: Script | None = None, *, given: int = 3
    ) -> None:
        self.loop, self._given = loop, given
        self.cluster = FakeCluster("run-1", FakeHardware(loop, nodes, gpus=NPROC), script=script)
        self.faults = Faults(self.cluster)
        self.watch = Watch(self.cluster)
        self.desk = Desk(self.cluster)
        self.nodes: list[str] = []

    async def begin(self) -> None:
        self.nodes = list((await self.cluster.acquire(Request(self._given))).nodes)
        for node in self.nodes:
            await self.cluster.start(node, AgentCommand("unbroken.recover.node.agent", secret=TOKEN.encode()))
        await self.until(lambda: len(self.desk.links) == len(self.nodes))

    async def until(self, condition: Callable[[], object], within: float = 3600.0) -> None:
        deadline = self.loop.time() + within
        while not condition():
            assert self.loop.time() < deadline, "did not come true"
            await asyncio.sleep(0.1)


def simulate(
    act: Callable[[Scene], Coroutine[Any, Any, None]],
    script: Script | None = None,
    nodes: int = 4,
    given: int = 3,
) -> None:
    async def main(loop: SimulatedLoop) -> None:
        await act(Scene(loop, nodes, script, given=given))

    run_simulated(main)


def test_agents_say_what_their_node_is_and_how_far_their_clocks_are_off() -> None:
    async def act(s: Scene) -> None:
        s.faults.skew("node-00001", 600.0)
        await s.begin()
        for node in s.nodes:
            hello, real = s.desk.hellos[node], s.cluster.nodes[node]
            assert hello.host == node and len(hello.gpus) == NPROC and hello.addresses
            agent = real.agent
            assert agent is not None and 0 < hello.clock.uncertainty_s < 0.01
            said = hello.clock.translate(agent.monotonic())
            assert said.earliest <= s.loop.time() <= said.latest
            wall = hello.wall_clock.translate(agent.wall())
            assert wall.earliest <= s.loop.time() + s.cluster.wall_offset_s <= wall.latest
        assert s.desk.hellos["node-00001"].wall_clock.offset_s == pytest.approx(600, abs=0.01)

    simulate(act)


def test_ranks_step_together_save_and_end() -> None:
    async def act(s: Scene) -> None:
        await s.begin()
        await s.desk.launch(s.nodes)
        began = s.loop.time()
        await s.until(lambda: len(s.desk.of("exited")) == 6)
        assert all(s.desk.steps(n) == list(range(30)) for n in s.nodes)
        assert s.loop.time() - began == pytest.approx(20 + 30 * 5, abs=3)
        hosts = [m for m in s.desk.of("keeper") if m["event"] == "host"]
        saved = {(m["step"], rank) for m in hosts for rank in unpack(m["ranks"], "ranks", 99)}
        assert saved == {(step, rank) for step in (9, 19) for rank in range(6)}, "the last one ended too soon"
        assert {m["code"] for m in s.desk.of("exited")} == {0}
        assert await s.desk.held(s.nodes[1]) == {(s, r) for s in (9, 19) for r in range(4)}, (
            "its own, and copies for the node before it"
        )

    simulate(act, Script(steps=30, save_every=10))


def test_an_attempt_goes_on_from_its_first_candidate() -> None:
    async def act(s: Scene) -> None:
        await s.begin()
        await s.desk.launch(s.nodes, candidates=[{"attempt": 0, "step": 41, "name": None, "memory": {}}])
        await s.until(lambda: s.desk.steps(s.nodes[0])[:3] == [42, 43, 44])

    simulate(act)


def test_where_one_rank_hangs_all_stand_and_then_abort() -> None:
    async def act(s: Scene) -> None:
        await s.begin()
        await s.desk.launch(s.nodes)
        await s.until(lambda: len(s.desk.steps(s.nodes[0])) == 5)
        s.faults.hang_rank(s.nodes[1], 3)
        hung = s.loop.time()
        await asyncio.sleep(60)
        reached = s.desk.steps(s.nodes[0])
        groups = (await s.desk.links[s.nodes[1]].call("look", ranks=[[2, 2]]))["groups"]
        where = {runs[0][0]: frames[0] for runs, _, _, frames in groups}
        assert "all_reduce" in where[2] and "loop_forever" in where[3]
        await s.until(lambda: len(s.desk.of("exited")) == 5)
        assert s.desk.steps(s.nodes[0]) == reached
        assert s.loop.time() - hung == pytest.approx(600, abs=1)
        assert {m["rank"] for m in s.desk.of("exited")} == {0, 1, 2, 4, 5}
        await s.desk.links[s.nodes[1]].call("stop", attempt=1)
        assert [m["ours"] for m in s.desk.of("exited") if m["rank"] == 3] == [True]

    simulate(act)


def test_a_stop_is_taken_at_a_step() -> None:
    async def act(s: Scene) -> None:
        await s.begin()
        await s.desk.launch(s.nodes)
        await s.until(lambda: len(s.desk.steps(s.nodes[0])) == 3)
        answers = [await s.desk.links[n].call("stop_at", step=6) for n in s.nodes]
        assert all(a["told"] and a["furthest"] == 2 for a in answers)
        await s.until(lambda: len(s.desk.of("exited")) == 6)
        assert {m["code"] for m in s.desk.of("exited")} == {75} and s.desk.steps(s.nodes[0])[-1] == 6

    simulate(act)


@pytest.mark.parametrize(("to_supervisor", "to_node"), [(True, True), (True, False), (False, True)])
def test_a_cut_link_ends_the_ranks_when_the_lease_does(to_supervisor: bool, to_node: bool) -> None:
    async def act(s: Scene) -> None:
        await s.begin()
        await s.desk.launch(s.nodes)
        await s.until(lambda: len(s.desk.steps(s.nodes[0])) == 5)
        s.faults.cut(s.nodes[2], to_supervisor=to_supervisor, to_node=to_node)
        cut = s.loop.time()
        agent = s.cluster.nodes[s.nodes[2]].agent
        assert agent is not None
        await s.until(lambda: set(agent.ranks.values()) == {"ended"})
        assert LEASE_S - 2 < s.loop.time() - cut <= LEASE_S + 0.2
        heard = [m for m in s.desk.of("exited") if m["rank"] in (4, 5)]
        assert bool(heard) != to_supervisor, "a link that is cut one way still carries the other"
        s.faults.heal(s.nodes[2])
        await s.until(lambda: len([m for m in s.desk.of("exited", s.nodes[2]) if m["ours"]]) == 2)
        await asyncio.sleep(30)
        assert s.desk.steps(s.nodes[0]) == sorted(set(s.desk.steps(s.nodes[0])))

    simulate(act)


def test_a_crashed_agent_leaves_its_keeper_and_comes_again() -> None:
    async def act(s: Scene) -> None:
        await s.begin()
        await s.desk.launch(s.nodes)
        node = s.nodes[0]
        await s.until(lambda: s.cluster.nodes[node].snapshots)
        s.faults.crash_agent(node)
        exited = await s.watch.next(Exited, node)
        assert exited.signal == 9
        await s.until(lambda: s.desk.links[node].closed.is_set())
        before, hello = s.desk.links[node], s.desk.hellos[node]
        await s.cluster.start(node, AgentCommand("unbroken.recover.node.agent", secret=TOKEN.encode()))
        await s.until(lambda: s.desk.links[node] is not before)
        assert s.desk.first[node]["attempt"] == 0 and not s.desk.first[node]["ranks"]
        assert await s.desk.held(node) and s.desk.hellos[node].is_same_boot(hello)

    simulate(act, Script(save_every=2))


def test_a_lost_node_is_silent_and_returns_as_another_boot() -> None:
    async def act(s: Scene) -> None:
        await s.begin()
        await s.desk.launch(s.nodes)
        node = s.nodes[1]
        await s.until(lambda: s.cluster.nodes[node].snapshots)
        first, link, died = s.desk.hellos[node], s.desk.links[node], s.loop.time()
        s.faults.lose(node, noticed_after_s=80.0)
        await s.until(lambda: s.watch.all(Lost, node))
        (lost,) = s.watch.all(Lost, node)
        assert lost.at.earliest == died and lost.at.latest == pytest.approx(died + 80)
        assert not link.closed.is_set(), "nobody closed it"
        assert not s.watch.all(Exited, node)
        s.faults.return_node(node)
        await s.watch.next(Returned, node)
        await s.cluster.start(node, AgentCommand("unbroken.recover.node.agent", secret=TOKEN.encode()))
        await s.until(lambda: s.desk.links[node] is not link)
        assert not s.desk.hellos[node].is_same_boot(first)
        assert not await s.desk.held(node)

    simulate(act, Script(save_every=2))


def test_a_slow_node_keeps_nobody_else_waiting() -> None:
    async def act(s: Scene) -> None:
        s.faults.slow_start("node-00001", 300.0)
        began = s.loop.time()
        await s.begin()
        assert s.loop.time() - began >= 300
        started = {e.node: e.at.latest - began for e in s.watch.all(Started)}
        assert started["node-00000"] < 1 and started["node-00002"] < 1

    simulate(act)


def test_agents_go_on_without_a_supervisor_and_tell_its_successor_what_it_missed() -> None:
    async def act(s: Scene) -> None:
        await s.begin()
        await s.desk.launch(s.nodes)
        await s.until(lambda: len(s.desk.steps(s.nodes[0])) == 5)
        s.faults.kill_supervisor()
        await asyncio.sleep(3)
        s.faults.fail_rank(s.nodes[2], 5, code=1)
        await asyncio.sleep(3)
        later = Desk(s.cluster, term=2)
        await s.until(lambda: len(later.links) == 3, within=5)
        assert all(m["attempt"] == 1 and m["leased"] for m in later.first.values())
        running = {int(r): d["running"] for m in later.first.values() for r, d in m["ranks"].items()}
        assert running == {0: True, 1: True, 2: True, 3: True, 4: True, 5: False}
        await s.until(lambda: later.of("exited"))
        assert later.of("exited")[0]["rank"] == 5 and later.of("exited")[0]["code"] == 1
        assert not s.watch.all(Exited)

    simulate(act)


def test_a_supervisor_that_does_not_know_the_token_is_told_nothing() -> None:
    async def act(s: Scene) -> None:
        (node,) = (await s.cluster.acquire(Request(1))).nodes
        await s.cluster.start(node, AgentCommand("unbroken.recover.node.agent", secret=b"another token"))
        await asyncio.sleep(60)
        assert not s.desk.links and not s.desk.news

    simulate(act, given=1)


def test_who_failed_first_is_told_by_offsets_where_clocks_lie() -> None:
    """The host of rank 0 is ten minutes ahead, and rank 0 fails first: by the times of day it is the last."""

    async def act(s: Scene) -> None:
        s.faults.skew("node-00000", 600.0)
        await s.begin()
        await s.desk.launch(s.nodes)
        await asyncio.sleep(30)
        s.faults.fail_rank(s.nodes[0], 0)
        await asyncio.sleep(1)
        s.faults.fail_rank(s.nodes[1], 2)
        await s.until(lambda: len(s.desk.of("exited")) == 2)
        ends = [(n, m) for _, n, m in s.desk.news if m["op"] == "exited"]
        assert min(ends, key=lambda e: e[1]["time"])[1]["rank"] == 2, "a lie"
        by_wall = {m["rank"]: s.desk.hellos[n].wall_clock.translate(m["time"]) for n, m in ends}
        by_boot = {m["rank"]: s.desk.hellos[n].clock.translate(m["at"][0]) for n, m in ends}
        assert find_first(by_wall) == find_first(by_boot) == (0,)

    simulate(act)


def test_the_same_run_gives_the_same_messages() -> None:
    def once() -> list[tuple[float, str, Message]]:
        seen: list[tuple[float, str, Message]] = []

        async def act(s: Scene) -> None:
            await s.begin()
            await s.desk.launch(s.nodes)
            await asyncio.sleep(40)
            s.faults.cut(s.nodes[1])
            await asyncio.sleep(20)
            s.faults.heal(s.nodes[1])
            await asyncio.sleep(20)
            seen.extend(s.desk.news)

        simulate(act, Script(save_every=3))
        return seen

    first = once()
    assert len(first) > 20 and once() == first


def test_a_loop_in_which_nothing_can_happen_says_so() -> None:
    async def main(loop: SimulatedLoop) -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Stuck, match="nothing is due, and 1 tasks wait"):
        run_simulated(main)


def test_threads_and_timers_of_days_take_no_time() -> None:
    async def main(loop: SimulatedLoop) -> float:
        assert await asyncio.to_thread(lambda: 41 + 1) == 42
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        order: list[str] = []
        loop.call_later(2.0, order.append, "later")
        loop.call_later(1.0, order.append, "sooner")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(loop.create_future(), 90 * 86400)
        assert order == ["sooner", "later"]
        return loop.time()

    began = time.monotonic()
    assert run_simulated(main, start=5.0) == 5.0 + 90 * 86400
    assert time.monotonic() - began < 5


def test_the_example_of_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "cluster.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(example, "docs/cluster.md", "exec"), {})
    assert capsys.readouterr().out == "(Moment(earliest=0.0, latest=80.0), 80.0)\n"


def test_a_journal_in_memory_can_be_full() -> None:
    now = [7.0]
    journal = MemoryJournal(lambda: now[0], term=3)
    assert journal.append("run", nodes=2) == {"kind": "run", "t": 7.0, "n": 1, "epoch": 3, "nodes": 2}
    journal.refuses = True
    with pytest.raises(OSError, match="space"):
        journal.append("ended")
    journal.refuses = False
    assert journal.append("ended")["n"] == 2 and [r["kind"] for r in journal.records] == ["run", "ended"]
    assert len(journal.of("ended")) == 1


def test_hundreds_of_nodes_are_greeted_in_one_process() -> None:
    """What the network counts is what the link has written: bytes grow with the nodes, and with nothing else."""
    sizes: dict[int, int] = {}

    async def act(s: Scene) -> None:
        await s.begin()
        sizes[len(s.nodes)] = s.cluster.network.to_supervisor.size
        assert s.loop.time() < 5 and len(s.desk.hellos) == len(s.nodes)

    for n in (20, 200):
        simulate(act, nodes=n, given=n)
    assert 9 < sizes[200] / sizes[20] < 11
