"""Lightning with one callback of ours: killed in both epochs, stopped and started again, every loss as undisturbed; both packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unbroken.errors import RunInterrupted, UsageError
from unbroken.hooks import training as hooks

from . import exact
from .test_training import Checkpoints

pytest.importorskip("lightning", reason="needs requirements/hooks.txt")
pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(900)]
SCRIPT = exact.EXAMPLES / "lightning_fit.py"


@pytest.mark.parametrize("kill_at", exact.KILLS)
def test_exact_after_kill_nine_and_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_at: tuple[int, ...]
) -> None:
    """Shuffled by an ordinary loader, dropout, two workers, accumulation, noise drawn for each sample, a validation within the
    epoch that draws, and a schedule that goes by its result. The undisturbed training is the other package's."""
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    monkeypatch.setenv("LIGHTNING", "pytorch_lightning")
    undisturbed, _ = exact.torchrun(tmp_path / "one", SCRIPT)
    monkeypatch.setenv("LIGHTNING", "lightning.pytorch")
    made, code = exact.supervised(
        tmp_path / "two", SCRIPT, kill_at=kill_at, stop_at=11 if len(kill_at) > 1 else 0
    )
    if code == RunInterrupted.exit_code:  # else it was over before it was asked
        made, code = exact.supervised(tmp_path / "two", SCRIPT)
        assert len(made) == len(kill_at) + 2
    assert code == 0
    exact.check_exact(undisturbed, made, len(made) - 1)


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import GradientAccumulationScheduler, WeightAveraging
    from lightning.pytorch.demos.boring_classes import BoringModel

    from unbroken.hooks.lightning import UnbrokenCallback

    def fit(*callbacks: Any, **options: Any) -> None:
        trainer = pl.Trainer(
            max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path, callbacks=[UnbrokenCallback(), *callbacks], **options,
        )  # fmt: skip
        trainer.fit(BoringModel())

    with pytest.raises(UsageError, match="reload_dataloaders_every_n_epochs"):
        fit(reload_dataloaders_every_n_epochs=1)
    with pytest.raises(UsageError, match="GradientAccumulationScheduler changes"):
        fit(GradientAccumulationScheduler({1: 2}))
    with pytest.raises(UsageError, match="WeightAveraging keeps its average"):
        fit(WeightAveraging(avg_fn=lambda a, b, n: a))
    with pytest.raises(UsageError, match="two hooks at once"):
        fit(UnbrokenCallback(torch.device))  # type: ignore[arg-type]


def test_copies_may_run_beside_the_forward_and_the_backward_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning has both inside of the optimizer's step, at whose beginning ours waits for copies."""
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.demos.boring_classes import BoringModel
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from unbroken.hooks.lightning import UnbrokenCallback

    monkeypatch.setattr(hooks, "Checkpointer", lambda *_, **__: Checkpoints())
    monkeypatch.setattr(Checkpoints, "due", lambda *_: False)
    seen: list[str] = []

    class Model(BoringModel):  # type: ignore[misc]
        kind: Any = torch.optim.SGD

        def training_step(self, batch: Any, number: int) -> Any:
            seen.append("forward")
            return super().training_step(batch, number)

        def on_after_backward(self) -> None:
            seen.append("backward")

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append("before the update")

        def configure_optimizers(self) -> Any:
            return self.kind(self.parameters(), lr=0.01)

    class Twice(torch.optim.SGD):
        """Asks for the loss twice."""

        def step(self, closure: Any = None) -> Any:
            closure()
            return super().step(closure)

    def fit(kind: Any, precision: str = "32-true") -> list[str]:
        seen.clear()
        model = Model()
        model.kind = kind
        trainer = pl.Trainer(
            max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, precision=precision,
            enable_model_summary=False, default_root_dir=tmp_path / f"{kind.__name__}-{precision}", callbacks=[UnbrokenCallback()],
            limit_val_batches=0,
        )  # fmt: skip
        trainer.fit(model)
        return list(seen)

    hook = register_optimizer_step_pre_hook(lambda *_: seen.append("update"))
    try:
        usual = ["forward", "backward", "before the update", "update"]
        assert fit(torch.optim.SGD) == usual * 2
        assert fit(torch.optim.SGD, "bf16-mixed") == usual * 2
        assert fit(Twice)[:4] == ["update", *usual[:3]], "as Lightning has it"
    finally:
        hook.remove()
