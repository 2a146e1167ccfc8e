"""Real ranks: 2, then 3, with a skip and two epochs; each step is given the samples of the undisturbed run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from unbroken.data import wrap

ROOT = Path(__file__).resolve().parents[2]
BATCH, SIZE = 24, 230
SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
import unbroken.data

folder, stop, skip = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
torch.set_num_threads(1)
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.AdamW(model.parameters())
loader = unbroken.data.wrap(DataLoader(range(230), batch_size=24 // world, shuffle=True, num_workers=1))
checkpoints = unbroken.Checkpointer(folder + "/checkpoints", snapshot_every=2, persist_every=2)
state = {"model": model, "optimizer": optimizer, "loader": loader}
restored = checkpoints.restore(state)
if skip:
    loader.skip(*skip)
log = open(f"{folder}/stop-{stop:03d}-rank-{rank}", "w")
for epoch in loader.epochs(2):
    for batch in loader:
        loss = model(batch[:, None].float()).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps([loader.step, batch.tolist()]), file=log, flush=True)
        if checkpoints.due(loader.step):
            checkpoints.save(loader.step, state)
        if loader.step == stop:
            checkpoints.close()
            dist.barrier()
            os._exit(0)
checkpoints.close()
dist.destroy_process_group()
"""


def launch(tmp_path: Path, ranks: int, stop: int, skip: list[int]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(script),
            str(tmp_path), str(stop), json.dumps(skip),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.integration
def test_two_then_three_ranks_go_through_the_data_as_one_would(tmp_path: Path) -> None:
    launch(tmp_path, 2, 5, [])  # step 4 is saved, step 5 is made again
    launch(tmp_path, 3, 999, [150, 170])
    found: dict[int, list[int]] = {}
    for stop in (5, 999):
        of: dict[int, list[int]] = {}
        for path in sorted(tmp_path.glob(f"stop-{stop:03d}-rank-*")):
            for line in path.read_text().splitlines():
                step, batch = json.loads(line)
                of.setdefault(step, []).extend(batch)
        found.update(of)
    loader: Any = wrap(DataLoader(range(SIZE), batch_size=BATCH, shuffle=True))  # type: ignore[arg-type]
    loader.skip(150, 170)
    expected: dict[int, list[int]] = {}
    for _ in loader.epochs(2):
        for batch in loader:
            expected[loader.step] = batch.tolist()
    assert sorted(found) == sorted(expected)
    ends = {step for step, batch in expected.items() if len(batch) < BATCH}
    for step, batch in expected.items():
        if step in ends:  # filled up for the ranks to have equally many
            assert set(batch) <= set(found[step]) and len(found[step]) < len(batch) + 3
        else:
            assert found[step] == batch, step
