"""The dataset as our loader's workers see it: fetches a share, with the generators seeded for each sample. Needs torch.

Seeding three generators for each sample takes longer than many a dataset takes for the sample. Most draw no random
numbers at all, so a share is first fetched without; then it is looked whether any generator moved. If one did, the share is fetched
again, that generator seeded for each sample, and so are all later ones at once. What comes out is the same either way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .digest import digest
from .generators import Generators, Seen
from .permutation import mix
from .shares import Share

_COLLATING = 0x636F6C6C617465
_MASK = (1 << 64) - 1


class Probe:
    """A request to read some samples, the first of them twice, and to say only their digests."""

    def __init__(self, indices: list[int]) -> None:
        self.indices = indices


class Samples:
    """A dataset whose items are whole batches, fetched by `Share`."""

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

    def __getitem__(self, share: Share) -> Any:  # what torch asks for a class to be a map-style dataset
        return self.__getitems__(share)

    def __getitems__(self, share: Share | Probe) -> Any:
        """The batch of a share; with `digests`, (batch, sum of its samples' digests)."""
        if self._generators is None:
            self._begin()
        if isinstance(share, Probe):
            return self._probe(share)
        g = self._generators
        assert g is not None
        before = g.see()
        try:
            if before.gauss[0]:
                g.hide_gauss(before)
            if not self._drawn:
                found = self._fetch(share)
                moved = g.moved(before)
                if not moved:
                    if before.gauss[0]:
                        g.put_back(before, ("numpy",))
                    return found
                self._drawn |= moved
                g.put_back(before)
            return self._fetch_seeded(share, g, before)
        except BaseException:
            g.put_back(before)
            raise

    def _begin(self) -> None:
        from torch.utils.data import get_worker_info

        self._generators = Generators()
        if get_worker_info() is not None:
            # All workers alike, however many there are; who asks torch.initial_seed() gets the same everywhere.
            self._generators.seed(self._seed)

    def _asked(self, share: Share) -> list[Any]:
        if self._shape == "batches":
            return [i for unit in share.indices for i in unit]
        return share.indices

    def _fetch(self, share: Share) -> Any:
        indices, dataset = self._asked(share), self.dataset
        many = getattr(dataset, "__getitems__", None)
        if self._shape == "packs":
            data = [[dataset[i] for i in unit] for unit in indices]
        elif many is not None and self._batched:
            data = many(indices)
        else:
            data = [dataset[i] for i in indices]
        return self._collated(data, share)

    def _fetch_seeded(self, share: Share, g: Generators, before: Seen) -> Any:
        while True:
            drawn = tuple(self._drawn)
            numbers = iter(share.numbers)
            found = self._fetch_each(share, g, drawn, numbers)
            surprising = g.moved(before) - self._drawn
            g.put_back(before, self._drawn | surprising | ({"numpy"} if before.gauss[0] else set()))
            if not surprising:
                return found
            self._drawn |= surprising

    def _fetch_each(self, share: Share, g: Generators, drawn: tuple[str, ...], numbers: Any) -> Any:
        seed, dataset = self._seed, self.dataset

        def one(index: int) -> Any:
            g.seed(mix(seed ^ next(numbers)), drawn)
            return dataset[index]

        indices = self._asked(share)
        packs = self._shape == "packs"
        data = [[one(i) for i in u] for u in indices] if packs else [one(i) for i in indices]
        g.seed(mix(seed ^ _COLLATING ^ next(iter(share.numbers))), drawn)
        return self._collated(data, share)

    def _collated(self, data: list[Any], share: Share) -> Any:
        batch = self._collate(data if self._batched else data[0])
        if not self.digests:
            return batch
        flat = [s for u in data for s in u] if self._shape == "packs" else data
        total = sum(mix(n ^ digest(s)) for n, s in zip(share.numbers, flat, strict=True)) & _MASK
        return batch, total

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
