"""A parameter that one rank alone uses: gradients of all units travel in the same order on every rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, os, sys
from pathlib import Path
from types import SimpleNamespace
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from unbroken.train.parallel.zero.units import Zero

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
axes = ("pipeline", "replicate", "optimizer", "gradients", "shard", "tensor")
mesh = init_device_mesh("cpu", (1, 1, 2, 1, 1, 1), mesh_dim_names=axes)
layout = SimpleNamespace(storage=(1, 1, 2, 1, 1, 1), tensor=1)
mine = SimpleNamespace(
    here=SimpleNamespace(optimizer=rank, gradients=0), layout=layout, group=mesh.get_group, device=torch.device("cpu"), shard=mesh["shard"]
)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))

    def forward(self, x, both):
        return x @ self.a + (x @ self.b if both else 0)

blocks = [Block() for _ in range(3)]
names = {p: f"{i}.{n}" for i, b in enumerate(blocks) for n, p in b.named_parameters()}
zero = Zero([(b,) for b in blocks], names, mine, torch.float32)
zero.hook()
zero.expect(True, True)
x = torch.ones(1, 4)
for i, b in enumerate(blocks):
    x = b(x, both=i != 2 or rank == 0) * (i + 1)
x.sum().backward()
zero.finish()
rows = [[g.flatten()[0].item() for g in u.reduced()] for u in zero.units]
(folder / f"rank-{rank}.json").write_text(json.dumps(rows))
"""


@pytest.mark.slow
def test_units_travel_in_one_order_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ranks = [
        subprocess.Popen([sys.executable, "script.py", str(r), str(tmp_path)], cwd=tmp_path) for r in (0, 1)
    ]
    assert [p.wait(100) for p in ranks] == [0, 0]
    found = [json.loads((tmp_path / f"rank-{r}.json").read_text()) for r in (0, 1)]
    # Summed over both ranks, by hand: each block sends on twice (or, where one matrix is not used, once) the sum of what it gets,
    # times its place; the last block's second matrix has rank 0's gradient alone.
    assert found[0] == found[1] == [[576.0, 576.0], [576.0, 576.0], [768.0, 384.0]]
