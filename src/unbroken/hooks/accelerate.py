"""accelerate without a trainer: the loop stays as it is, the training loader is changed for one that knows where it stands.

    from unbroken.hooks.accelerate import attach

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    loader = attach(accelerator, loader)
    for epoch in range(3):
        for batch in loader:
            ...

An epoch that was trained before a restart comes as one without a batch, so `range(3)` may stay; `loader.epochs(3)` leaves
those out. Everything that accelerate prepared, and what was registered with it for checkpointing, is saved and restored.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .steps import EpochLoader, keep_place
from .training import HookedTraining, check_version, folder_of

check_version("accelerate", "1.15", "hooks-accelerate")

from accelerate import Accelerator  # noqa: E402  only where it is known to be there
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard  # noqa: E402
from accelerate.utils import send_to_device  # noqa: E402
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler  # noqa: E402


def attach(
    accelerator: Accelerator, loader: Any, directory: str | Path | None = None, **options: Any
) -> AcceleratedLoader:
    """The loader to train with, after everything was restored: call it once, after `prepare` and before the loop.

    `directory` and `options` are those of `unbroken.Checkpointer`; only outside `unbroken run` it has to be given (default:
    `unbroken` in the accelerator's `project_dir`). Raises UsageError for a loader whose place cannot be known.
    """
    if not accelerator._models or not accelerator._optimizers:
        raise UsageError(
            "nothing to save: this Accelerator has prepared no model, or no optimizer",
            hint="Call attach(accelerator, loader) after model and optimizer went through accelerator.prepare",
        )
    plugin = accelerator.gradient_state.plugin_kwargs
    if not plugin.get("sync_with_dataloader", True):
        raise UsageError(
            "sync_with_dataloader=False lets a step go on into the next epoch, where nothing can be saved",
            hint="Leave it out of GradientAccumulationPlugin",
        )
    kept = keep_place(_plain(loader, accelerator), accumulate=accelerator.gradient_accumulation_steps)
    training = HookedTraining("accelerate", folder_of(directory, accelerator.project_dir), **options)
    found = AcceleratedLoader(kept, training, accelerator)
    state: dict[str, Any] = {
        "models": [accelerator.unwrap_model(m) for m in accelerator._models],
        "optimizers": [o.optimizer for o in accelerator._optimizers],
        "schedulers": list(accelerator._schedulers), "custom": list(accelerator._custom_objects), "loader": kept,
    }  # fmt: skip
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    _note_losses(accelerator, training)
    training.begin(state)
    return found


class AcceleratedLoader(EpochLoader):
    """An EpochLoader that tells accelerate when an epoch ends, and puts batches on its device."""

    def __init__(self, loader: Any, training: HookedTraining, accelerator: Accelerator) -> None:
        super().__init__(loader, training, self._ready)
        self._accelerator = accelerator
        self.end_of_dataloader = False
        """Whether the batch that the loop holds is the last of its epoch: accelerate then makes the step."""
        self.remainder = -1

    def __iter__(self) -> Iterator[Any]:
        gradients = self._accelerator.gradient_state
        self.end_of_dataloader = False
        gradients._add_dataloader(self)
        try:
            yield from super().__iter__()
        finally:
            gradients._remove_dataloader(self)

    def _ready(self, batch: Any) -> Any:
        self.end_of_dataloader = self.loader.epoch_ends
        device = self._accelerator.device
        return send_to_device(batch, device) if self._accelerator.device_placement else batch


def _plain(loader: Any, accelerator: Accelerator) -> Any:
    """The loader as it was before it was prepared: one rank's batch, and the whole order."""
    if isinstance(loader, DataLoaderDispatcher):
        raise UsageError(
            "dispatch_batches has rank 0 read for all: where each rank stands is known to nobody",
            hint="Leave out dispatch_batches, and make the dataset a map-style one (__len__ and __getitem__)",
        )
    if type(loader) is not DataLoaderShard and not hasattr(loader, "base_dataloader"):
        return loader
    if isinstance(loader.dataset, IterableDataset):
        return loader.base_dataloader
    batches, parts = loader.batch_sampler, 1
    if isinstance(batches, BatchSamplerShard):
        parts = batches.num_processes if batches.split_batches else 1
        batches = batches.batch_sampler
    if isinstance(batches, BatchSampler):
        sampler: Any = batches.sampler
        if isinstance(sampler, RandomSampler) and type(sampler) is not RandomSampler:
            sampler = RandomSampler(loader.dataset, sampler.replacement, sampler.num_samples)
        batches = BatchSampler(sampler, batches.batch_size // parts, batches.drop_last)
    names = (
        "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
        "prefetch_factor", "persistent_workers",
    )  # fmt: skip
    given = {name: getattr(loader, name) for name in names}
    return DataLoader(loader.dataset, batch_sampler=batches, **given)


def _note_losses(accelerator: Any, training: HookedTraining) -> None:
    backward = accelerator.backward

    def noted(loss: Any, **kwargs: Any) -> None:
        training.loss.note(loss)
        backward(loss, **kwargs)

    accelerator.backward = noted
