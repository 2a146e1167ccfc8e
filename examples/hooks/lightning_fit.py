"""Lightning with two lines of ours (marked +): killed at any moment, the same command goes on, bit for bit.

unbroken run --nproc 2 -- examples/hooks/lightning_fit.py
torchrun --nproc-per-node 2 examples/hooks/lightning_fit.py --out runs/points
"""

import argparse
import os
from importlib import import_module

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

# Either package: `import lightning.pytorch as L` or `import pytorch_lightning as L`.
L = import_module(os.environ.get("LIGHTNING", "lightning.pytorch"))

from unbroken.hooks.lightning import UnbrokenCallback  # noqa: E402  +


class Noisy(Dataset):
    """Points on noise: sample i is another one each time that it is asked for."""

    def __init__(self, samples: int = 88) -> None:
        self.x = torch.randn(samples, 16, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[i] + 0.1 * torch.randn(16), (self.x[i].sum() > 0).long()


class Points(L.LightningModule):
    """A small classifier with dropout, a schedule by steps and one by the validation's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.layers(x), y)
        step = self.trainer.global_step + 1
        print(f"rank {self.global_rank} step {step} loss {loss.item().hex()}", flush=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("held_out", nn.functional.cross_entropy(self.layers(x), y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "held_out"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainer = L.Trainer(
        max_epochs=options.epochs, accelerator="auto" if torch.cuda.is_available() else "cpu", strategy="ddp", accumulate_grad_batches=2,
        devices=int(os.environ.get("WORLD_SIZE", "1")), default_root_dir=options.out, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, val_check_interval=5,
        callbacks=[UnbrokenCallback(snapshot_every=2, persist_every=4)],  # +
    )  # fmt: skip
    trainer.fit(
        Points(),
        DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2),
        DataLoader(Noisy(16), batch_size=8),
    )
    torch.distributed.is_initialized() and torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
