"""torchtitan: a checkpoint manager of ours in the place of its own, named in the trainer's config.

    from unbroken.hooks.torchtitan import UnbrokenCheckpoints

    Trainer.Config(..., checkpoint=UnbrokenCheckpoints.Config())

Model parts, optimizers, schedules, the trainer's counters, generators (torchtitan saves none) and the place in the data are
saved and restored. `own=CheckpointManager.Config(...)` has torchtitan's manager save beside, and begins from what it
saved as long as there is no checkpoint of ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..data.loading.stateful import StatefulLoader
from ..errors import UsageError
from . import wrappers  # its OptimizersContainer
from .steps import StepLoader, keep_place
from .training import HookedTraining, Values, check_version, folder_of

check_version("torchtitan", "0.3", "hooks-torchtitan")

from torchtitan.components.checkpointer.base import BaseCheckpointManager  # noqa: E402  only where it is known to be there

__all__ = ["UnbrokenCheckpoints", "wrappers"]


class UnbrokenCheckpoints(BaseCheckpointManager):  # type: ignore[misc]
    """Keeps the training of one torchtitan Trainer, from its `load` to its `close`."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """Of torchtitan's fields, `enable` and `folder` count; those of `unbroken.Checkpointer` are `options`."""

        enable: bool = True
        interval: int = 1
        """How often the data loader notes its place: at each step, so that a resume reads nothing twice."""
        options: dict[str, Any] = field(default_factory=dict)
        """What `unbroken.Checkpointer` is given: `snapshot_every`, `persist_every`, `keep`, ..."""
        own: BaseCheckpointManager.Config | None = None
        """A manager of torchtitan's that goes on beside ours."""

    def __init__(
        self, config: Config, *, dataloader: Any, model_parts: list[torch.nn.Module], optimizers: Any, lr_schedulers: Any,
        states: dict[str, Any], sd_adapter: Any = None, base_folder: str = "",
    ) -> None:  # fmt: skip
        self.enable = config.enable
        self.save_future = None
        if not self.enable:
            return
        self.trainer, self.dataloader = states["train_state"], dataloader
        self.loader: StepLoader | None = None
        self._parts: dict[str, Any] = {
            "model": [_tensors(part) for part in model_parts], "optimizers": optimizers, "schedulers": list(lr_schedulers.schedulers),
        }  # fmt: skip
        options = {k: v for k, v in config.options.items() if k != "directory"}
        folder = folder_of(config.options.get("directory"), f"{base_folder or '.'}/{config.folder}")
        self.training = HookedTraining("torchtitan", folder, **options)
        self.own: BaseCheckpointManager | None = None
        if config.own is not None:
            self.own = config.own.build(
                dataloader=dataloader, model_parts=model_parts, optimizers=optimizers, lr_schedulers=lr_schedulers,
                states=dict(states), sd_adapter=sd_adapter, base_folder=base_folder,
            )  # fmt: skip

    def _load(self, step: int = -1) -> bool:
        """Everything is built: restores it, and puts its loader in the trainer's place for one."""
        trainer, dataloader = self.trainer, self.dataloader
        batches = trainer.gradient_accumulation_steps * trainer.num_pipeline_parallel_microbatches
        kept = keep_place(
            dataloader, accumulate=batches, rank=dataloader.dp_rank, world_size=dataloader.dp_world_size
        )
        self.loader = trainer.dataloader = StepLoader(kept, self.training)
        self._note_losses()
        if trainer.config.validator.enable:
            self.training.during(trainer.validator, "validate", "evaluating")
        counters = Values(self._counters, trainer.load_state_dict)
        if self.training.begin({**self._parts, "loader": kept, "counters": counters}) is not None:
            return True
        if self.own is None or not self.own.load(step):
            return False
        if trainer.step:
            if not isinstance(kept, StatefulLoader):
                raise UsageError(
                    f"torchtitan's own checkpoint is of step {trainer.step}, and does not say where this loader stood",
                    hint="Load its weights alone: own=CheckpointManager.Config(initial_load_path=..., initial_load_model_only=True)",
                )
            kept.count_from(trainer.step)
            self.training.step = trainer.step
        return True

    def _counters(self) -> dict[str, Any]:
        """As they are when the step is complete: the trainer counts the next one before it asks for its data."""
        return {**self.trainer.state_dict(), "step": self.training.step}

    def _note_losses(self) -> None:
        """This rank's mean loss of a step: the micro-batches' sums come divided by the tokens of all ranks."""
        trainer, forward = self.trainer, self.trainer.forward_backward_step
        ranks = self.dataloader.dp_world_size

        noted_at = -1

        def noted(**how: Any) -> torch.Tensor:
            nonlocal noted_at
            loss: torch.Tensor = forward(**how)
            kept = loss.detach() * ranks  # the loss itself is the CUDA graph's, and overwritten
            self.training.loss.note(self.training.loss.noted() + kept if noted_at == trainer.step else kept)
            noted_at = trainer.step
            return loss

        trainer.forward_backward_step = noted

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Nothing of ours: the step ends when the trainer asks for more data, after its validation."""
        return self.own is not None and bool(self.own.save(curr_step, last_step))

    def _maybe_wait_for_staging(self) -> None:
        self.training.checkpoints.wait_for_copies()
        if self.own is not None:
            self.own.maybe_wait_for_staging()

    def _wait_for_saving(self) -> None:
        if self.own is not None:
            self.own.maybe_wait_for_saving()

    def _close(self) -> None:
        """Everything is durable before the trainer is closed; after an error the keeper sees to what was saved."""
        if self.own is not None:
            self.own.close()
        if self.trainer.step >= self.trainer.config.training.steps and self.loader is not None:
            self.loader.finish()
        self.training.ended = True


def _tensors(part: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A model part's own parameters and buffers: its state dict may show others, made for other programs' names."""
    found: dict[str, torch.Tensor] = dict(part.named_parameters())
    for path, module in part.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{path}.{name}".lstrip(".")] = buffer
    return found
