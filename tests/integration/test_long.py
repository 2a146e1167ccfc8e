"""What takes minutes: the demo's story for seeds 1 to 5, a soak of random kills, a disk that fills up meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.soak import soak
from unbroken.progress import RunDir
from unbroken.testing.scenario import ScenarioSize

from .conftest import RunUnderTest

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("seed", "nproc"), [(1, 1), *(pytest.param(seed, 2, marks=pytest.mark.soak) for seed in (1, 2, 3, 4, 5))]
)
def test_story_holds(seed: int, nproc: int, tmp_path: Path) -> None:
    """Bit-identical losses, batches and state on every rank; each fault noticed, named and fixed in time."""
    out = subprocess.run(
        [sys.executable, "-m", "unbroken", "demo", "--dir", str(tmp_path / "demo"), "--seed", str(seed),
         "--nproc", str(nproc), "--steps", "160" if nproc > 1 else "240", "--json"],  # fewer ranks make steps faster
        capture_output=True, text=True, timeout=380, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert out.stdout, out.stderr[-3000:]
    story = json.loads(out.stdout.splitlines()[0])
    assert out.returncode == 0 and story["problems"] == [], story["problems"]
    assert story["identical"] and story["final_loss"] == story["reference_loss"]
    assert story["script_bug"]["attempts"] == 1 and story["script_bug"]["verdict"]["reason"] == "KeyError"
    for incident in story["incidents"]:
        most = {"kill_rank": 5, "stop_rank": 5, "kill_node": 40, "kill_supervisor": 0}[incident["kind"]]
        assert incident["steps_lost"] <= most, incident
        if incident["kind"] in ("kill_rank", "kill_node"):
            # What a busy machine makes of the script's own start is no matter of ours.
            assert incident["own_s"] <= story["cold_start_s"], (incident, story["cold_start_s"])
    assert Path(story["report"]).stat().st_size < 5_000_000


@pytest.mark.timeout(900)
def test_soak_of_random_kills(tmp_path: Path) -> None:
    shape = ScenarioSize(steps=120, nodes=2, nproc=1, spares=0, hang_after="30s")
    result = soak(tmp_path / "soak", 5, 7, shape)
    assert result.problems == []
    assert sum(result.kills.values()) == 5
    assert result.announced > 0 and result.verified > 0


@pytest.mark.timeout(300)
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_disk_that_fills_up_does_not_end_the_run(tmp_path: Path, eventually: Callable[..., None]) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", str(small)], check=False)
    if mounted.returncode:
        pytest.skip("this machine does not let us mount a small file system")
    run = RunUnderTest(
        tmp_path,
        ["-m", "unbroken.train", "--steps", "240", "--persist-every", "10"],
        ["--nodes", "2", "--nproc", "1"],
    )
    run.run_dir = RunDir(small / "run")
    try:
        run.start()
        run.until_step(25)
        eventually(lambda: run.journal("durable"), within=60)
        filler = small / "filler"
        # Without a buffer: what is left in one is refused again as the file is closed.
        with open(filler, "wb", buffering=0) as f:
            try:
                while True:
                    f.write(b"x" * 65536)
            except OSError:
                pass
        reached = run.faults.step()[1]
        run.until_step(reached + 30, within=120)  # a whole disk interval and more: training goes on
        filler.unlink()
        freed = time.time()
        assert run.wait(200) == 0, run.output
        assert run.attempts() == 1 and run.incidents() == []
        assert any(r["t"] > freed for r in run.journal("durable"))
    finally:
        run.end()
        subprocess.run(["umount", "-l", str(small)], check=False)
