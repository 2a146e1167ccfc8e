"""Hugging Face's Trainer, and those of trl with it: one line, and a kill costs the steps since the last snapshot.

    from unbroken.hooks.transformers import attach

    trainer = Trainer(model=model, args=args, train_dataset=dataset)
    attach(trainer)
    trainer.train()

The training data comes through unbroken.data, so that its place and its randomness are exact. What the Trainer saves by
itself stays as it is; `train(resume_from_checkpoint=...)` counts until there is a checkpoint of ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..data import Loader
from ..errors import UsageError
from .steps import StepLoader, keep_global_batch, keep_place
from .training import HookedTraining, check_version, folder_of

check_version("transformers", "5.23", "hooks-transformers")

import transformers.trainer as _trainer  # noqa: E402  only where it is known to be there
from transformers import Trainer, TrainerCallback  # noqa: E402

from .states.transformers import Counters, Epochs  # noqa: E402


def attach(trainer: Trainer, directory: str | Path | None = None, **options: Any) -> HookedTraining:
    """Keeps this trainer's training: call it once, before `train()`.

    `directory` and `options` are those of `unbroken.Checkpointer` (default: the run's own folder under `unbroken run`,
    else `unbroken` in the trainer's `output_dir`). Raises UsageError where another checkpointer is at work.
    """
    if getattr(trainer.args, "enable_jit_checkpoint", False):
        raise UsageError(
            "enable_jit_checkpoint saves at SIGTERM, on each rank by itself, beside the stop that unbroken agrees on",
            hint="Leave out enable_jit_checkpoint: `unbroken run` asks all ranks to save and stop at one step",
        )
    folder = folder_of(directory, trainer.args.output_dir or "trainer_output")
    training = HookedTraining("transformers", folder, **options)
    args = trainer.args
    if sizes := training.run.world_sizes:
        args.gradient_accumulation_steps = keep_global_batch(
            args.gradient_accumulation_steps, sizes, args.world_size
        )
    _Attached(trainer, training)
    return training


class _Attached(TrainerCallback):  # type: ignore[misc]
    """The seams of one trainer; each is a method of that very object, called where the class would be."""

    def __init__(self, trainer: Any, training: HookedTraining) -> None:
        self.trainer, self.training = trainer, training
        self.loader: StepLoader | None = None
        self.prepared: Any = None
        self.resumed_epoch = -1
        self.counters, self.epochs = Counters(trainer), Epochs(trainer)
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
            "trainer": self.counters,
        }  # fmt: skip
        if getattr(trainer.accelerator, "scaler", None) is not None:
            state["scaler"] = trainer.accelerator.scaler
        if self.training.begin(state) is None:
            if resume is not None and isinstance(loader.loader, Loader):
                loader.loader.start_from(found[0], trainer.state.global_step, found[1])
            return found
        self.resumed_epoch, trained = self.epochs.resume(loader, steps)
        return self.resumed_epoch, trained

    def _epoch(self, **kwargs: Any) -> None:
        if kwargs["epoch"] == self.resumed_epoch:
            kwargs["resume_from_checkpoint"] = "unbroken"  # it counts from where the epoch was left
        self.run_epoch(**kwargs | self.epochs.count(self.loader, **kwargs))

    def _generators(self, checkpoint: Any) -> None:
        if self.training.restored is None:
            self.load_rng(checkpoint)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        loss = self.train_step(*args, **kwargs)
        self.training.loss.note(loss * self.trainer.current_gradient_accumulation_steps)
        return loss

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """What the Trainer sums up between two logs begins at zero; it goes on with what was saved."""
        self.counters.put_sums()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Everything is durable before `train()` returns."""
        if self.loader is not None:
            self.loader.finish()


_skip_first_batches = _trainer.skip_first_batches


def _skip(loader: Any, batches: int = 0) -> Any:
    """As accelerate's; a loader of ours stands there already."""
    return loader if isinstance(loader, StepLoader) else _skip_first_batches(loader, batches)


_trainer.skip_first_batches = _skip
