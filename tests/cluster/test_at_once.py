"""What is done to many nodes is done to many at a time."""

from __future__ import annotations

import asyncio

import pytest

from unbroken.cluster.at_once import fence_all, for_each
from unbroken.cluster.contract import Fenced, Request
from unbroken.testing.fake_cluster import FakeCluster, FakeHardware, SimulatedLoop, run_simulated


def test_so_many_at_a_time_and_in_their_order() -> None:
    running, most = 0, 0

    async def work(name: str) -> str:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0.001 * (8 - int(name)))
        running -= 1
        return name * 2

    found = asyncio.run(for_each([str(i) for i in range(8)], work, 3))
    assert list(found.items()) == [(str(i), str(i) * 2) for i in range(8)] and most == 3


def test_one_that_is_not_proven_keeps_nobody_else() -> None:
    async def fence(name: str, _: float) -> Fenced:
        return Fenced(name != "b", "it is silent")

    proven, error = asyncio.run(fence_all(fence, ["a", "b", "c"]))
    assert proven == ["a", "c"] and error is not None and error.where == "b"


def test_many_nodes_are_given_back_in_the_time_of_a_few() -> None:
    async def story(loop: SimulatedLoop) -> float:
        cluster = FakeCluster("r", FakeHardware(loop, 320), fence_s=0.2)
        nodes = (await cluster.acquire(Request(320, 0, 8))).nodes
        began = loop.time()
        await cluster.give_back(nodes)
        return loop.time() - began

    assert run_simulated(story) == pytest.approx(2.0)
