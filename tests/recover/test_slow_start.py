"""Agents that take long to come: a busy machine, a busy file system."""

from __future__ import annotations

from pathlib import Path

import pytest

from unbroken.testing.fake_cluster.simulated_run import SimulatedRun

from .simulating import Simulate, reach, simulate_in


@pytest.fixture
def simulate(tmp_path: Path) -> Simulate:
    return simulate_in(tmp_path)


def slow_down(run: SimulatedRun, seconds: float, *names: str) -> None:
    for node in run.hardware.nodes.values():
        if not names or node.name in names:
            node.start_s = seconds


def test_agents_that_take_minutes_are_waited_for_and_started_once(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        slow_down(run, 200)
        began = run.loop.time()
        await reach(run, 1, 1)
        assert run.loop.time() < began + 260
        assert not run.journal("lost")
        assert any("has not come within 30 s" in line for line in run.screen.lines)

    simulate(act, 4)


def test_a_slow_one_is_not_waited_for_where_a_spare_is_there(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        slow_down(run, 200, "node-00001")
        began = run.loop.time()
        await reach(run, 1, 1)
        assert run.loop.time() < began + 30 + 40
        assert run.journal("attempt")[0]["slots"] == ["node-00000", "node-00002"]

    simulate(act, 2, spares=1)


def test_a_stop_is_not_held_up_by_agents_that_do_not_come(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        slow_down(run, 1000)
        began = run.loop.time()
        await run.until(lambda: run.loop.time() > began + 40)
        run.supervisor.request_stop()
        await run.until(run.task.done, 60)

    simulate(act, 2)
