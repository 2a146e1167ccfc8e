"""The order that a sampler of torch or torchdata stands for. Needs torch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...errors import UsageError
from ..generators import seeded
from .mixture import Mixture
from .orders import Drawn, Listed, ListedBatches, Order, Sequential, Shuffled, Subset, WeightedOnce
from .permutation import key_of

_LIBRARIES = ("torch", "torchdata")


@dataclass(frozen=True)
class Sampled:
    """What the samplers of a loader say."""

    order: Order
    batch: int
    """Units of one rank's batch: samples, or whole batches of a batch sampler."""
    batched: bool
    """Whether a batch is collated from a list; otherwise it is one sample."""
    tail: str
    """What happens to the end of an epoch, see `Sharing`."""
    seed: int | None
    """Where the sampler names one."""
    rank: int | None = None
    world_size: int | None = None


def sampled(loader: Any) -> Sampled:
    """The order that a loader of a map-style dataset asks for. Raises UsageError for a sampler that cannot have one."""
    dataset, batches = loader.dataset, loader.batch_sampler
    if batches is None:
        order, seed, place = _order_of(loader.sampler, dataset)
        return Sampled(order, 1, False, _tail(False, loader.sampler), seed, *place)
    if _is(batches, "BatchSampler"):
        order, seed, place = _order_of(batches.sampler, dataset)
        tail = _tail(batches.drop_last, batches.sampler)
        return Sampled(order, int(batches.batch_size), True, tail, seed, *place)
    _refuse_sharing(batches)
    name = type(batches).__qualname__
    return Sampled(ListedBatches(_Listing(batches, size_of(dataset)), name), 1, True, "pad", None)


def size_of(dataset: Any) -> int:
    """How many samples it says it has; 0 where it does not say."""
    try:
        return len(dataset)
    except TypeError:
        return 0


def _tail(drop_last: bool, sampler: Any) -> str:
    trims = getattr(sampler, "drop_last", None)  # None: it shares nothing out
    if drop_last:
        return "pad-drop" if trims is False else "drop"
    return "trim" if trims else "pad"


def _order_of(sampler: Any, dataset: Any) -> tuple[Order, int | None, tuple[int | None, int | None]]:
    nowhere = (None, None)
    if _is(sampler, "SequentialSampler"):
        return _whole(dataset, False), None, nowhere
    if _is(sampler, "DistributedSampler", "StatefulDistributedSampler"):
        place = (int(sampler.rank), int(sampler.num_replicas))
        return _whole(dataset, bool(sampler.shuffle)), int(sampler.seed), place
    if _is(sampler, "RandomSampler"):
        size = int(sampler.num_samples)
        if sampler.replacement:
            return Drawn(len(dataset), size), None, nowhere
        return _whole(dataset, True) if size == len(dataset) else Shuffled(len(dataset), size), None, nowhere
    if _is(sampler, "SubsetRandomSampler"):
        return Subset(tuple(int(i) for i in sampler.indices)), None, nowhere
    if _is(sampler, "WeightedRandomSampler"):
        weights = tuple(float(w) for w in sampler.weights)
        size = int(sampler.num_samples)
        return (
            Drawn(len(weights), size, weights) if sampler.replacement else WeightedOnce(size, weights),
            None,
            nowhere,
        )
    _refuse_sharing(sampler)
    return Listed(_Listing(sampler, size_of(dataset)), type(sampler).__qualname__), None, nowhere


def _whole(dataset: Any, shuffle: bool) -> Order:
    if isinstance(dataset, Mixture):
        return dataset.order(shuffle=shuffle)
    size = len(dataset)
    return Shuffled(size, size) if shuffle else Sequential(size)


def _is(sampler: Any, *names: str) -> bool:
    """Whether it is torch's or torchdata's sampler of that name: a subclass may do anything."""
    kind = type(sampler)
    return kind.__name__ in names and kind.__module__.partition(".")[0] in _LIBRARIES


def _refuse_sharing(sampler: Any) -> None:
    replicas = getattr(sampler, "num_replicas", 1)
    if isinstance(replicas, int) and replicas > 1:
        raise UsageError(
            f"the sampler {type(sampler).__qualname__} shares the samples out to {replicas} ranks by itself, so their global order is unknown",
            hint="Build it with num_replicas=1 and rank=0: the loader of unbroken.data shares them out",
        )


class _Listing:
    """What a sampler of somebody else lists for an epoch, made a function of (seed, epoch)."""

    def __init__(self, sampler: Any, samples: int) -> None:
        self._sampler = sampler
        self._most = 100 * samples or 10**7
        """More than that is taken for a sampler that never ends."""

    def __call__(self, seed: int, epoch: int) -> Sequence[Any]:
        key = key_of(seed, epoch)
        with seeded(key):
            if callable(set_epoch := getattr(self._sampler, "set_epoch", None)):
                set_epoch(epoch)
            for held in vars(self._sampler).values() if hasattr(self._sampler, "__dict__") else ():
                _reseed(held, key)
            listed = list(itertools.islice(iter(self._sampler), self._most + 1))
        if len(listed) > self._most:
            raise UsageError(
                f"the sampler {type(self._sampler).__qualname__} has not ended after {self._most} samples",
                hint="Positions need epochs that end: let it list one epoch",
            )
        return listed


def _reseed(generator: Any, key: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(key & (1 << 63) - 1)
    elif isinstance(generator, random.Random):
        generator.seed(key)
    elif isinstance(generator, np.random.RandomState):
        generator.seed(key & 0xFFFFFFFF)
    elif isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        bits.state = type(bits)(key).state
