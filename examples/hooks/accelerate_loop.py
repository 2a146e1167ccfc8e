"""A loop with accelerate and two lines of ours (marked +): killed at any moment, the same command goes on, bit for bit.

unbroken run --nproc 2 -- examples/hooks/accelerate_loop.py
accelerate launch --num_processes 2 examples/hooks/accelerate_loop.py --out runs/points
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

from unbroken.hooks.accelerate import attach  # +


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
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(
        gradient_accumulation_steps=2, project_dir=options.out, cpu=not torch.cuda.is_available()
    )
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    loader = attach(accelerator, loader, snapshot_every=2, persist_every=4)  # +
    held_out = accelerator.prepare(DataLoader(Noisy(16), batch_size=8))

    for epoch in range(options.epochs):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step = int(next(iter(optimizer.state.values()))["step"])
                print(f"rank {accelerator.process_index} step {step} loss {loss.item().hex()}", flush=True)
        model.eval()
        with torch.no_grad():
            right = sum((model(x).argmax(1) == y).sum().item() for x, y in held_out)
        accelerator.print(f"epoch {epoch}: {right} right on rank 0")
    accelerator.end_training()


if __name__ == "__main__":
    main()
