"""What each rank gets of each batch: a pure function of order, position and world size. numpy, no torch.

A *global batch* is what all ranks take for one batch each: `batch` units times the world size, neighbours in the
order. Rank r has its r-th part. What is left at the end of an epoch (the *tail*) is dropped, or shared equally; where it
cannot be shared equally, a few are left out ("trim"), or units from the beginning of the epoch are given once more
("pad"), as torch's DistributedSampler does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..ordering.orders import ListedBatches, Order, UnitOrder
from ..ordering.permutation import Numbers
from ..position import Ranges, count, subtract
from .global_batch import count_rounds, cut_step

_BLOCK = 16384
"""Samples whose indices are computed at once: numpy's calls cost as much as a thousand numbers."""


class Share(NamedTuple):
    """One rank's part of a global batch. (A named tuple: thousands are made and sent to workers each second.)"""

    indices: list[Any]
    """In the dataset; of units, a list for each."""
    numbers: int | list[int]
    """The absolute numbers of its samples, in their order (units one behind the other); the first, where they are neighbours."""
    start: int
    stop: int
    """The absolute numbers that all ranks have consumed after it: everything in [start, stop) but the skips."""
    last: bool
    """Nothing of the epoch comes after it."""
    weight: float = 1.0
    """How much it counts in its step, where steps have a number of samples of their own (`global_batch`)."""


class _Left:
    """Samples that are left, as ranges of absolute numbers: places 0.. are those that are not skipped."""

    def __init__(self, ranges: Ranges) -> None:
        self._firsts = np.asarray([a for a, _ in ranges], np.int64)
        self._places = np.cumsum([0, *(b - a for a, b in ranges)])
        self.total = int(self._places[-1])
        self.is_one = len(ranges) == 1

    def number(self, of: Numbers) -> Numbers:
        """The absolute numbers at these places."""
        k = np.searchsorted(self._places, of, side="right") - 1
        found: Numbers = self._firsts[k] + of - self._places[k]
        return found


@dataclass(frozen=True)
class Sharing:
    """How an order is shared out."""

    order: Order
    seed: int
    batch: int
    """Units of one rank's batch."""
    tail: str = "pad"
    """pad, trim, drop, or pad-drop: what is left is dropped unless, filled up for all ranks to have as much, it is a
    whole batch (a DistributedSampler that fills up, in a loader that drops)."""
    rank: int = 0
    world_size: int = 1
    global_batch: int = 0
    """Samples of a step over all ranks, in rounds of at most `batch` for each; 0: a step has as many as its batches. What is left
    at the end of an epoch is a step of its own then, or dropped."""

    def epoch(self, epoch: int, start: int, skips: Ranges) -> Iterator[Share]:
        """This rank's shares of an epoch from the absolute number `start` on."""
        if isinstance(self.order, UnitOrder):
            return self._units(self.order, epoch, start, skips)
        if self.global_batch:
            return self._steps(epoch, start, skips)
        return self._samples(epoch, start, skips)

    def batches(self, epoch: int, skips: Ranges, start: int | None = None) -> int:
        """How many batches an epoch has, from the absolute number `start` on. Raises TypeError where that is not known without
        making all packs."""
        size = self.order.size
        begin = epoch * size
        start = begin if start is None else start
        whole = self.batch * self.world_size
        if isinstance(self.order, UnitOrder):
            if not isinstance(self.order, ListedBatches):
                raise TypeError("how many packs an epoch has is known only once they are made")
            left = len(self.order.unit_ends(self.seed, epoch, start - begin, size))
        else:
            left = count(subtract([(start, begin + size)], skips))
        if self.global_batch:
            steps, rest = divmod(left, self.global_batch)
            short = 0 if self._drops else count_rounds(rest, self.batch, self.world_size)
            return steps * count_rounds(self.global_batch, self.batch, self.world_size) + short
        return left // whole + bool(self._tail(left % whole))

    @property
    def _drops(self) -> bool:
        """Whether a step that is short at the end of an epoch is left out."""
        return self.tail in ("drop", "pad-drop")

    def _steps(self, epoch: int, start: int, skips: Ranges) -> Iterator[Share]:
        begin, each = epoch * self.order.size, self.global_batch
        left = _Left(subtract([(start, begin + self.order.size)], skips))
        total = left.total - left.total % each if self._drops else left.total
        whole = cut_step(each, self.batch, self.rank, self.world_size)
        end = start
        for at in range(0, total, each):
            short = total - at < each
            for part in cut_step(total - at, self.batch, self.rank, self.world_size) if short else whole:
                numbers = left.number(np.arange(at + part.start, at + part.stop))
                indices = self.order.indices(self.seed, epoch, numbers - begin).tolist()
                stop = int(left.number(np.asarray([at + part.end - 1]))[0]) + 1
                yield Share(indices, numbers.tolist(), end, stop, at + part.end == total, part.weight)
                end = stop

    def _samples(self, epoch: int, start: int, skips: Ranges) -> Iterator[Share]:
        size, begin = self.order.size, epoch * self.order.size
        whole, mine = self.batch * self.world_size, self.batch * self.rank
        left = _Left(subtract([(start, begin + size)], skips))
        total, number = left.total, left.number
        full = total // whole
        rest = self._tail(total - full * whole)
        at_once = max(1, _BLOCK // self.batch)
        end = start
        for block in range(0, full, at_once):
            steps = np.arange(block, min(block + at_once, full))
            numbers = number((steps[:, None] * whole + mine + np.arange(self.batch)[None, :]).ravel())
            indices = self.order.indices(self.seed, epoch, numbers - begin).tolist()
            stops = (number(steps * whole + whole - 1) + 1).tolist()
            plain = left.is_one
            for i, stop in enumerate(stops):
                a = i * self.batch
                b = a + self.batch
                first = int(numbers[a])
                own = first if plain else numbers[a:b].tolist()
                yield Share(indices[a:b], own, end, stop, not rest and block + i == full - 1)
                end = stop
        if rest:
            each = -(-rest // self.world_size)
            own_places = np.arange(full * whole + self.rank * each, full * whole + (self.rank + 1) * each)
            over = own_places >= full * whole + rest
            numbers = np.empty(each, np.int64)
            numbers[~over] = number(own_places[~over])
            if over.any():
                numbers[over] = self._again(own_places[over] - full * whole - rest, epoch, skips)
            indices = self.order.indices(self.seed, epoch, numbers - begin).tolist()
            stop = int(number(np.asarray([full * whole + rest - 1]))[0]) + 1
            yield Share(indices, numbers.tolist(), end, stop, True)

    def _tail(self, left: int) -> int:
        """How many of the units that are left at the end of an epoch, too few for a batch, are used."""
        if self.tail == "trim":
            return left - left % self.world_size
        if self.tail == "pad-drop":
            filled = -(-left // self.world_size) * self.world_size
            return left if filled == self.batch * self.world_size else 0
        return left if self.tail == "pad" else 0

    def _again(self, places: Numbers, epoch: int, skips: Ranges) -> Numbers:
        """The numbers of the samples from the beginning of the epoch that fill up the last batch."""
        size, begin = self.order.size, epoch * self.order.size
        usable = subtract([(begin, begin + size)], skips)
        firsts = np.asarray([a for a, _ in usable], np.int64)
        sums = np.cumsum([0, *(b - a for a, b in usable)])
        places = places % sums[-1]
        k = np.searchsorted(sums, places, side="right") - 1
        found: Numbers = firsts[k] + places - sums[k]
        return found

    def _units(self, order: UnitOrder, epoch: int, start: int, skips: Ranges) -> Iterator[Share]:
        begin = epoch * order.size
        whole = self.batch * self.world_size
        end, at = start, start - begin
        waiting: list[list[int]] = []
        stops: list[int] = []
        while True:
            while len(waiting) <= whole:  # one more than needed, to know which is the last
                ends = order.unit_ends(self.seed, epoch, at, max(whole, 16))
                if not ends:
                    break
                for e in ends:
                    samples = [n for a, b in subtract([(begin + at, begin + e)], skips) for n in range(a, b)]
                    at = e
                    if samples:
                        waiting.append(samples)
                        stops.append(begin + e)
            take = whole if len(waiting) >= whole else self._tail(len(waiting))
            if not take:
                return
            taken, stop = waiting[:take], stops[take - 1]
            del waiting[:take], stops[:take]
            last = take < whole or (len(waiting) < whole and not self._tail(len(waiting)))
            each = -(-len(taken) // self.world_size)
            if len(taken) % self.world_size:
                again = self._first_units(order, epoch, skips)
                taken = (taken + again * self.world_size)[: each * self.world_size]
            mine = taken[self.rank * each : (self.rank + 1) * each]
            flat = np.asarray([n for u in mine for n in u], np.int64)
            indices = order.indices(self.seed, epoch, flat - begin).tolist()
            units, k = [], 0
            for u in mine:
                units.append(indices[k : k + len(u)])
                k += len(u)
            yield Share(units, flat.tolist(), end, stop, last)
            end = stop

    def _first_units(self, order: UnitOrder, epoch: int, skips: Ranges) -> list[list[int]]:
        begin, at, found = epoch * order.size, 0, []
        for e in order.unit_ends(self.seed, epoch, 0, 2 * self.world_size):
            samples = [n for a, b in subtract([(begin + at, begin + e)], skips) for n in range(a, b)]
            at = e
            if samples:
                found.append(samples)
        return found or [[begin]]
