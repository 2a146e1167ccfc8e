"""A slow rank of a fake cluster is named by the supervisor's real loop, and its node is left when that is worth it."""

from __future__ import annotations

import pytest

from unbroken.testing.fake_cluster import Script
from unbroken.testing.fake_cluster.simulated_run import SimulatedRun

from .simulating import Simulate, reach

pytestmark = pytest.mark.slow
WORKS = Script(start_s=20, step_s=1, save_every=10, work_s=0.7)


def test_one_rank_a_tenth_slower_of_64_is_named_and_its_node_left(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 50)
        run.faults.slow_rank("node-00005", 11, 1.1)
        since = run.step()
        await run.until(lambda: run.journal("slow"))
        (said,) = run.journal("slow")
        assert said["nodes"] == ["node-00005"] and said["ranks"] == [11]
        assert said["step"] - since <= 100
        # 0.07 s a step against a start of about 25 s.
        await run.until(lambda: run.journal("resumed"))
        (incident,) = run.incidents()
        assert incident["kind"] == "slow" and "has cost" in incident["verdict"]["root"]["text"]
        assert 300 < incident["step"] < 700
        assert "node-00005" not in run.journal("attempt")[1]["slots"]
        assert len(run.journal("slow")) == 1

    simulate(act, 32, spares=1, script=WORKS)


@pytest.mark.parametrize("spares", [0, 1])
def test_without_a_slow_rank_nobody_is_named_or_left(simulate: Simulate, spares: int) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 1500)
        assert not run.journal("slow") and len(run.journal("attempt")) == 1
        if not spares:
            run.faults.slow_rank("node-00001", 2, 1.3)
            await reach(run, 1, 1900)
            # Named, and kept: nobody could take its place.
            assert run.journal("slow")[0]["ranks"] == [2] and not run.incidents()

    simulate(act, 4, spares=spares, script=WORKS)
