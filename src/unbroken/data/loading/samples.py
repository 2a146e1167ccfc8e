"""The dataset as our loader's workers see it: fetches a share, with the generators seeded for each sample. Needs torch.

Seeding three generators for each sample takes longer than many a dataset takes for the sample. Most draw no random
numbers at all, so a share is first fetched without; then it is looked whether any generator moved. If one did, the share is fetched
again, that generator seeded for each sample, and so are all later ones at once. What comes out is the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..digest import digest
from ..generators import Generators, Seen
from ..ordering.permutation import mix, mix_all

_COLLATING = 0x636F6C6C617465
_MASK = (1 << 64) - 1
Request = tuple[list[Any], "int | list[int]"]
"""What a worker is asked for: indices in the dataset (of units, a list for each), and the absolute numbers of the samples:
the first, where they are neighbours, else all."""


class Probe:
    """A request to read some samples, the first of them twice, and to say only their digests."""

    def __init__(self, indices: list[int]) -> None:
        self.indices = indices


class Samples:
    """A dataset whose items are whole batches, fetched by `Request`."""

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        seed: int,
        *,
        batched: bool,
        shape: str,
        digests: bool,
    ) -> None:
        self.dataset, self._collate = dataset, collate
        self._batched, self._shape, self.digests = batched, shape, digests
        """`shape` of what a share asks for: samples, packs (lists of samples), or batches (lists, to be one)."""
        self._seed = mix(mix(seed & _MASK) ^ 0x73616D706C6573)
        self._drawn: set[str] = set()
        """The generators that the dataset has been seen to draw from."""
        self._generators: Generators | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_generators": None}  # those of another process

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, request: Request) -> Any:  # what torch asks for a class to be a map-style dataset
        return self.__getitems__(request)

    def __getitems__(self, request: Request | Probe) -> Any:
        """The batch of a request; with `digests`, (batch, sum of its samples' digests)."""
        if self._generators is None:
            self._begin()
        if type(request) is Probe:
            return self._probe(request)
        indices, numbers = cast(Request, request)
        if self._shape == "batches":
            indices = [i for unit in indices for i in unit]
        g = self._generators
        assert g is not None
        before = g.see()
        try:
            if before.gauss[0]:
                g.hide_gauss(before)
            if not self._drawn:
                found = self._collated(self._fetch(indices), numbers)
                moved = g.moved(before)
                if not moved:
                    if before.gauss[0]:
                        g.put_back(before, ("numpy",))
                    return found
                self._drawn |= moved
                g.put_back(before)
            return self._fetch_seeded(indices, numbers, g, before)
        except BaseException:
            g.put_back(before)
            raise

    def _begin(self) -> None:
        from torch.utils.data import get_worker_info

        self._generators = Generators()
        if get_worker_info() is not None:
            # All workers alike, however many there are; who asks torch.initial_seed() gets the same everywhere.
            self._generators.seed(self._seed)

    def _fetch(self, indices: list[Any]) -> list[Any]:
        dataset = self.dataset
        if self._shape == "packs":
            return [[dataset[i] for i in unit] for unit in indices]
        many = getattr(dataset, "__getitems__", None)
        if many is not None and self._batched:
            found: list[Any] = many(indices)
            return found
        return [dataset[i] for i in indices]

    def _fetch_seeded(self, indices: list[Any], numbers: int | list[int], g: Generators, before: Seen) -> Any:
        """As `_fetch` and `_collated`, the generators seeded for each sample; they are put back."""
        count = sum(map(len, indices)) if self._shape == "packs" else len(indices)
        seeds: list[int] = mix_all(_numbers(numbers, count) ^ np.uint64(self._seed)).tolist()
        while True:
            drawn = tuple(self._drawn)
            data = self._fetch_each(indices, iter(seeds), g.seeder(drawn))
            g.seed(mix(seeds[0] ^ _COLLATING), drawn)
            found = self._collated(data, numbers)
            surprising = g.moved(before) - self._drawn
            g.put_back(before, self._drawn | surprising | ({"numpy"} if before.gauss[0] else set()))
            if not surprising:
                return found
            self._drawn |= surprising

    def _fetch_each(
        self, indices: list[Any], seeds: Iterator[int], seed: Callable[[int], object]
    ) -> list[Any]:
        dataset = self.dataset

        def one(index: int) -> Any:
            seed(next(seeds))
            return dataset[index]

        return [[one(i) for i in u] for u in indices] if self._shape == "packs" else [one(i) for i in indices]

    def _collated(self, data: list[Any], numbers: int | list[int]) -> Any:
        if not self.digests:
            return self._collate(data if self._batched else data[0])
        flat = [s for u in data for s in u] if self._shape == "packs" else data
        each = [digest(s) for s in flat]  # before the collation, which may change them
        total = (
            sum(mix(n ^ d) for n, d in zip(_numbers(numbers, len(flat)).tolist(), each, strict=True)) & _MASK
        )
        return self._collate(data if self._batched else data[0]), total

    def _probe(self, probe: Probe) -> tuple[list[int], bool]:
        """(digests of the samples, whether the first one was the same twice)."""
        g = self._generators
        assert g is not None
        before = g.see()
        try:
            found = []
            for i in (probe.indices[0], *probe.indices):
                g.seed(mix(self._seed ^ i))
                found.append(digest(self.dataset[i]))
        finally:
            g.put_back(before)
        return found[1:], found[0] == found[1]


def _numbers(numbers: int | list[int], count: int) -> NDArray[np.uint64]:
    if isinstance(numbers, int):
        return np.arange(numbers, numbers + count, dtype=np.uint64)
    return np.asarray(numbers, np.uint64)
