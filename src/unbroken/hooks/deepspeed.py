"""DeepSpeed: the loop stays as it is, ZeRO 0 to 3, the training loader is changed for one that knows where it stands.

    from unbroken.hooks.deepspeed import attach

    engine, _, _, _ = deepspeed.initialize(model=model, config=config)
    loader = attach(engine, loader)
    for epoch in range(3):
        for batch in loader:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()

An epoch that was trained before a restart comes as one without a batch, so `range(3)` may stay; `loader.epochs(3)` leaves
those out, and `loader.finish()` waits until everything is durable.
Weights, optimizer, masters in full precision, loss scale, schedule, the engine's counters, generators and the place in the
data: DeepSpeed's own checkpoints have neither of the last two, and stay as they are. A checkpoint is of one ZeRO stage and,
from stage 1 on, of one number of ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import UsageError
from . import wrappers  # its ZeRO optimizers
from .states.deepspeed import EngineCounters, gather_again, refuse_unkept
from .steps import EpochLoader, keep_place
from .training import HookedTraining, check_version, folder_of

check_version("deepspeed", "0.19", "hooks-deepspeed")

__all__ = ["attach", "wrappers"]


def attach(engine: Any, loader: Any, directory: str | Path | None = None, **options: Any) -> EngineLoader:
    """The loader to train with, after everything was restored: call it once, after `initialize` and before the loop.

    `loader` is an ordinary one, with a rank's batch (train_micro_batch_size_per_gpu). `directory` and `options` are those of
    `unbroken.Checkpointer`. Raises UsageError for what an exact resume cannot be promised of.
    """
    refuse_unkept(engine)
    if engine.global_steps:
        raise UsageError(
            f"the engine is at step {engine.global_steps} already: what was trained before would be overwritten",
            hint="Call attach right after deepspeed.initialize; to begin from a checkpoint of DeepSpeed's, call "
            "engine.load_checkpoint(...) after attach, where attach restored nothing",
        )
    kept = keep_place(loader)  # the engine counts the steps: they go on from one epoch into the next
    training = HookedTraining("deepspeed", folder_of(directory, None), **options)
    state: dict[str, Any] = {"optimizer": engine.optimizer, "engine": EngineCounters(engine), "loader": kept}
    if engine.zero_optimization_stage() < 3:
        state["module"] = engine.module
    else:  # its parameters are empty between steps, what they were is in the optimizer
        state["buffers"] = dict(engine.module.named_buffers())
    if engine.lr_scheduler is not None:
        state["scheduler"] = engine.lr_scheduler
    backward = engine.backward

    def noted(loss: Any, *args: Any, **how: Any) -> Any:
        training.loss.note(loss)
        return backward(loss, *args, **how)

    engine.backward = noted
    for name in ("save_checkpoint", "load_checkpoint"):
        training.during(engine, name, "checkpointing")
    if training.begin(state) is not None:
        gather_again(engine)
    return EngineLoader(kept, training, engine)


class EngineLoader(EpochLoader):
    """An EpochLoader that counts what the engine has stepped."""

    def __init__(self, loader: Any, training: HookedTraining, engine: Any) -> None:
        super().__init__(loader, training)
        self._engine = engine

    @property
    def step(self) -> int:
        """Complete steps, over all epochs and attempts."""
        return int(self._engine.global_steps)

    def end_step(self) -> None:
        """Ends the step if the engine made one with the batch that the loop had."""
        if self._open and self.step > self.training.step:
            self.training.end_step(self.step)
        self._open = False
