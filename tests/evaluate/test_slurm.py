"""Workers that join from Slurm jobs: on a real Slurm of four virtual nodes, with a job cancelled in the middle."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .evaluating import coordinator, fake_suite, fake_task

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(300)]
PORT = 16817


@pytest.fixture
def slurm(tmp_path: Path, shared_data: Path) -> Iterator[dict[str, str]]:
    bed = shared_data.parent / "testbeds" / "slurm"
    if (
        not bed.is_dir()
        or not all(shutil.which(c) for c in ("slurmctld", "slurmd", "munged", "srun"))
        or os.getuid() != 0
    ):
        pytest.skip("Slurm's daemons, root and the testbed are needed")
    with socket.socket() as s:
        if s.connect_ex(("127.0.0.1", PORT)) == 0:
            pytest.skip("another Slurm testbed runs on this machine")
    place = Path("/tmp") / f"unbroken-slurm-{os.getpid()}"  # munged wants a path that all may enter
    place.mkdir()
    up = subprocess.run(["bash", str(bed / "up.sh"), str(place)], capture_output=True, text=True, check=False)
    if up.returncode:
        subprocess.run(["bash", str(bed / "down.sh"), str(place)], check=False)
        pytest.skip(f"Slurm does not start here: {up.stderr[-300:]}")
    yield {**os.environ, "SLURM_CONF": str(place / "slurm.conf")}
    subprocess.run(["bash", str(bed / "down.sh"), str(place)], check=False)
    shutil.rmtree(place, ignore_errors=True)


def test_jobs_join_one_is_cancelled_another_comes(
    tmp_path: Path, slurm: dict[str, str], eventually: Callable[..., None]
) -> None:
    suite = fake_suite(fake_task("a", samples=160, seconds=0.05))
    c = coordinator(tmp_path, suite, workers=0, wait_for_workers_s=120.0)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(c.run()))
    thread.start()
    eventually((tmp_path / "out" / "cluster.json").exists, within=30)
    join = f"{sys.executable} -m unbroken eval join {tmp_path / 'out'} --wait 60"

    def submit(name: str) -> str:
        out = subprocess.run(["sbatch", "--parsable", "-J", name, "-N1", "-n1", "-o", str(tmp_path / f"{name}.log"), "--export=ALL", "--wrap", join],
                             capture_output=True, text=True, env=slurm, check=True)  # fmt: skip
        return out.stdout.strip()

    first = submit("first")
    eventually(lambda: len(c.observed.blocks) >= 2, within=90)
    second = submit("second")
    eventually(lambda: len(c.links) >= 2, within=90)
    subprocess.run(["scancel", "--signal=KILL", "--full", first], env=slurm, check=True)
    thread.join(150)
    report = found[0]
    assert report.scores[0].scored == 160  # type: ignore[attr-defined]
    assert len(report.workers) >= 2 and second  # type: ignore[attr-defined]
    assert sorted(b for t in report.trials for b in t.blocks) == list(range(20))  # type: ignore[attr-defined]
