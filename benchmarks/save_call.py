"""What the call of `save` takes on the processor for many sharded tensors: FSDP2, tiny ones, so that copying is nothing.

    torchrun --nproc-per-node 2 benchmarks/save_call.py [--layers 24] [--saves 100]

On a GPU this is time in which it may have nothing to do. Prints the median and the least of rank 0.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))


class Block(nn.Module):
    """Six parameters."""

    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.c, self.e = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)
        self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.e(self.c(self.n2(self.b(self.a(self.n1(x))[..., : x.shape[-1]]))))


def main() -> None:
    from unbroken import Checkpointer

    p = argparse.ArgumentParser()
    p.add_argument("--layers", type=int, default=24)
    p.add_argument("--saves", type=int, default=100)
    a = p.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = nn.Sequential(*[Block() for _ in range(a.layers)])
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    shared = [tempfile.mkdtemp(prefix="unbroken-save-call-")] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(shared)
    checkpoints = Checkpointer(shared[0], snapshot_every=1, persist_every=10**9, memory="512MiB")
    took = []
    for step in range(1, a.saves + 6):
        model(torch.randn(2, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        began = time.perf_counter()
        checkpoints.save(step, {"model": model, "optimizer": optimizer})
        took.append(time.perf_counter() - began)
    checkpoints.close()
    if dist.get_rank() == 0:
        shutil.rmtree(shared[0], ignore_errors=True)
        tensors = 3 * len(list(model.parameters()))
        print(
            f"{tensors} sharded tensors: median {1e3 * statistics.median(took[5:]):.1f} ms, least {1e3 * min(took[5:]):.1f} ms"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
