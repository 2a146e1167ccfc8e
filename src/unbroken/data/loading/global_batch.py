"""A step of so many samples whatever the number of ranks: how it is cut into rounds, and a round into parts. Pure numbers.

Each rank takes one batch in each round, so that all make as many forward passes (what collectives inside a model need), and
parts differ by one sample at most. Cut contiguously, a round is a stretch of the order: where the training stands after it is
one number, as ever.
"""

from __future__ import annotations

from typing import NamedTuple


class RoundPart(NamedTuple):
    """One rank's part of a round: [start, stop), counted in the samples of the step. Where there is none for it, one of another
    rank's stands in, with the weight 0."""

    start: int
    stop: int
    end: int
    """The end of the round."""
    weight: float
    """How much the mean of the part counts, so that the sum over a step's rounds and the mean over ranks is the mean of the step."""


def count_rounds(samples: int, batch: int, world_size: int) -> int:
    """How many batches each rank takes for a step of so many samples, none larger than `batch`."""
    return -(-samples // (batch * world_size))


def cut_step(samples: int, batch: int, rank: int, world_size: int) -> list[RoundPart]:
    """This rank's part of each round of a step, in their order."""
    rounds = count_rounds(samples, batch, world_size)
    parts, start = [], 0
    for i in range(rounds):
        size = samples // rounds + (i < samples % rounds)
        each, over = divmod(size, world_size)
        a = start + rank * each + min(rank, over)
        b = a + each + (rank < over)
        weight = (b - a) * world_size / samples
        if a == b:
            a, b = start, start + 1
        parts.append(RoundPart(a, b, start + size, weight))
        start += size
    return parts
