"""Which samples a step trains on: a pure function of (seed, epoch, global sample index), with skips.

A *sample* has an absolute index that grows for ever: epoch = index // samples per epoch. Within an epoch the
samples are visited in a pseudo-random order that needs no memory: a keyed permutation (a Feistel network over the
next power of four, walked until it falls below the size), so any sample of any epoch is found in constant time.
A position is the set of absolute ranges already consumed and the set of ranges to skip; it does not depend on the
number of ranks, so a run that resumes on another world size goes on with the same samples.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import ContractError, UsageError

Range = tuple[int, int]
_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """The 64-bit finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Permutation:
    """A pseudo-random permutation of range(size), a pure function of (size, seed, epoch)."""

    ROUNDS = 6

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        if size < 1:
            raise UsageError("there is no sample to train on", hint="Give more text or a shorter sequence")
        self.size = size
        self._half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
        self._low = (1 << self._half) - 1
        key = mix(mix(seed & _MASK) ^ (epoch & _MASK))
        self._keys = [mix(key + i) for i in range(1, self.ROUNDS + 1)]

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(index)
        value = index
        while True:  # on average fewer than four turns: the domain is less than four times the size
            left, right = value >> self._half, value & self._low
            for key in self._keys:
                left, right = right, left ^ (mix(right ^ key) & self._low)
            value = left << self._half | right
            if value < self.size:
                return value


class SampleOrder:
    """Maps an absolute sample index to the sample in the data set."""

    def __init__(self, samples: int, seed: int) -> None:
        self.samples, self.seed = samples, seed
        self._epoch = -1
        self._permutation: Permutation | None = None

    def __getitem__(self, index: int) -> int:
        epoch, within = divmod(index, self.samples)
        if self._permutation is None or epoch != self._epoch:
            self._permutation, self._epoch = Permutation(self.samples, self.seed, epoch), epoch
        return self._permutation[within]


def merge(ranges: Iterable[Sequence[int]]) -> tuple[Range, ...]:
    """The same set of integers as sorted, disjoint, non-adjacent half-open ranges."""
    out: list[Range] = []
    for start, stop in sorted((int(a), int(b)) for a, b in ranges):
        if start < 0 or stop < start:
            raise UsageError(
                f"[{start}, {stop}) is not a range of samples",
                hint="Write it as START:STOP, STOP not included",
            )
        if start == stop:
            continue
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(stop, out[-1][1]))
        else:
            out.append((start, stop))
    return tuple(out)


@dataclass(frozen=True)
class SamplePosition:
    """Where the data stands: absolute half-open sample ranges, consumed ones and ones to skip.

    Both are sorted and disjoint. A skipped range stays in `skips` after it was passed, so that the position says
    what was never trained on. Skipping twice is skipping once.
    """

    consumed: tuple[Range, ...] = ()
    skips: tuple[Range, ...] = ()

    def skipping(self, ranges: Iterable[Sequence[int]]) -> SamplePosition:
        """This position with more ranges to skip; what was consumed before stays consumed."""
        return SamplePosition(self.consumed, merge([*self.skips, *ranges]))

    @property
    def next_index(self) -> int:
        """The first absolute index after everything consumed."""
        return self.consumed[-1][1] if self.consumed else 0

    def take(self, count: int) -> tuple[list[int], SamplePosition]:
        """The next `count` absolute indices, in order and without the skips, and the position after them."""
        starts = [s for s, _ in self.skips]
        taken: list[int] = []
        spans: list[Range] = []
        at = self.next_index
        while len(taken) < count:
            k = bisect.bisect_right(starts, at) - 1
            if k >= 0 and at < self.skips[k][1]:
                at = self.skips[k][1]
                continue
            limit = self.skips[k + 1][0] if k + 1 < len(self.skips) else at + count
            stop = min(limit, at + count - len(taken))
            taken.extend(range(at, stop))
            spans.append((at, stop))
            at = stop
        return taken, SamplePosition(merge([*self.consumed, *spans]), self.skips)

    def as_json(self, samples_per_epoch: int) -> dict[str, Any]:
        """The `position` of a checkpoint's manifest."""
        return {
            "epoch": self.next_index // samples_per_epoch,
            "samples": [list(r) for r in self.consumed],
            "skips": [list(r) for r in self.skips],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> SamplePosition:
        """The position that `as_json` wrote; raises ContractError for anything else."""
        try:
            return cls(merge(value["samples"]), merge(value["skips"]))
        except (KeyError, TypeError, ValueError, UsageError) as e:
            raise ContractError(f"the data position of the checkpoint cannot be read: {value!r}") from e
