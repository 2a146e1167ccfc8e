"""A resume with other batches, and one that leaves samples out as after a rollback, with the real frameworks in this process: which
samples each batch has, and that every epoch ends with a whole step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from unbroken.data.loading import loader as loading
from unbroken.errors import RunInterrupted
from unbroken.hooks import training as hooks

from . import exact
from .test_inputs import Points, Regression
from .test_training import Stops

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_keepers"), pytest.mark.timeout(900)]
SAMPLES, EPOCHS = 24, 2


def train_transformers(model: Regression, folder: Path, batch: int, accumulate: int) -> None:
    from transformers import Trainer, TrainingArguments

    from unbroken.hooks.transformers import attach

    args = TrainingArguments(
        output_dir=str(folder), num_train_epochs=EPOCHS, per_device_train_batch_size=batch, use_cpu=True, save_strategy="no",
        gradient_accumulation_steps=accumulate, report_to="none", disable_tqdm=True, remove_unused_columns=False,
        logging_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=Points(SAMPLES))
    attach(trainer, snapshot_every=1)
    trainer.train()
    assert trainer.state.epoch == EPOCHS


def train_accelerate(model: Any, folder: Path, batch: int, accumulate: int) -> None:
    from accelerate import Accelerator

    from unbroken.hooks.accelerate import attach

    accelerator = Accelerator(cpu=True, project_dir=str(folder), gradient_accumulation_steps=accumulate)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: Any = DataLoader(Points(SAMPLES), batch_size=batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loader = attach(accelerator, loader, snapshot_every=1)
    for _ in range(EPOCHS):
        for given in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**given)["loss"])
                optimizer.step()
                optimizer.zero_grad()
        assert accelerator.sync_gradients, "nothing of an epoch is left over"
    loader.finish()


def train_lightning(model: Regression, folder: Path, batch: int, accumulate: int) -> None:
    import lightning.pytorch as L

    from unbroken.hooks.lightning import UnbrokenCallback

    class Module(L.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.validated = model, 0

        def training_step(self, given: Any, number: int) -> Any:
            return self.model(**given)["loss"]

        def validation_step(self, given: Any, number: int) -> None:
            self.validated += 1

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    trainer = L.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=str(folder), callbacks=[UnbrokenCallback(snapshot_every=1)],
        accumulate_grad_batches=accumulate, num_sanity_val_steps=0,
    )  # fmt: skip
    module = Module()
    trainer.fit(
        module, DataLoader(Points(SAMPLES), batch_size=batch, shuffle=True), DataLoader(torch.arange(1))
    )
    assert module.validated == EPOCHS, "at the end of each epoch"


TRAIN: dict[str, Callable[[Any, Path, int, int], None]] = {
    "transformers": train_transformers, "accelerate": train_accelerate, "lightning": train_lightning,
}  # fmt: skip


@pytest.mark.parametrize("framework", TRAIN)
def test_other_batches_and_samples_left_out(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(framework, reason="needs requirements/hooks.txt")

    def train(
        folder: str, batch: int, accumulate: int, stop_at: int = 10**9, skips: Any = ()
    ) -> tuple[list[list[float]], list[int]]:
        run = Stops(stop_at)
        monkeypatch.setattr(hooks, "attach", lambda: run)
        monkeypatch.setattr(
            loading, "attach", lambda: SimpleNamespace(skips=skips, add_data_wait=lambda _: None)
        )
        hooks._active.clear()
        torch.manual_seed(0)
        model = Regression()
        try:
            TRAIN[framework](model, tmp_path / folder, batch, accumulate)
        except SystemExit:
            assert run.steps[-1] == stop_at
        return model.seen, run.steps

    whole, steps = train("whole", 2, 2)
    assert len(whole) == 24 and steps == list(range(1, 13))
    order = [sample for given in whole for sample in given]

    # Rolled back to step 2, without the samples of steps 4 to 7, which lie in both epochs.
    train("rollback", 2, 2, stop_at=2)
    seen, steps = train("rollback", 2, 2, skips=((12, 28),))
    assert seen == [*whole[4:6], *whole[14:]] and steps == list(range(3, 9))

    # Other batches from step 1 on: every sample once, in the same order, and the epochs end where they ended.
    for batch, accumulate, sizes in (
        (3, 2, [3] * 6 + [2] + [3] * 8),
        (6, 1, [6, 6, 6, 2] + [6] * 4),
        (1, 2, [1] * 44),
    ):
        folder = f"batch-{batch}"
        train(folder, 2, 2, stop_at=1)
        seen, steps = train(folder, batch, accumulate)
        assert [s for given in seen for s in given] == order[4:]
        assert [len(given) for given in seen] == sizes
        assert steps == list(range(2, 2 + len(steps)))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("script", "printed"),  # losses of each step
    [("accelerate_loop.py", 1), ("transformers_trainer.py", 2), ("lightning_fit.py", 2)],
)
def test_half_of_the_ranks(script: str, printed: int, tmp_path: Path) -> None:
    """Two ranks, stopped; one goes on, by the same command with another --nproc and --amend: what is left of the 88 samples of the epoch, and
    the next one whole."""
    pytest.importorskip(script.partition("_")[0], reason="needs requirements/hooks.txt")
    made, code = exact.supervised(tmp_path, exact.EXAMPLES / script, "--epochs", "2", stop_at=2)
    assert code == RunInterrupted.exit_code
    stopped = max(step for _, step in made[0])
    assert stopped < 6, "in the first epoch"
    made, code = exact.supervised(tmp_path, exact.EXAMPLES / script, "--epochs", "2", ranks=1, amend=True)
    assert code == 0
    left = 11 - 2 * stopped  # steps of 8 samples, and no longer of 16
    assert sorted(made[-1]) == [(0, step) for step in range(stopped + 1, stopped + 1 + left + 11)]
    assert all(len(found) == printed for found in made[-1].values()), "whole steps"
