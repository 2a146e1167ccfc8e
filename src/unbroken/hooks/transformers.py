"""Hugging Face's Trainer, and those of trl with it: one line, and a kill costs the steps since the last snapshot.

    from unbroken.hooks.transformers import attach

    trainer = Trainer(model=model, args=args, train_dataset=dataset)
    attach(trainer)
    trainer.train()

The training data comes through unbroken.data, so that its place and its randomness are exact. What the Trainer saves by
itself stays as it is; `train(resume_from_checkpoint=...)` counts until there is a checkpoint of ours.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ..data import Loader
from ..errors import UsageError
from .steps import StepLoader, keep_place
from .training import Training, Values, check_version

check_version("transformers", "5.23", "hooks-transformers")

import transformers.trainer as _trainer  # noqa: E402  only where it is known to be there
from transformers import Trainer, TrainerCallback  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402

_COUNTERS = (
    "epoch", "global_step", "num_input_tokens_seen", "total_flos", "log_history", "best_metric", "best_global_step",
    "best_model_checkpoint",
)  # fmt: skip


def attach(trainer: Trainer, directory: str | Path | None = None, **options: Any) -> Training:
    """Keeps this trainer's training: call it once, before `train()`.

    `directory` and `options` are those of `unbroken.Checkpointer` (default: the run's own folder under `unbroken run`,
    else `unbroken` in the trainer's `output_dir`). Raises UsageError where another checkpointer is at work.
    """
    if getattr(trainer.args, "enable_jit_checkpoint", False):
        raise UsageError(
            "enable_jit_checkpoint saves at SIGTERM, on each rank by itself, beside the stop that unbroken agrees on",
            hint="Leave out enable_jit_checkpoint: `unbroken run` asks all ranks to save and stop at one step",
        )
    training = Training("transformers", directory, **options) if directory else _default(trainer, options)
    _Attached(trainer, training)
    return training


def _default(trainer: Trainer, options: dict[str, Any]) -> Training:
    import os

    supervised = bool(os.environ.get("UNBROKEN_RUN_DIR"))
    output = trainer.args.output_dir or "trainer_output"
    return Training("transformers", None if supervised else Path(output) / "unbroken", **options)


class _Attached(TrainerCallback):  # type: ignore[misc]
    """The seams of one trainer; each is a method of that very object, called where the class would be."""

    def __init__(self, trainer: Any, training: Training) -> None:
        self.trainer, self.training = trainer, training
        self.loader: StepLoader | None = None
        self.prepared: Any = None
        self.resumed_epoch = -1
        self.losses: dict[str, float] = {}
        self.init_state, self.prepare = trainer._init_training_state, trainer._prepare_for_training
        self.run_epoch, self.train_step = trainer._run_epoch, trainer.training_step
        self.make_loader, self.load_rng = trainer.get_train_dataloader, trainer._load_rng_state
        trainer.get_train_dataloader = self._loader
        trainer._init_training_state = self._begin
        trainer._prepare_for_training = lambda *_: self.prepared
        trainer._run_epoch = self._epoch
        trainer._load_rng_state = self._generators
        trainer.training_step = self._step
        training.during(trainer, "_evaluate", "evaluating")
        training.during(trainer, "_save_checkpoint", "checkpointing")
        trainer.add_callback(self)

    def _loader(self) -> StepLoader:
        accelerator, args = self.trainer.accelerator, self.trainer.args
        accelerator.prepare = lambda loader, **_: loader  # the loader as it is, not shared out yet
        try:
            plain = self.make_loader()
        finally:
            del accelerator.prepare
        seed = args.data_seed if args.data_seed is not None else args.seed
        self.loader = StepLoader(
            keep_place(plain, seed=seed, accumulate=args.gradient_accumulation_steps), self.training
        )
        return self.loader

    def _begin(self, max_steps: int, steps: int, epochs: int, resume: Any, trial: Any) -> tuple[int, int]:
        """(epochs done, batches done of the next one), with everything restored."""
        trainer, loader = self.trainer, self.loader
        assert loader is not None
        found: tuple[int, int] = self.init_state(max_steps, steps, epochs, resume, trial)
        self.prepared = self.prepare(max_steps, loader, resume)
        whole = trainer.model_wrapped if trainer.is_fsdp_enabled else trainer.model
        state: dict[str, Any] = {
            "model": whole, "optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler, "loader": loader.loader,
            "trainer": Values(self._counters, self._put_counters),
        }  # fmt: skip
        if getattr(trainer.accelerator, "scaler", None) is not None:
            state["scaler"] = trainer.accelerator.scaler
        if self.training.begin(state) is None:
            if resume is not None and isinstance(loader.loader, Loader):
                loader.loader.start_from(found[0], trainer.state.global_step, found[1])
            return found
        done = trainer.state.global_step
        self.resumed_epoch = done // steps
        return done // steps, done % steps * trainer.args.gradient_accumulation_steps

    def _epoch(self, **kwargs: Any) -> None:
        if kwargs["epoch"] == self.resumed_epoch:
            kwargs["resume_from_checkpoint"] = "unbroken"  # it counts from where the epoch was left
        self.run_epoch(**kwargs)

    def _generators(self, checkpoint: Any) -> None:
        if self.training.restored is None:
            self.load_rng(checkpoint)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        loss = self.train_step(*args, **kwargs)
        self.training.loss.note(loss * self.trainer.current_gradient_accumulation_steps)
        return loss

    def _counters(self) -> dict[str, Any]:
        trainer = self.trainer
        callbacks = [c for c in trainer.callback_handler.callbacks if isinstance(c, ExportableState)]
        return {
            **{name: getattr(trainer.state, name) for name in _COUNTERS},
            "callbacks": {type(c).__name__: c.state()["attributes"] for c in callbacks},
            "logged": {
                "_tr_loss": float(trainer._tr_loss), "_total_loss_scalar": float(trainer._total_loss_scalar),
                "_globalstep_last_logged": trainer._globalstep_last_logged,
            } if hasattr(trainer, "_tr_loss") else {},
        }  # fmt: skip

    def _put_counters(self, saved: dict[str, Any]) -> None:
        known = {f.name for f in dataclasses.fields(self.trainer.state)}
        for name in _COUNTERS:
            if name in known and name in saved:
                setattr(self.trainer.state, name, saved[name])
        for callback in self.trainer.callback_handler.callbacks:
            for name, value in saved["callbacks"].get(type(callback).__name__, {}).items():
                setattr(callback, name, value)
        self.losses = saved["logged"]

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """What the Trainer sums up between two logs begins at zero; it goes on with what was saved."""
        for name, value in self.losses.items():
            now = getattr(self.trainer, name)
            setattr(self.trainer, name, now + value if name == "_tr_loss" else value)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Everything is durable before `train()` returns."""
        if self.loader is not None:
            self.loader.finish()


_skip_first_batches = _trainer.skip_first_batches


def _skip(loader: Any, batches: int = 0) -> Any:
    """As accelerate's; a loader of ours stands there already."""
    return loader if isinstance(loader, StepLoader) else _skip_first_batches(loader, batches)


_trainer.skip_first_batches = _skip
