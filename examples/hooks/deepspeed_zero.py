"""DeepSpeed with two lines of ours (marked +): killed at any moment, the same command goes on, bit for bit.

unbroken run --nproc 2 -- examples/hooks/deepspeed_zero.py --stage 3
torchrun --nproc-per-node 2 examples/hooks/deepspeed_zero.py --out runs/points
"""

import argparse

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from unbroken.hooks.deepspeed import attach  # +


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
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 2))
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
        "zero_optimization": {"stage": options.stage, "stage3_param_persistence_threshold": 100},
        "bf16": {"enabled": options.bf16}, "steps_per_print": 10**9,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    kind = next(p.dtype for p in engine.module.parameters())
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2)
    loader = attach(engine, loader, options.out + "/unbroken", snapshot_every=2, persist_every=4)  # +

    for _ in range(options.epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(engine(x.to(engine.device, kind)).float(), y.to(engine.device))
            engine.backward(loss)
            step = engine.global_steps + 1
            engine.step()
            print(f"rank {engine.global_rank} step {step} loss {loss.item().hex()}", flush=True)
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
