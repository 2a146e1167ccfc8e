"""Lightning's callbacks and module, and what of them cannot be kept."""

from __future__ import annotations

import os
from typing import Any

from ...data import Loader
from ...errors import UsageError


def refuse_unkept(trainer: Any) -> None:
    """Raises UsageError for what an exact resume cannot be promised of."""
    if trainer.reload_dataloaders_every_n_epochs:
        raise UsageError(
            "reload_dataloaders_every_n_epochs makes other loaders, whose place in the data nobody knows after a restart",
            hint="Leave it out, and let the dataset choose by the sample's number",
        )
    for callback in trainer.callbacks:
        kind = type(callback)
        if kind.__name__ == "GradientAccumulationScheduler":
            raise UsageError(
                "GradientAccumulationScheduler changes how many batches make a step",
                hint="Use Trainer(accumulate_grad_batches=N)",
            )
        if kind.__name__ in ("WeightAveraging", "EMAWeightAveraging"):
            raise UsageError(
                f"{kind.__name__} keeps its average outside of what callbacks say of themselves: it would be lost",
                hint="Keep the average as a module inside of the LightningModule",
            )
    if not trainer.strategy.lightning_restore_optimizer:
        raise UsageError(
            f"{type(trainer.strategy).__name__} keeps optimizer and weights to itself",
            hint="Use the ddp or fsdp strategy",
        )


def update_after_backward(precision: Any) -> Any:
    """A precision plugin's `optimizer_step` with forward and backward pass before the optimizer's step, and no longer inside of it.

    What an optimizer waits for at its beginning, copies of the state, can run beside both then. Optimizers that are not torch's own,
    and LBFGS, may ask for the loss more than once: they keep it inside. With a scaler of gradients it is before already.
    """
    original = precision.optimizer_step

    def optimizer_step(optimizer: Any, model: Any, closure: Any, **how: Any) -> Any:
        kind = type(optimizer)
        asks_once = kind.__module__.startswith("torch.optim.") and kind.__name__ != "LBFGS"
        if not asks_once or getattr(precision, "scaler", None) is not None:
            return original(optimizer, model=model, closure=closure, **how)
        loss = precision._wrap_closure(model, optimizer, closure)
        return optimizer.step(closure=lambda: loss, **how)

    return optimizer_step


def count_epoch(trainer: Any, steps: Any) -> None:
    """Lightning knows the last batch of an epoch by counting: what is skipped counts as trained, and after a resume with another
    number of ranks or batch size, what is behind counts in batches of now. `steps` is the StepLoader, or None."""
    whole, loader = trainer.num_training_batches, getattr(steps, "loader", None)
    if not isinstance(whole, int) or not isinstance(loader, Loader) or whole != len(steps):
        return
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    behind = whole - loader.batches_left(max(trainer.current_epoch, loader.epoch))
    if behind != current.ready:
        current.ready = current.started = current.processed = current.completed = behind
        loader.begin_inside_step(behind)


def show(trainer: Any) -> dict[str, Any]:
    """What the callbacks say of themselves, and what the module adds to a checkpoint of Lightning's."""
    found = {c.state_key: s for c in trainer.callbacks if (s := c.state_dict())}
    extra: dict[str, Any] = {}
    if _adds(trainer.lightning_module, "on_save_checkpoint"):
        trainer.lightning_module.on_save_checkpoint(extra)
    # A schedule or a callback at the epoch's end may go by what was logged before the restart.
    return {"callbacks": found, "module": extra, "metrics": dict(trainer._logger_connector._callback_metrics)}


def load(trainer: Any, saved: dict[str, Any]) -> None:
    """Gives it back to them."""
    for callback in trainer.callbacks:
        if callback.state_key in saved["callbacks"]:
            callback.load_state_dict(saved["callbacks"][callback.state_key])
    trainer._logger_connector._callback_metrics.update(saved["metrics"])
    if saved["module"] and _adds(trainer.lightning_module, "on_load_checkpoint"):
        trainer.lightning_module.on_load_checkpoint(saved["module"])


def _adds(module: Any, hook: str) -> bool:
    """Whether the user's module has a hook of its own: of the framework's classes the last that has it does nothing."""
    kinds = [k for k in type(module).__mro__ if hook in vars(k)]
    return bool(kinds) and not kinds[0].__module__.startswith(("lightning.", "pytorch_lightning."))


def seed() -> int:
    """The seed that Lightning was given for everything, if it was."""
    return int(os.environ.get("PL_GLOBAL_SEED") or 0)
