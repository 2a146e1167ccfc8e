"""How fast `unbroken.data.wrap` is beside torch's own DataLoader, on a dataset in memory: samples per second, in pairs.

    python benchmarks/data_loader.py [--rounds 15] [--out benchmarks/results/data_loader.json]

Both contenders live at once and load the same number of batches in turn, the order of a pair changing; what counts is the
median of the pairs' ratios. Samples are 784 floats and a label, batches of 64, shuffled; `random` draws noise for each sample.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from torch.utils.data import DataLoader, Dataset, TensorDataset

from unbroken.data import wrap
from unbroken.data.ordering.orders import Shuffled
from unbroken.data.ordering.permutation import key_of, permute


class Noisy(Dataset[torch.Tensor]):
    """A sample in memory with noise on it."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.x[index] + torch.randn(self.x.shape[1])


def load(iterator: Any, batches: int) -> float:
    """Seconds for so many batches."""
    began = time.perf_counter()
    for _ in range(batches):
        next(iterator)
    return time.perf_counter() - began


def compare(dataset: Any, workers: int, rounds: int, batches: int) -> dict[str, float]:
    """The median ratio of samples per second, ours to torch's, over pairs of neighbouring windows, and its quartiles.

    Both loaders live at once and take turns; each first uses up what its workers had prefetched meanwhile.
    """
    ratios, rates = [], []
    ahead = 2 * workers + 2
    for _ in range(rounds):
        plain = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=workers)
        both = (
            iter(plain),
            iter(wrap(DataLoader(dataset, batch_size=64, shuffle=True, num_workers=workers))),
        )
        for it in both:
            load(it, 10)
        for n in range((len(plain) - 20) // (batches + ahead)):
            took = [0.0, 0.0]
            for k in (0, 1) if n % 2 else (1, 0):
                load(both[k], ahead)
                took[k] = load(both[k], batches)
            ratios.append(took[0] / took[1])
            rates.append(64 * batches / took[1])
    low, mid, high = statistics.quantiles(ratios, n=4)
    # The median's standard error, of normal errors of this spread.
    error = 1.2533 * (high - low) / 1.349 / len(ratios) ** 0.5
    return {
        "ratio": round(mid, 4), "standard error": round(error, 4), "lower quartile": round(low, 4),
        "upper quartile": round(high, 4), "samples per second": round(statistics.median(rates)), "pairs": len(ratios),
    }  # fmt: skip


def orders(size: int) -> dict[str, float]:
    """Seconds for one epoch's order, as torch makes it and as we do."""
    began = time.perf_counter()
    torch.randperm(size).tolist()
    torchs = time.perf_counter() - began
    order = Shuffled(size, size)
    began = time.perf_counter()
    for start in range(0, size, 4096):
        order.indices(0, 0, torch.arange(start, min(start + 4096, size)).numpy()).tolist()
    ours = time.perf_counter() - began
    began = time.perf_counter()
    permute(size, key_of(0, 0), torch.arange(64).numpy())
    return {
        "torch.randperm": round(torchs, 4),
        "ours": round(ours, 4),
        "any 64 of it": round(time.perf_counter() - began, 6),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    x = torch.randn(50_000, 784)
    plain, noisy = TensorDataset(x, torch.arange(len(x))), Noisy(x)
    found: dict[str, Any] = {
        "machine": describe_machine(),
        "torch": str(torch.__version__),
        "order of 1,000,000": orders(1_000_000),
    }
    print(json.dumps(found["order of 1,000,000"]), flush=True)
    for name, dataset in (("in memory", plain), ("random", noisy)):
        for workers in (0, 4):
            key = f"{name}, {workers} workers"
            found[key] = compare(dataset, workers, args.rounds, args.batches)
            print(key, json.dumps(found[key]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
