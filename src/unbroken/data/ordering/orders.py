"""Orders: which sample of the dataset has which number, a pure function of (seed, epoch, offset in the epoch).

An order has no state, so any part of any epoch is found at once, on every rank, after every resume. Most count single
samples. Some make *units* of several neighbouring samples (the batches of a batch sampler, packs of short texts): a
training takes whole units, a position counts samples all the same. numpy, no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...errors import UsageError
from ..arguments import whole_number
from .permutation import Numbers, key_of, mix, mix_all, permute


@runtime_checkable
class Order(Protocol):
    """What a loader needs to know of an order."""

    @property
    def size(self) -> int:
        """Samples of an epoch."""
        ...

    def indices(self, seed: int, epoch: int, offsets: Numbers) -> Numbers:
        """The indices in the dataset of the samples at these offsets of an epoch."""
        ...

    def describe(self) -> dict[str, Any]:
        """What makes it this order and no other, as JSON: it goes into the fingerprint."""
        ...


@runtime_checkable
class UnitOrder(Order, Protocol):
    """An order whose samples are taken in units of neighbours."""

    def unit_ends(self, seed: int, epoch: int, start: int, count: int) -> list[int]:
        """The offsets at which the next `count` units from `start` end; fewer at the end of the epoch."""
        ...


@dataclass(frozen=True)
class Sequential:
    """The samples as they lie in the dataset."""

    size: int

    def indices(self, seed: int, epoch: int, offsets: Numbers) -> Numbers:
        return offsets

    def describe(self) -> dict[str, Any]:
        return {"kind": "sequential", "size": self.size}


@dataclass(frozen=True)
class Shuffled:
    """Every sample of `population` once an epoch, or `size` of them; more than there are begin again in another order."""

    population: int
    size: int

    def indices(self, seed: int, epoch: int, offsets: Numbers) -> Numbers:
        if self.size <= self.population:
            return permute(self.population, key_of(seed, epoch), offsets)
        rounds = -(-self.size // self.population)
        out = np.empty(len(offsets), np.int64)
        of = offsets // self.population
        for r in np.unique(of):
            here = of == r
            key = key_of(seed, epoch * rounds + int(r))
            out[here] = permute(self.population, key, offsets[here] % self.population)
        return out

    def describe(self) -> dict[str, Any]:
        return {"kind": "shuffled", "size": self.size, "population": self.population}


@dataclass(frozen=True)
class Drawn:
    """`size` draws an epoch with replacement, all equally likely, or by `weights`."""

    population: int
    size: int
    weights: tuple[float, ...] = field(default=(), repr=False)

    def indices(self, seed: int, epoch: int, offsets: Numbers) -> Numbers:
        bits = mix_all(offsets.astype(np.uint64) ^ np.uint64(key_of(seed, epoch)))
        if not self.weights:
            drawn: Numbers = (bits % np.uint64(self.population)).astype(np.int64)
            return drawn
        sums = _sums(self.weights)
        # 53 bits make a double in [0, 1) exactly.
        at = np.searchsorted(sums, (bits >> np.uint64(11)) * 2.0**-53 * sums[-1], side="right")
        found: Numbers = np.minimum(at, self.population - 1).astype(np.int64)
        return found

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "drawn", "size": self.size, "population": self.population, "weights": _digest(self.weights)
        }  # fmt: skip


@dataclass(frozen=True)
class WeightedOnce:
    """`size` samples an epoch without replacement, the heavier ones rather earlier (Efraimidis and Spirakis 2006)."""

    size: int
    weights: tuple[float, ...] = field(repr=False)

    def indices(self, seed: int, epoch: int, offsets: Numbers) -> Numbers:
        return _weighted_order(self.weights, key_of(seed, epoch))[offsets]

    def describe(self) -> dict[str, Any]:
        return {"kind": "weighted once", "size": self.size, "weights": _digest(self.weights)}


@dataclass(frozen=True)
class Subset:
    """Some samples of the dataset, shuffled or as listed."""

    chosen: tuple[int, ...] = field(repr=False)
    shuffle: bool = True

    @property
    def size(self) -> int:
        return len(self.chosen)

    def indices(self, seed: int, epoch: int, offsets: Numbers) -> Numbers:
        if self.shuffle:
            offsets = permute(self.size, key_of(seed, epoch), offsets)
        return _array(self.chosen)[offsets]

    def describe(self) -> dict[str, Any]:
        return {"kind": "subset", "size": self.size, "shuffle": self.shuffle, "chosen": _digest(self.chosen)}


class Listed:
    """What somebody else's sampler lists for an epoch: `make(seed, epoch)` gives indices.

    It must give the same list for the same seed and epoch; it is kept for the epoch that is asked for last.
    """

    def __init__(self, make: Callable[[int, int], Sequence[Any]], name: str) -> None:
        self._make, self._name = make, name
        self._known: dict[tuple[int, int], tuple[Numbers, list[int]]] = {}
        self._size: int | None = None

    @property
    def size(self) -> int:
        if self._size is None:
            self._size = len(self._epoch(0, 0)[0])
        return self._size

    def _flat(self, listed: list[Any]) -> tuple[Numbers, list[int]]:
        return _as_array(listed), []

    def _epoch(self, seed: int, epoch: int) -> tuple[Numbers, list[int]]:
        found = self._known.get((seed, epoch))
        if found is None:
            found = self._flat(list(self._make(seed, epoch)))
            if self._size is not None and len(found[0]) != self._size:
                raise UsageError(
                    f"the sampler {self._name} lists {len(found[0])} samples in epoch {epoch}, and {self._size} in the first",
                    hint="Positions need epochs of one length: let the sampler list as many in each",
                )
            self._known = {(seed, epoch): found}
        return found

    def indices(self, seed: int, epoch: int, offsets: Numbers) -> Numbers:
        return self._epoch(seed, epoch)[0][offsets]

    def describe(self) -> dict[str, Any]:
        return {"kind": "listed", "sampler": self._name, "size": self.size}


class ListedBatches(Listed):
    """What somebody else's batch sampler lists: `make` gives batches of indices, which stay together."""

    def _flat(self, listed: list[Any]) -> tuple[Numbers, list[int]]:
        ends = np.cumsum([len(b) for b in listed], dtype=np.int64).tolist()
        return _as_array([i for b in listed for i in b]), ends

    def unit_ends(self, seed: int, epoch: int, start: int, count: int) -> list[int]:
        ends = self._epoch(seed, epoch)[1]
        k = int(np.searchsorted(ends, start, side="right"))
        return ends[k : k + count]


@dataclass(frozen=True)
class LengthGrouped:
    """Shuffled, with neighbours of like length: windows of `groups` x `group` samples, sorted by length, cut into
    groups, the groups shuffled. `group` is the global batch in samples: it must not change with the world size.
    """

    lengths: Sequence[int] | NDArray[Any] = field(repr=False)
    group: int
    groups: int = 50

    def __post_init__(self) -> None:
        whole_number("group", self.group, 1)
        whole_number("groups", self.groups, 1)
        _lengths(self.lengths)

    @property
    def size(self) -> int:
        return len(self.lengths)

    def indices(self, seed: int, epoch: int, offsets: Numbers) -> Numbers:
        out = np.empty(len(offsets), np.int64)
        window = self.group * self.groups
        of = offsets // window
        for w in np.unique(of):
            here = of == w
            out[here] = _sorted_window(_Held(self.lengths), self.group, window, seed, epoch, int(w))[
                offsets[here] - w * window
            ]
        return out

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "length grouped", "size": self.size, "group": self.group, "groups": self.groups,
            "lengths": _digest(self.lengths),
        }  # fmt: skip


@dataclass(frozen=True)
class Packed:
    """Shuffled, in packs of several samples of together at most `budget` (say, tokens): a batch has packs.

    Within a window of `window` samples the packs are filled longest first, each sample into the first pack that has
    room. The loader hands `collate_fn` a list of packs, each a list of samples. A sample longer than the budget
    is a pack of its own.
    """

    lengths: Sequence[int] | NDArray[Any] = field(repr=False)
    budget: int
    window: int = 1024
    shuffle: bool = True

    def __post_init__(self) -> None:
        whole_number("budget", self.budget, 1)
        whole_number("window", self.window, 1)
        _lengths(self.lengths)

    @property
    def size(self) -> int:
        return len(self.lengths)

    def indices(self, seed: int, epoch: int, offsets: Numbers) -> Numbers:
        out = np.empty(len(offsets), np.int64)
        of = offsets // self.window
        for w in np.unique(of):
            here = of == w
            out[here] = self._window(seed, epoch, int(w))[0][offsets[here] - w * self.window]
        return out

    def unit_ends(self, seed: int, epoch: int, start: int, count: int) -> list[int]:
        found: list[int] = []
        at = start
        while len(found) < count and at < self.size:
            w = at // self.window
            ends = self._window(seed, epoch, w)[1]
            found += [w * self.window + e for e in ends if w * self.window + e > at][: count - len(found)]
            at = found[-1]
        return found

    def _window(self, seed: int, epoch: int, w: int) -> tuple[Numbers, list[int]]:
        return _packed_window(_Held(self.lengths), self.budget, self.window, self.shuffle, seed, epoch, w)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "packed", "size": self.size, "budget": self.budget, "window": self.window,
            "shuffle": self.shuffle, "lengths": _digest(self.lengths),
        }  # fmt: skip


class _Held:
    """A large sequence as a key of a cache, by identity."""

    __slots__ = ("array",)

    def __init__(self, values: Sequence[int] | NDArray[Any]) -> None:
        self.array = _lengths(values)

    def __hash__(self) -> int:
        return id(self.array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and other.array is self.array


_held: list[tuple[Any, NDArray[np.int64]]] = []


def _lengths(values: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    for known, array in _held:
        if known is values:
            return array
    given = np.asarray(values)
    if given.ndim != 1 or (given.size and (given.dtype.kind not in "iu" or int(given.min()) < 0)):
        raise UsageError(
            "lengths must be one whole number from 0 up for each sample",
            hint="Give a list or an array of them",
        )
    array = given.astype(np.int64, copy=False)
    _held.append((values, array))
    del _held[:-8]
    return array


@lru_cache(maxsize=64)
def _sorted_window(held: _Held, group: int, window: int, seed: int, epoch: int, w: int) -> Numbers:
    lengths = held.array
    key = key_of(seed, epoch)
    offsets = np.arange(w * window, min((w + 1) * window, len(lengths)))
    chosen = permute(len(lengths), key, offsets)
    chosen = chosen[np.lexsort((chosen, -lengths[chosen]))]
    whole = len(chosen) // group
    if whole < 2:
        return chosen
    order = permute(whole, mix(key ^ mix(w)), np.arange(whole))
    # A rest that is no whole group stays last, so that the others keep their places.
    return np.concatenate(
        [chosen[: whole * group].reshape(whole, group)[order].ravel(), chosen[whole * group :]]
    )


@lru_cache(maxsize=64)
def _packed_window(
    held: _Held, budget: int, window: int, shuffle: bool, seed: int, epoch: int, w: int
) -> tuple[Numbers, list[int]]:
    lengths = held.array
    key = key_of(seed, epoch)
    offsets = np.arange(w * window, min((w + 1) * window, len(lengths)))
    chosen = permute(len(lengths), key, offsets) if shuffle else offsets
    packs: list[list[int]] = []
    room: list[int] = []
    for i in chosen[np.lexsort((np.arange(len(chosen)), -lengths[chosen]))].tolist():
        n = int(lengths[i])
        at = next((k for k, r in enumerate(room) if r >= n), None)
        if at is None:
            packs.append([i])
            room.append(budget - n)
        else:
            packs[at].append(i)
            room[at] -= n
    if shuffle:
        packs = [packs[k] for k in permute(len(packs), mix(key ^ mix(w)), np.arange(len(packs))).tolist()]
    ends = np.cumsum([len(p) for p in packs]).tolist()
    return np.asarray([i for p in packs for i in p], np.int64), ends


def _as_array(items: list[Any]) -> Any:
    """Of indices; of anything else that a dataset is asked for (names, pairs) an array of objects."""
    if all(isinstance(i, int | np.integer) for i in items):
        return np.asarray(items, np.int64)
    found = np.empty(len(items), object)
    for at, item in enumerate(items):
        found[at] = item
    return found


@lru_cache(maxsize=8)
def _sums(weights: tuple[float, ...]) -> NDArray[np.float64]:
    return np.cumsum(np.asarray(weights, np.float64))


@lru_cache(maxsize=8)
def _array(values: tuple[int, ...]) -> Numbers:
    return np.asarray(values, np.int64)


@lru_cache(maxsize=4)
def _weighted_order(weights: tuple[float, ...], key: int) -> Numbers:
    w = np.asarray(weights, np.float64)
    bits = mix_all(np.arange(len(w), dtype=np.uint64) ^ np.uint64(key))
    u = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    with np.errstate(divide="ignore"):
        keys = np.where(w > 0, np.log(u) / w, -np.inf)
    return np.argsort(-keys, kind="stable")


def _digest(values: Sequence[Any] | NDArray[Any]) -> str:
    if not len(values):
        return ""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(np.asarray(values)).tobytes())


def fingerprint(identity: dict[str, Any]) -> str:
    """The name of a dataset and its order: equal only where all of `identity` is."""
    return xxhash.xxh3_128_hexdigest(json.dumps(identity, sort_keys=True).encode())
