"""What every hook refuses or survives, with its real framework in this process: a stop before the first step, a stop and a resume
(the losses as undisturbed), another dataset at a resume, two hooks at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from unbroken.errors import Exit, LayoutMismatch, UsageError
from unbroken.hooks import training as hooks

from .test_training import Stops

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_keepers")]
NEVER = 10**9
Losses = list[float]


class Points(Dataset):
    """Points on noise."""

    def __init__(self, samples: int) -> None:
        self.x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[i] + 0.1 * torch.randn(8), "y": self.x[i].sum()}


class Regression(torch.nn.Module):
    """With dropout; gives its loss as Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
        )
        self.losses: Losses = []
        self.seen: list[list[float]] = []
        """The samples of each batch, told by their sums."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(y.tolist())
        loss = (self.layers(x).squeeze(1) - y).square().mean()
        self.losses.append(loss.item())
        return {"loss": loss}


def train_transformers(folder: Path, samples: int, twice: bool = False) -> Losses:
    from transformers import Trainer, TrainingArguments

    from unbroken.hooks.transformers import attach

    args = TrainingArguments(
        output_dir=str(folder), num_train_epochs=2, per_device_train_batch_size=4, use_cpu=True, save_strategy="no",
        report_to="none", disable_tqdm=True, remove_unused_columns=False, logging_strategy="no",
    )  # fmt: skip
    model = Regression()
    trainer = Trainer(model=model, args=args, train_dataset=Points(samples))
    attach(trainer, snapshot_every=2)
    if twice:
        attach(trainer)
    trainer.train()
    return model.losses


def train_trl(folder: Path, samples: int, twice: bool = False) -> Losses:
    from datasets import Dataset as Table
    from tokenizers import Tokenizer, models
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from unbroken.hooks.transformers import attach

    words = {f"w{i}": i for i in range(62)} | {"<pad>": 62, "<eos>": 63}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    rows = torch.randint(0, 62, (samples, 12), generator=torch.Generator().manual_seed(0)).tolist()
    args = SFTConfig(
        output_dir=str(folder), num_train_epochs=2, per_device_train_batch_size=4, use_cpu=True, save_strategy="no", bf16=False,
        report_to="none", disable_tqdm=True, logging_strategy="no", max_length=16, gradient_checkpointing=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    found: Losses = []

    class Printing(SFTTrainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **how: Any) -> Any:
            loss = super().training_step(*args, **how)
            found.append(loss.item())
            return loss

    table = Table.from_dict({"input_ids": rows})
    trainer = Printing(model=model, args=args, train_dataset=table, processing_class=tokenizer)
    attach(trainer, snapshot_every=2)
    if twice:
        attach(trainer)
    trainer.train()
    return found


def train_accelerate(folder: Path, samples: int, twice: bool = False) -> Losses:
    from accelerate import Accelerator

    from unbroken.hooks.accelerate import attach

    accelerator = Accelerator(cpu=True, project_dir=str(folder))
    model: Any = Regression()
    losses = model.losses
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: Any = DataLoader(Points(samples), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loader = attach(accelerator, loader, snapshot_every=2)
    if twice:
        attach(accelerator, loader)
    for _ in range(2):
        for batch in loader:
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    loader.finish()
    return losses  # type: ignore[no-any-return]


def train_lightning(folder: Path, samples: int, twice: bool = False) -> Losses:
    import lightning.pytorch as L

    from unbroken.hooks.lightning import UnbrokenCallback

    model = Regression()

    class Module(L.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, number: int) -> Any:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    callbacks = [UnbrokenCallback(snapshot_every=2) for _ in range(1 + twice)]
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=str(folder), callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(Points(samples), batch_size=4, shuffle=True))
    return model.losses


TRAIN: dict[str, Callable[..., Losses]] = {
    "transformers": train_transformers, "trl": train_trl, "accelerate": train_accelerate, "lightning": train_lightning,
}  # fmt: skip


@pytest.mark.parametrize("framework", TRAIN)
def test_stops_and_other_data(framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(framework, reason="needs requirements/hooks.txt")

    def train(
        folder: str, stop_at: int = NEVER, samples: int = 24, seed: int = 0, twice: bool = False
    ) -> Losses | int:
        run = Stops(stop_at)
        monkeypatch.setattr(hooks, "attach", lambda: run)
        hooks._active.clear()
        torch.manual_seed(seed)
        try:
            return TRAIN[framework](tmp_path / folder, samples, twice)
        except SystemExit as left:
            assert left.code == Exit.RANK_STOPPED_ON_REQUEST
            return run.steps[-1] if run.steps else 0

    whole = train("one")
    assert isinstance(whole, list) and len(whole) == 12 and len(set(whole)) == 12
    assert train("two", stop_at=0) == 0, "before the first step"
    assert train("two", stop_at=0) == 0, "there is nothing that it could begin from"
    assert train("two", stop_at=5) == 5
    with pytest.raises(LayoutMismatch, match="other data"):
        train("two", samples=28, seed=1)
    assert train("two", seed=1) == whole[5:], "in the first epoch; every loss, bit for bit"
    assert train("three", stop_at=8) == 8
    assert train("three", seed=1) == whole[8:], "in the second"
    with pytest.raises(UsageError, match="two hooks at once"):
        train("four", twice=True)
