"""The fake cluster keeps the contract, in simulated time."""

from __future__ import annotations

import asyncio
import time
from types import MappingProxyType

import pytest

from unbroken.cluster.contract import AgentCommand, Cluster
from unbroken.testing.fake_cluster import FakeCluster, FakeHardware, Faults, run_simulated

from .contract import Bench, ClusterContract, Scenario, eventually


class FakeBench(Bench):
    impossible = MappingProxyType({})

    def __init__(self) -> None:
        self.hardware: FakeHardware
        self.cluster: FakeCluster
        self.faults: Faults

    def run(self, scenario: Scenario) -> None:
        async def main(loop: asyncio.AbstractEventLoop) -> None:
            self.hardware = FakeHardware(loop, 6)
            self.cluster = FakeCluster("run-1", self.hardware)
            self.faults = Faults(self.cluster)
            await scenario()

        run_simulated(main)

    def wall(self) -> float:
        return self.cluster.loop.time() + self.cluster.wall_offset_s

    def open(self) -> Cluster:
        return FakeCluster("run-1", self.hardware)

    def command(self) -> AgentCommand:
        return AgentCommand("unbroken.recover.node.agent", ("--run-id", "run-1"))

    async def seen_by(self, node: str) -> AgentCommand:
        await eventually(lambda: self.hardware.nodes[node].agent)
        agent = self.hardware.nodes[node].agent
        assert agent is not None
        return agent.command

    def end(self, node: str, code: int) -> None:
        agent = self.hardware.nodes[node].agent
        assert agent is not None
        self.cluster.agent_ended(agent, code, None)

    def kill(self, node: str) -> None:
        self.faults.crash_agent(node)

    def left(self, node: str) -> bool:
        found = self.hardware.nodes[node]
        return found.agent is not None or bool(found.snapshots)

    def hold(self) -> None:
        self.faults.hold("Resources")

    def grant(self) -> None:
        self.faults.grant()

    def lose(self, node: str) -> None:
        self.faults.lose(node, noticed_after_s=3.0)

    def isolate(self, node: str) -> None:
        self.faults.isolate(node)

    def return_node(self, node: str) -> None:
        self.faults.return_node(node)

    def preempt(self, node: str, in_s: float) -> None:
        self.faults.preempt(node, in_s)

    def end_allocation(self, in_s: float) -> None:
        self.faults.end_allocation(in_s)


class TestFakeCluster(ClusterContract):
    @pytest.fixture
    def bench(self) -> FakeBench:
        return FakeBench()


def test_hours_of_waiting_take_no_time() -> None:
    bench = FakeBench()

    async def scenario() -> None:
        from unbroken.cluster.contract import Request

        cluster = bench.open()
        bench.faults.hold("Priority")
        bench.cluster.loop.call_later(7 * 3600, bench.faults.grant)
        assert len((await cluster.acquire(Request(2))).nodes) == 2
        assert bench.cluster.loop.time() == 7 * 3600

    began = time.monotonic()
    bench.run(scenario)
    assert time.monotonic() - began < 5
