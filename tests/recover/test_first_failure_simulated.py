"""Whole runs on two hosts whose clocks differ by minutes: the rank that failed first is named where that can be known."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from unbroken.progress import Timeouts
from unbroken.testing.fake_cluster import Script, SimulatedLoop, run_simulated
from unbroken.testing.fake_cluster.simulated_run import SimulatedRun


def fail_both(folder: Path, apart_s: float, skew_s: float, *, after_takeover: bool = False) -> dict[str, Any]:
    """Rank 2, on the second node, fails first, and rank 0 so much later; the incident."""

    async def main(loop: SimulatedLoop) -> dict[str, Any]:
        run = SimulatedRun(
            loop, folder, 2, nproc=2, script=Script(start_s=20, step_s=5, save_every=4),
            timeouts=Timeouts(suspect=30, hang=60, lease=15),  # type: ignore[arg-type]
        )  # fmt: skip
        run.faults.skew("node-00000", -skew_s)
        await run.until(lambda: run.step() >= 9)
        if after_takeover:
            run.kill_supervisor()
        run.faults.fail_rank("node-00001", 2, code=3)
        if apart_s:
            await asyncio.sleep(apart_s)
        run.faults.fail_rank("node-00000", 0, code=4)
        if after_takeover:
            run.restart_supervisor()
        await run.until(lambda: run.journal("resumed"))
        run.supervisor.request_stop()
        await run.until(run.task.done, 600)
        assert len(run.incidents()) == 1 + after_takeover
        return run.incidents()[-1]

    return run_simulated(main)


@pytest.mark.parametrize(
    ("skew_s", "after_takeover"),
    [
        (600.0, False),
        *(
            pytest.param(skew, late, marks=pytest.mark.slow)
            for skew, late in [(-600.0, False), (0.0, False), (600.0, True), (-600.0, True), (0.0, True)]
        ),
    ],
)
def test_the_rank_that_failed_first_is_named_whatever_the_clocks_say(
    tmp_path: Path, skew_s: float, after_takeover: bool
) -> None:
    incident = fail_both(tmp_path / "run", 0.08, skew_s, after_takeover=after_takeover)
    verdict = incident["verdict"]
    assert verdict["faulty"]["rank"] == verdict["root"]["rank"] == 2
    assert "rank 2 on node-00001 ended by exit code 3" in verdict["root"]["text"]
    assert abs(incident["detected"] - incident["last_sign"]) < 30, "no ten minutes of a clock's error"


def test_where_nobody_can_know_both_are_named(tmp_path: Path) -> None:
    verdict = fail_both(tmp_path / "run", 0.0, 600.0)["verdict"]
    assert verdict["faulty"] is None and verdict["confidence"] <= 0.5
    for words in ("rank 0 on node-00000 ended by exit code 4", "rank 2 on node-00001 ended by exit code 3"):
        assert words in verdict["root"]["text"]
