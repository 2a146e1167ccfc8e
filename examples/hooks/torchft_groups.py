"""torchft with two lines of ours (marked +): when all replica groups are gone, each goes on from its own checkpoint.

torchft_lighthouse --min_replicas 2 --bind 0.0.0.0:29510 &
for g in 0 1; do
  TORCHFT_LIGHTHOUSE=http://localhost:29510 REPLICA_GROUP=$g torchrun --standalone --nproc-per-node 1 \
    examples/hooks/torchft_groups.py --out runs/group-$g &
done
"""

import argparse
import os
from datetime import timedelta

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

from unbroken.hooks.torchft import attach  # +


class Noisy(Dataset):
    """Points on noise: sample i is another one each time that it is asked for."""

    def __init__(self, samples: int = 88) -> None:
        self.x = torch.randn(samples, 16, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[i] + 0.1 * torch.randn(16), (self.x[i].sum() > 0).long()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--steps", type=int, default=28)
    options = parser.parse_args()
    group, groups = int(os.environ.get("REPLICA_GROUP", "0")), 2
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 2))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": inner}
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)), min_replica_size=groups, replica_id=f"group-{group}",
        load_state_dict=lambda saved: [state[name].load_state_dict(saved[name]) for name in state],
        state_dict=lambda: {name: state[name].state_dict() for name in state}, use_async_quorum=False,
    )  # fmt: skip
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    sampler = DistributedSampler(
        Noisy(), replica_rank=group, num_replica_groups=groups, group_rank=0, num_replicas=1, shuffle=True
    )
    loader = DataLoader(Noisy(), batch_size=4, sampler=sampler, num_workers=2)
    loader = attach(manager, loader, state, options.out, snapshot_every=2)  # +

    while manager.current_step() < options.steps:
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(x), y)
            loss.backward()
            optimizer.step()
            print(f"rank {group} step {manager.current_step()} loss {loss.item().hex()}", flush=True)
            if manager.current_step() >= options.steps:
                break
    manager.shutdown()


if __name__ == "__main__":
    main()
