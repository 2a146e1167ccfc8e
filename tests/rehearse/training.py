"""A training as people write it, which resumes exactly, and ten ways to get it wrong: `--mistake NAME`.

It saves with torch.save, knows its place in the data by itself, averages its weights, accumulates two batches a step.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

NAMES = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen"]


class Data(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, mistake: str) -> None:
        g = torch.Generator().manual_seed(0)
        self.x = torch.randn(48, 8, generator=g)
        self.mistake = mistake
        self.noise = np.random.default_rng() if mistake == "augmentation" else np.random.default_rng(0)
        names = set(NAMES) if mistake == "dict order" else NAMES
        self.labels = {name: i % 4 for i, name in enumerate(names)}

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        x = self.x[i]
        if self.mistake == "augmentation":
            x = x + float(self.noise.random())
        if self.mistake == "time":
            x = x * (1 + time.time() % 1)
        return x, self.labels[NAMES[i % 8]]


class Order(Sampler[int]):
    """As a DistributedSampler that can begin in the middle."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch, self.first = size, 0, 0

    def __iter__(self) -> Iterator[int]:
        g = torch.Generator().manual_seed(self.epoch)
        yield from torch.randperm(self.size, generator=g).tolist()[self.first :]

    def __len__(self) -> int:
        return self.size - self.first


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mistake", default="")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--steps", type=int, default=18)
    args = parser.parse_args()
    mistake = args.mistake
    torch.set_num_threads(1)
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    data = Data(mistake)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    ema = {n: p.detach().clone() for n, p in model.named_parameters()}
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "last.pt"
    begin, first, step = 0, 0, 0
    if path.exists():
        saved = torch.load(path, weights_only=False)
        model.load_state_dict(saved["model"]), optimizer.load_state_dict(saved["optimizer"])
        begin, first, step = saved["epoch"], saved["batch"], saved["step"]
        if mistake != "scheduler":
            scheduler.load_state_dict(saved["scheduler"])
        if mistake != "ema":
            for n, t in saved["ema"].items():
                ema[n].copy_(t)
        if mistake == "position":
            first = 0
        if mistake != "generator":
            (
                torch.set_rng_state(saved["torch"]),
                random.setstate(saved["python"]),
                np.random.set_state(saved["numpy"]),
            )
    order = Order(len(data))
    for epoch in range(begin, 4):
        order.epoch = epoch - begin if mistake == "set_epoch" else epoch
        order.first = 4 * first
        loader = DataLoader(data, 4, sampler=order, generator=torch.Generator())
        for batch, (x, y) in enumerate(loader, first):
            if mistake == "dropout" and step == 4:
                model[3].p = 0.05
            loss = nn.functional.cross_entropy(model(x), y) / 2
            loss.backward()
            ends = batch % 2 == 1
            if ends:
                optimizer.step(), optimizer.zero_grad(), scheduler.step()
                step += 1
                with torch.no_grad():
                    for n, p in model.named_parameters():
                        ema[n].lerp_(p, 0.1)
                print(f"step {step} loss {2 * loss.item():.4f}", flush=True)
            cut = mistake == "accumulation"
            if step % 3 == 0 and step and ends != cut:
                state = {
                    "model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
                    "ema": ema, "epoch": epoch, "batch": batch + 1, "step": step, "torch": torch.get_rng_state(),
                    "python": random.getstate(), "numpy": np.random.get_state(),
                }  # fmt: skip
                torch.save(state, args.out / "new.pt")
                os.replace(args.out / "new.pt", path)
            if step >= args.steps:
                return
        first = 0


if __name__ == "__main__":
    main()
