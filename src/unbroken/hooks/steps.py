"""The loader that a framework's loop is given: when the loop asks for more, the step before is complete.

Whatever a framework does after a step (log, evaluate, save, count) is done by then, and its next step has not begun:
the one moment at which weights, generators, counters and the place in the data belong together. Needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .. import data
from ..data.loading.stateful import StatefulLoader
from ..errors import UsageError
from .training import HookedTraining

Kept = data.Loader | StatefulLoader


def keep_place(loader: Any, **how: Any) -> Kept:
    """The loader, wrapped by unbroken.data where it is not yet. Raises UsageError for one whose place cannot be known."""
    return loader if isinstance(loader, Kept) else data.wrap(loader, **how)


def keep_global_batch(accumulate: int, sizes: Sequence[int], ranks: int) -> int:
    """How many batches make a step with so many ranks where `accumulate` do with the most of `sizes`, with which the run may go on
    (`Run.world_sizes`). Raises UsageError, with those that can, where some size cannot have as many samples."""
    whole = accumulate * max(sizes)
    if bad := [n for n in sizes if whole % n]:
        legal = ", ".join(str(n) for n in sizes if not whole % n)
        raise UsageError(
            f"a step of {whole} batches over all ranks cannot be the same with {', '.join(map(str, bad))} ranks, which --min-nodes allows",
            hint=f"With gradient_accumulation_steps {accumulate} these can: {legal}. Choose it, --nodes-per-replica or --min-nodes so that "
            "all can",
        )
    return whole // ranks


class StepLoader:
    """Iterates over a loader of unbroken.data, epoch by epoch, and ends a step of `training` for each that it has given.

    `place` makes a batch ready, on its device. Everything else is the loader's.
    """

    def __init__(
        self, loader: Kept, training: HookedTraining, place: Callable[[Any], Any] | None = None
    ) -> None:
        self.loader, self.training = loader, training
        self._place = place
        self._open = False
        """The loop has all batches of a step that is not ended yet."""
        self._given_all = False

    def __iter__(self) -> Iterator[Any]:
        loader, training, place = self.loader, self.training, self._place
        if self._given_all and isinstance(loader, data.Loader):
            # The loop counted, and never asked whether more would come.
            loader.set_epoch(loader.epoch + 1)
        self._given_all = False
        self.end_step()
        for batch in loader:
            training.put_generators_back()
            self._open, self._given_all = loader.step_ends, loader.epoch_ends
            yield batch if place is None else place(batch)
            if self._open:
                self.end_step()
        training.put_generators_back()  # it was saved with the last batch of this epoch
        self._given_all = False

    def end_step(self) -> None:
        """Ends the step whose batches were all given, if that was not done yet."""
        if self._open:
            self._open = False
            self.training.end_step(self.loader.step)

    def finish(self) -> None:
        """The training is over."""
        self.end_step()
        self.training.finish()

    def set_epoch(self, epoch: int) -> None:
        """Nothing where the training is in that epoch already; a later one is begun."""
        if epoch != self.loader.epoch:
            self.loader.set_epoch(epoch)
        self._given_all = False

    def __len__(self) -> int:
        """Batches of an undisturbed epoch: a framework makes its schedule of it, the same after a rollback as before."""
        return self.loader.batches_of_epoch() if isinstance(self.loader, data.Loader) else len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


class EpochLoader(StepLoader):
    """A StepLoader of which each iteration is an epoch: one that was trained before the restart comes without a batch."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self._passes = 0

    @property
    def step(self) -> int:
        """Complete steps, over all epochs and attempts."""
        return int(self.loader.step)

    def epochs(self, total: int) -> Iterator[int]:
        """The epochs that are not trained yet, of `total`: may stand in place of `range(total)`."""
        for epoch in self.loader.epochs(total):
            self._passes = epoch
            yield epoch

    def __iter__(self) -> Iterator[Any]:
        self._passes += 1
        if self._passes > self.loader.epoch:
            yield from super().__iter__()
