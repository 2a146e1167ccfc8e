"""Pieces of a global tensor: where each lies in it and in a rank's file, kept compact over thousands of ranks.

A *box* is (offsets, sizes) in the global tensor. Consecutive ranks whose boxes advance by one constant step and
start at one file offset are one `ShardRun`: a tensor sharded evenly over 2048 ranks is one line of the manifest, not
2048.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

from ...errors import CheckpointCorrupt
from ...journal.checksummed import Fields

Box = tuple[tuple[int, ...], tuple[int, ...]]


class TensorShard(NamedTuple):
    """One rank's piece: its box in the global tensor, and where its bytes begin in that rank's file.

    `stored` is the name in the file: the tensor's own, or with "#1", "#2".. for a rank's further pieces.
    """

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    stored: str

    @property
    def box(self) -> Box:
        return self.offsets, self.sizes

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class ShardRun:
    """`count` shards on the ranks rank, rank+1, ..: the i-th has its offsets at offsets + i * step."""

    rank: int
    count: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    step: tuple[int, ...]
    start: int
    stored: str

    def shards(self) -> Iterator[TensorShard]:
        """The shards, by rank."""
        for i in range(self.count):
            at = tuple(o + i * s for o, s in zip(self.offsets, self.step, strict=True))
            yield TensorShard(self.rank + i, at, self.sizes, self.start, self.stored)

    def solid(self) -> Box | None:
        """The one box that all its shards fill together, or None if they do not."""
        moving = [d for d, n in enumerate(self.step) if n]
        if not moving or self.count == 1:
            return self.offsets, self.sizes
        (d,) = moving[:1]
        if len(moving) > 1 or self.step[d] != self.sizes[d]:
            return None
        return self.offsets, (*self.sizes[:d], self.sizes[d] * self.count, *self.sizes[d + 1 :])

    def as_json(self) -> list[object]:
        """[rank, count, offsets, sizes, step, start, stored]."""
        return [self.rank, self.count, self.offsets, self.sizes, self.step, self.start, self.stored]

    @classmethod
    def from_json(cls, value: object, ndim: int | None, world_size: int, where: str) -> ShardRun:
        """Reads `as_json`; raises CheckpointCorrupt. `ndim` None: of any number of dimensions."""
        if not isinstance(value, list) or len(value) != 7:
            raise CheckpointCorrupt("a shard's entry is malformed", where=where)
        names = ("rank", "count", "offsets", "sizes", "step", "start", "stored")
        f = Fields(dict(zip(names, value, strict=True)), where)
        step = f.items("step")
        run = cls(
            f.natural("rank"), f.natural("count"), f.naturals("offsets"), f.naturals("sizes"),
            tuple(step), f.natural("start"), f.text("stored"),
        )  # fmt: skip
        if {len(run.offsets), len(run.sizes), len(run.step)} != {len(run.sizes) if ndim is None else ndim}:
            raise CheckpointCorrupt("a shard has another number of dimensions than its tensor", where=where)
        if not all(type(n) is int and abs(n) < 2**63 for n in step) or run.count < 1:
            raise CheckpointCorrupt("a shard's entry is malformed", where=where)
        if run.rank + run.count > world_size:
            raise CheckpointCorrupt(
                f"a shard lies on rank {run.rank + run.count - 1}, of {world_size}", where=where
            )
        return run


class _Growing:
    """A run that may still get longer; changed in place, since a large checkpoint has millions of shards."""

    __slots__ = ("count", "due", "first", "step")

    def __init__(self, first: TensorShard) -> None:
        self.first, self.count = first, 1
        self.step = self.due = (0,) * len(first.offsets)

    def takes(self, s: TensorShard) -> bool:
        """Adds one more shard if it continues the run."""
        rank, offsets, sizes, start, stored = self.first
        if (s.rank, s.sizes, s.start, s.stored) != (rank + self.count, sizes, start, stored):
            return False
        if self.count == 1:
            self.step = tuple(b - a for a, b in zip(offsets, s.offsets, strict=True))
        elif s.offsets != self.due:
            return False
        self.due = tuple(map(add, s.offsets, self.step))
        self.count += 1
        return True

    def run(self) -> ShardRun:
        """The run as it is now."""
        rank, offsets, sizes, start, stored = self.first
        return ShardRun(rank, self.count, offsets, sizes, self.step, start, stored)


class RunBuilder:
    """Collects shards in rank order into as few runs as it can."""

    def __init__(self) -> None:
        self._done: list[_Growing] = []
        self._open: dict[str, _Growing] = {}

    def add(self, s: TensorShard) -> None:
        """Takes one more shard; ranks never go back."""
        run = self._open.get(s.stored)
        if run is not None:
            if run.takes(s):
                return
            self._done.append(run)
        self._open[s.stored] = _Growing(s)

    def finish(self) -> tuple[ShardRun, ...]:
        """All runs, by rank."""
        runs = [growing.run() for growing in (*self._done, *self._open.values())]
        return tuple(sorted(runs, key=lambda r: (r.rank, r.stored)))


def gap_in_runs(shape: tuple[int, ...], runs: Iterable[ShardRun]) -> str | None:
    """As `gap_in`, for the shards of these runs; a run that is solid along one dimension counts as one box."""
    runs = tuple(runs)
    solid = [r.solid() for r in runs]
    if None not in solid and gap_in(shape, (b for b in solid if b is not None)) is None:
        return None
    return gap_in(shape, (s.box for r in runs for s in r.shards()))


def gap_in(shape: tuple[int, ...], boxes: Iterable[Box]) -> str | None:
    """Why these boxes do not tile a tensor of this shape, or None if they do.

    The same box may come several times (replicas); different boxes must not overlap.
    """
    whole = math.prod(shape)
    kept: set[Box] = set()
    for offsets, sizes in boxes:
        if any(o < 0 or o + n > full for o, n, full in zip(offsets, sizes, shape, strict=True)):
            return f"the piece at {list(offsets)} of {list(sizes)} lies outside of {list(shape)}"
        if math.prod(sizes):
            kept.add((offsets, sizes))
    have = sum(math.prod(sizes) for _, sizes in kept)
    if have != whole:
        return f"its pieces hold {have} of {whole} elements"
    if len(kept) < 2:
        return None
    # Equal volumes: they tile exactly if no two overlap. Sweep along the dimension with the most cuts.
    dims = range(len(shape))
    along = max(dims, key=lambda d: len({o[d] for o, _ in kept}))
    live: list[Box] = []
    for box in sorted(kept, key=lambda b: b[0][along]):
        here = box[0][along]
        live = [b for b in live if b[0][along] + b[1][along] > here]
        for other in live:
            if all(
                box[0][d] < other[0][d] + other[1][d] and other[0][d] < box[0][d] + box[1][d] for d in dims
            ):
                return f"the pieces at {list(other[0])} and {list(box[0])} overlap"
        live.append(box)
    return None
