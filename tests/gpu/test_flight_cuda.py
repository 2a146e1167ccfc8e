"""A rank that hangs writes what its NCCL has done, because the agent asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from unbroken.diagnose.read.flight_recorder import analyse  # noqa: E402
from unbroken.progress import RunDir  # noqa: E402

pytestmark = pytest.mark.gpu
HANGS = """
import os, time, torch, torch.distributed as dist, unbroken
run = unbroken.attach(total_steps=5)
if run.attempt > 1:
    raise SystemExit
torch.cuda.set_device(0)
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
value = torch.ones(8, device="cuda")
for step in range(1, 6):
    dist.all_reduce(value)
    torch.cuda.synchronize()
    run.step(step, loss=1.0)
while True:
    time.sleep(1)
"""


def test_a_hanging_rank_writes_what_its_nccl_has_done(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HANGS)
    folder = tmp_path / "run"
    words = [
        "--run-dir",
        str(folder),
        "--nproc",
        "1",
        "--suspect-after",
        "2s",
        "--hang-after",
        "25s",  # a dump takes two seconds, on a busy machine more than six were seen
        "--no-warm",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "unbroken", "run", *words, "--", "train.py"],
        cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    dumps = RunDir(folder).flights(1)
    assert dumps, done.stdout[-2000:] + done.stderr[-2000:]
    flight = analyse(dumps)
    assert flight.ranks == (0,) and not flight.notes and max(flight.last.values()) >= 5
