"""`wrap`: which of our loaders goes around somebody's. Needs torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ...errors import UsageError
from ..ordering.orders import LengthGrouped, Order, Packed
from ..ordering.samplers import sampled, size_of
from .loader import BatchRecord, Loader
from .stateful import StatefulLoader


def wrap(
    loader: Any,
    *,
    seed: int | None = None,
    order: Order | None = None,
    accumulate: int = 1,
    global_batch: int | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    on_batch: Callable[[BatchRecord], object] | None = None,
    content: str | None = None,
) -> Loader | StatefulLoader:
    """A loader around torch's DataLoader or torchdata's StatefulDataLoader that can be in a Checkpointer's state.

    Dataset, batch size, workers and collation are the given loader's. Of a map-style dataset the order is ours: a
    function of `seed` (default: the sampler's, else 0), epoch and number, of the kind that the sampler says, or `order`.
    `accumulate` batches make a step; or with `global_batch` as many as it takes for so many samples over all ranks, however many
    ranks there are: multiply each batch's mean loss by `loader.weight`. `on_batch` is called with a BatchRecord for each batch. `content` names the
    dataset (default: the digests of a few samples, read at the first iteration). Raises UsageError for an iterable dataset without a
    state, and for a sampler whose order cannot be known.
    """
    if isinstance(loader, Loader | StatefulLoader):
        raise UsageError("this loader is wrapped already", hint="Leave out the second wrap()")
    if not all(hasattr(loader, name) for name in ("dataset", "collate_fn", "num_workers", "batch_sampler")):
        raise UsageError(
            f"a {type(loader).__qualname__} is not a loader of torch or torchdata",
            hint="Write wrap(DataLoader(dataset, batch_size=..., shuffle=True))",
        )
    if content is not None and (not isinstance(content, str) or not content):
        raise UsageError(
            f"content must be a text that names the dataset, not {content!r}",
            hint='Write content="my-data-v3"',
        )
    if on_batch is not None and not callable(on_batch):
        raise UsageError(
            f"on_batch must be a function of a BatchRecord, not {on_batch!r}", hint="Write on_batch=Journal()"
        )
    if global_batch is not None and accumulate != 1:
        raise UsageError(
            "accumulate and global_batch both say how many batches make a step",
            hint="Leave out accumulate: it follows from global_batch, batch_size and the number of ranks",
        )
    if isinstance(loader.dataset, IterableDataset):
        if order is not None:
            raise UsageError(
                "an iterable dataset has its own order", hint="Leave out order=, or use a map-style dataset"
            )
        if global_batch is not None:
            raise UsageError(
                "global_batch of an iterable dataset: which samples its ranks read is its own",
                hint="Use accumulate=, or a map-style dataset",
            )
        if on_batch is not None:
            raise UsageError(
                "on_batch of an iterable dataset: its samples have no numbers that a journal could hold",
                hint="Leave out on_batch=, or use a map-style dataset",
            )
        return StatefulLoader(
            _with_state(loader), seed=seed or 0, accumulate=accumulate, rank=rank, world_size=world_size,
            content=content,
        )  # fmt: skip
    if order is not None:
        _check_order(order, size_of(loader.dataset))
    found = sampled(loader)
    if seed is None:
        seed = found.seed or 0
    return Loader(
        loader, found, seed=seed, order=order, accumulate=accumulate, rank=rank, world_size=world_size,
        on_batch=on_batch, content=content, global_batch=global_batch,
    )  # fmt: skip


def _check_order(order: Any, samples: int) -> None:
    """Raises UsageError for what is no order, and for one that was made for another dataset."""
    if not isinstance(order, Order):
        raise UsageError(
            f"order must say size, indices and describe, which a {type(order).__qualname__} does not",
            hint="Use LengthGrouped, Packed, or a class of your own with these three",
        )
    if isinstance(order, LengthGrouped | Packed) and samples and order.size != samples:
        raise UsageError(
            f"the order has the lengths of {order.size} samples, and the dataset has {samples} samples",
            hint="Give the length of each sample of this dataset, in their order",
        )


def _with_state(loader: Any) -> Any:
    """The loader of an iterable dataset, if it has a state. Raises UsageError: whatever it reads could not be found again."""
    dataset = loader.dataset
    has_state = callable(getattr(dataset, "state_dict", None)) and callable(
        getattr(dataset, "load_state_dict", None)
    )
    if has_state and callable(getattr(loader, "state_dict", None)):
        return loader
    name = type(dataset).__qualname__
    if not has_state:
        raise UsageError(
            f"{name} is an IterableDataset without state_dict and load_state_dict: where it stands cannot be saved, so no "
            "resume of it can be exact",
            hint="Give it both and load it with torchdata's StatefulDataLoader, or make it a map-style dataset (__len__ and __getitem__)",
        )
    kind = "torch's DataLoader" if type(loader) is DataLoader else type(loader).__qualname__
    raise UsageError(
        f"{name} has a state, but {kind} does not ask its workers for it",
        hint="Load it with torchdata.stateful_dataloader.StatefulDataLoader",
    )
