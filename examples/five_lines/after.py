"""The script of before.py with five added lines: it survives failures and loses next to nothing.

unbroken run --nodes 2 --spares 1 -- examples/five_lines/after.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unbroken


def batch(step: int, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The data of a step: a function of step and rank alone."""
    g = torch.Generator().manual_seed(1_000_003 * step + rank)
    x = torch.randn(64, 32, generator=g)
    return x.to(device), (x[:, :16].sum(1) > x[:, 16:].sum(1)).long().to(device)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", help="file for the trained state")
    args = parser.parse_args()
    steps = args.steps
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= world
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 2)).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    first = 1
    checkpoints = unbroken.Checkpointer(snapshot_every=5, persist_every=20)
    first = getattr(checkpoints.restore(state), "step", 0) + 1

    for step in range(first, steps + 1):
        x, y = batch(step, rank, device)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
        unbroken.attach(total_steps=steps).step(step, loss=loss.item())
        checkpoints.due(step) and checkpoints.save(step, state)

    total = sum(p.detach().double().sum() for p in model.parameters()).item()
    print(f"rank {rank} ends with {total.hex()}", flush=True)
    if args.out and rank == 0:
        torch.save({name: part.state_dict() for name, part in state.items()}, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
