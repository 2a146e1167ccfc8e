"""A plain training: shuffled data, two workers, random augmentation, dropout, two batches a step. A kill loses all of it.

python examples/exact_data/before.py
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    """Points on noise: sample i is another one each time that it is asked for."""

    def __init__(self) -> None:
        self.x = torch.randn(192, 16, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[i] + 0.1 * torch.randn(16), (self.x[i].sum() > 0).long()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 36)
    loader = DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=args.workers)
    step = 0

    for _epoch in range(3):
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            if i % 2 == 0:
                continue
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            print(f"step {step} loss {loss.item().hex()}", flush=True)


if __name__ == "__main__":
    main()
