"""Virtual nodes on this machine keep the contract, with real processes, in each way of holding them."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from unbroken.cluster import Kind
from unbroken.cluster.contract import AgentCommand, Cluster, Exited, Lost, Request, Returned
from unbroken.cluster.holding.cgroups import Cgroups
from unbroken.cluster.holding.choice import choose
from unbroken.cluster.holding.processes import end, marked
from unbroken.cluster.local_events import LocalCluster, LocalOptions

from .contract import Bench, ClusterContract, Watch, eventually

REPO = Path(__file__).resolve().parents[2]


class LocalBench(Bench):
    def __init__(self, folder: Path, kind: Kind | None) -> None:
        self.folder, self.kind = folder, kind
        self.run_id = f"test{secrets.token_hex(6)}"
        # A small parent reaps the agent: that it ended is known, how is not.
        chosen = kind or choose(self.run_id, folder)[0].kind
        self.tells_how_it_ended = chosen is not Kind.PARENT

    def wall(self) -> float:
        return time.time()

    def open(self) -> Cluster:
        return LocalCluster(
            self.run_id, LocalOptions(self.kind or "auto"), log_of=lambda n: self.folder / f"{n}.log"
        )

    def command(self) -> AgentCommand:
        environment = {"PYTHONPATH": str(REPO)}
        return AgentCommand("tests.cluster.agent_program", ("--folder", str(self.folder)), environment)

    def _report(self, node: str) -> dict[str, object]:
        report: dict[str, object] = json.loads((self.folder / f"{node}.report").read_text())
        return report

    async def seen_by(self, node: str) -> AgentCommand:
        def is_there() -> bool:
            agents = {p.pid for p in marked(self.run_id, node=node) if p.role == "agent"}
            return (self.folder / f"{node}.report").exists() and self._report(node)["pid"] in agents

        await eventually(is_there)
        r = self._report(node)
        assert r["cwd"] == "/", "nothing may rest on where the supervisor stands"
        return AgentCommand("", tuple(r["arguments"]), r["environment"], str(r["secret"]).encode())  # type: ignore[arg-type]

    def end(self, node: str, code: int) -> None:
        (self.folder / f"{node}.exit").write_text(str(code))

    def kill(self, node: str) -> None:
        pid = self._report(node)["pid"]
        assert isinstance(pid, int)
        os.kill(pid, signal.SIGKILL)

    def left(self, node: str) -> bool:
        return bool(marked(self.run_id, node=node))


def hold_by(kind: Kind | None, tmp_path: Path) -> Iterator[LocalBench]:
    """A bench whose processes are held that way, by default the surest that works here; nothing is left of it."""
    if kind is Kind.CGROUP and (why := Cgroups.find(f"test{secrets.token_hex(6)}")[1]):
        pytest.skip(f"this machine cannot hold processes by a cgroup: {why}")
    bench = LocalBench(tmp_path, kind)
    yield bench
    cluster = bench.open()
    assert isinstance(cluster, LocalCluster)
    for node in {*cluster.owner.nodes(), *(p.node for p in marked(bench.run_id))}:
        cluster.end_node(node, 10.0)
    assert end(lambda: marked(bench.run_id)) == []
    cluster._write(given=[], cordons={})
    assert not cluster._root.exists() and Cgroups.left_by(bench.run_id) == []


class TestLocalCluster(ClusterContract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[LocalBench]:
        yield from hold_by(None, tmp_path)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalBench]:
    yield from hold_by(None, tmp_path)


def test_a_node_of_which_nothing_is_left_is_lost_and_can_be_used_again(local: LocalBench) -> None:
    """kill -9 of agent and keeper: the memory is gone with them, and that is proven; the machine is there."""

    async def scenario() -> None:
        cluster = local.open()
        one, two = (await cluster.acquire(Request(2))).nodes
        watch = Watch(cluster)
        for node in (one, two):
            await cluster.start(node, local.command())
            await local.seen_by(node)
        for pid in (local._report(one)["pid"], local._report(one)["child"], local._report(two)["pid"]):
            os.kill(pid, signal.SIGKILL)  # type: ignore[arg-type]
        lost = await watch.next(Lost, one)
        exited = watch.all(Exited, one)[0]
        assert lost.proven and not lost.at.is_before(exited.at)
        await watch.next(Returned, one)
        await cluster.start(one, local.command())
        await watch.next(Exited, two)
        fenced = await cluster.fence(one, 10.0)
        assert fenced.proven
        await asyncio.sleep(0.6)
        assert len(watch.all(Lost)) == 1, "neither an agent alone nor a fence is a lost node"

    local.run(scenario)


@pytest.mark.slow
class TestHeldByCgroup(ClusterContract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[LocalBench]:
        yield from hold_by(Kind.CGROUP, tmp_path)


@pytest.mark.slow
class TestHeldByParent(ClusterContract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[LocalBench]:
        yield from hold_by(Kind.PARENT, tmp_path)
