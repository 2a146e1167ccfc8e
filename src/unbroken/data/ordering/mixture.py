"""Several datasets in one, by weights: which sample comes when is a pure function of its number. numpy, no torch."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ..arguments import whole_number
from .permutation import Numbers, key_of, mix, permute

BLOCK = 4096
"""Of so many samples in a row each source has its share exactly; weights are kept to one part in so many."""


class Mixture:
    """A map-style dataset of several: `weights[i]` is the share of samples that come from `datasets[i]`.

    An epoch has `samples` samples (default: as many as all have together). A source that is used up begins again in
    another order, whether or not the epoch has ended; one that is not goes on in the next epoch where it stood.
    """

    def __init__(
        self, datasets: Sequence[Any], weights: Sequence[float], *, samples: int | None = None
    ) -> None:
        self.datasets = [] if datasets is None else list(datasets)
        given = np.asarray(() if weights is None else weights)  # a list, an array or a tensor
        if not self.datasets or given.shape != (len(self.datasets),):
            raise UsageError(
                f"{len(self.datasets)} datasets and {given.size} weights", hint="Give each dataset a weight"
            )
        if given.dtype.kind not in "iuf" or not ((given > 0) & np.isfinite(given)).all():
            raise UsageError(
                f"the weights {given.tolist()} are not all numbers above 0",
                hint="Leave out what has no weight",
            )
        if without := next((d for d in self.datasets if not hasattr(d, "__len__")), None):
            raise UsageError(
                f"a {type(without).__qualname__} does not say how many samples it has",
                hint="Give it a __len__",
            )
        self.sizes = [len(d) for d in self.datasets]
        if not all(self.sizes):
            raise UsageError(f"dataset {self.sizes.index(0)} of the mixture is empty", hint="Leave it out")
        self.starts = np.cumsum([0, *self.sizes]).tolist()
        self.samples: int = self.starts[-1] if samples is None else whole_number("samples", samples, 1)
        self.shares = apportion(given.astype(float).tolist())

    def __len__(self) -> int:
        """All samples of all datasets (an epoch has `samples`)."""
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        which = bisect.bisect_right(self.starts, index) - 1
        return self.datasets[which][index - self.starts[which]]

    def order(self, *, shuffle: bool = True) -> MixtureOrder:
        """The order of its samples."""
        return MixtureOrder(tuple(self.sizes), self.shares, self.samples, shuffle)


@dataclass(frozen=True)
class MixtureOrder:
    """The order of a `Mixture`: indices are those of all its datasets one behind the other."""

    sizes: tuple[int, ...]
    shares: tuple[int, ...]
    size: int
    shuffle: bool = True

    def indices(self, seed: int, epoch: int, offsets: Numbers) -> Numbers:
        numbers = epoch * self.size + offsets
        out = np.empty(len(numbers), np.int64)
        blocks = numbers // BLOCK
        starts = np.cumsum([0, *self.sizes])
        for b in np.unique(blocks):
            here = np.flatnonzero(blocks == b)
            source, place = _block(self.shares, key_of(seed, int(b)))
            inside = numbers[here] - b * BLOCK
            for s, size in enumerate(self.sizes):
                mine = here[source[inside] == s]
                drawn = b * self.shares[s] + place[numbers[mine] - b * BLOCK]
                for turn in np.unique(drawn // size):
                    now = drawn // size == turn
                    at = drawn[now] % size
                    if self.shuffle:
                        at = permute(size, key_of(mix(seed ^ mix(s + 1)), int(turn)), at)
                    out[mine[now]] = starts[s] + at
        return out

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "mixture", "size": self.size, "sizes": list(self.sizes), "shares": list(self.shares),
            "shuffle": self.shuffle,
        }  # fmt: skip


def apportion(weights: list[float]) -> tuple[int, ...]:
    """Whole shares of a block, by largest remainders, none of them 0."""
    if len(weights) > BLOCK:
        raise UsageError(
            f"a mixture of {len(weights)} datasets", hint=f"At most {BLOCK} can have a share each"
        )
    total = sum(weights)
    exact = [w / total * BLOCK for w in weights]
    shares = [max(1, int(x)) for x in exact]
    while sum(shares) != BLOCK:
        over = sum(shares) > BLOCK
        rest = [(s - x if over else x - s, -i) for i, (s, x) in enumerate(zip(shares, exact, strict=True))]
        able = [r for r, s in zip(rest, shares, strict=True) if not over or s > 1]
        k = -max(able)[1]
        shares[k] += -1 if over else 1
    return tuple(shares)


@lru_cache(maxsize=64)
def _block(shares: tuple[int, ...], key: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each sample of a block its source, and how many of that source come before it in the block."""
    listed = np.repeat(np.arange(len(shares)), shares)
    source = listed[permute(BLOCK, key, np.arange(BLOCK))]
    place = np.empty(BLOCK, np.int64)
    for s in range(len(shares)):
        mine = source == s
        place[mine] = np.arange(int(mine.sum()))
    return source, place
