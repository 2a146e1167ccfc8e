"""torchft: checkpoints for the day on which all replica groups are gone, counted in committed steps.

    from unbroken.hooks.torchft import attach

    loader = attach(manager, loader, {"model": model, "optimizer": optimizer}, directory)
    while manager.current_step() < 1000:
        for batch in loader:
            ...

As long as one group lives, torchft heals the others from it. A step that torchft drops is not counted, and its batch is lost, as
torchft says of its own sampler. Each replica group has a folder of its own, and its own part of the data. Generators are seeded at
each step, from the loader's seed and the rank: a group whose newest checkpoint is older than the others' goes on exactly, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import data
from ..errors import UsageError
from . import wrappers  # torchft's OptimizerWrapper
from .states.torchft import Joining, StepGenerators
from .steps import StepLoader, keep_place
from .training import HookedTraining, check_version, folder_of

check_version("torchft", "0.2", "hooks-torchft")

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler  # noqa: E402
from torchft import DistributedSampler, Manager  # noqa: E402  only where it is known to be there

__all__ = ["CommittedLoader", "attach", "wrappers"]


def attach(
    manager: Manager, loader: Any, state: dict[str, Any], directory: str | Path | None = None, **options: Any
) -> CommittedLoader:
    """The loader to train with, after everything was restored: call it once, before the loop.

    `state` holds model and optimizer; the manager's counters and the place in the data go along. `directory` is this
    replica group's own (default: the run's folder under `unbroken run`). Raises UsageError where the manager has counted already.
    """
    if manager.current_step():
        raise UsageError(
            f"the manager is at step {manager.current_step()} already: what was trained before would be overwritten",
            hint="Call attach before the loop",
        )
    kept = keep_place(*_plain(loader))
    training = HookedTraining("torchft", folder_of(directory, None), **options)
    found = CommittedLoader(kept, training, manager)
    training.begin({**state, "manager": manager, "loader": kept})
    found.begin()
    return found


class CommittedLoader(StepLoader):
    """A StepLoader that counts what all replica groups have committed."""

    def __init__(self, loader: Any, training: HookedTraining, manager: Manager) -> None:
        super().__init__(loader, training)
        self._manager = manager
        self._joining: Joining | None = None
        self._generators: StepGenerators | None = None

    def begin(self) -> None:
        """The manager's step is the restored one."""
        self._joining = Joining(self._manager)

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            if self._is_behind():
                self._open = False  # this batch was trained by the attempt that saved the others' step
                continue
            if self._generators is None:
                self._generators = StepGenerators(self.loader.seed, self.loader.rank)
            self._generators.begin(self._manager.current_step() + 1)
            yield batch

    def _is_behind(self) -> bool:
        """Whether the others begin at a later step, which is asked once; the loader then stands where this group was at that step."""
        joining = self._joining
        if joining is None or joining.joined:
            return False
        steps = joining.join()
        if steps and isinstance(self.loader, data.Loader):
            self.loader.move_on(steps - 1)
            return True
        return False

    def end_step(self) -> None:
        """Ends the step if it was committed; after a heal the step may be many further on."""
        step = self._manager.current_step()
        if self._open and step > self.training.step:
            self.training.end_step(step)
        self._open = False


def _plain(loader: Any) -> tuple[Any, ...]:
    """The loader with its whole order: torchft's sampler shares it out to the ranks of all groups."""
    sampler = loader.sampler
    if not isinstance(sampler, DistributedSampler):
        return (loader,)
    order: Any = RandomSampler(loader.dataset) if sampler.shuffle else SequentialSampler(loader.dataset)
    plain: Any = DataLoader(
        loader.dataset, loader.batch_size, sampler=order, num_workers=loader.num_workers, collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory, drop_last=loader.drop_last, timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn, multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor, persistent_workers=loader.persistent_workers,
    )  # fmt: skip
    return (
        data.wrap(plain, seed=sampler.seed, rank=sampler.global_rank, world_size=sampler.global_world_size),
    )
