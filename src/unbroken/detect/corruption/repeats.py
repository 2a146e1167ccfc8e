"""What it says that a step was computed again: of the card that made it, and of the data and the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

Print = Sequence[float]
"""A gradient in a few numbers: under deterministic kernels its digests (whole numbers, the same bits give the same), else norms
that move a little from one time to the next."""


class RepeatKind(StrEnum):
    """AGREES: each time the same, so the data or the model made the step what it is. DIFFERS: not, so this card is suspect."""

    AGREES = "agrees"
    DIFFERS = "differs"


@dataclass(frozen=True)
class RepeatFinding:
    """`first` says that only the first time was other than the repeats: a fault that came and went. `times` is by how many
    times the run's own noise the worst number moved (infinite under deterministic kernels)."""

    kind: RepeatKind
    first: bool = False
    times: float = 0.0
    repeats: int = 0

    @property
    def why(self) -> str:
        """In words."""
        if self.kind is RepeatKind.AGREES:
            return f"computed {self.repeats} times again it is the same: the data or the model, not this card"
        how = (
            "bit for bit" if math.isinf(self.times) else f"by {self.times:.0f} times the noise of its repeats"
        )
        when = (
            "the first time differs from the repeats" if self.first else "the repeats differ from each other"
        )
        return f"this card does not agree with itself, {how}: {when}"


def measure_noise(prints: Sequence[Print]) -> tuple[float, ...]:
    """How far each number moves between computations of one step (at least three): the largest distance from its median."""
    columns = list(zip(*prints, strict=True))
    return tuple(max(abs(v - median(c)) for v in c) for c in columns)


def judge_repeats(
    first: Print, repeats: Sequence[Print], noise: Sequence[float] | None = None, factor: float = 8.0
) -> RepeatFinding:
    """What the first computation and its repeats say. `noise` is that of `measure_noise` in a fast mode, None where kernels are
    deterministic and each bit counts; above `factor` times it two computations differ.

    What is not a number counts as one value: a gradient that is NaN each time agrees with itself.
    """
    among = max((_distance(repeats[0], r, noise) for r in repeats[1:]), default=0.0)
    away = _distance(first, repeats[0], noise)
    limit = 0.0 if noise is None else factor
    if among > limit:
        return RepeatFinding(RepeatKind.DIFFERS, False, among, len(repeats))
    if away > limit:
        return RepeatFinding(RepeatKind.DIFFERS, True, away, len(repeats))
    return RepeatFinding(RepeatKind.AGREES, False, max(among, away), len(repeats))


def _distance(a: Print, b: Print, noise: Sequence[float] | None) -> float:
    """By how many times its noise the worst number moved; infinite where any bit is other and no noise is allowed."""
    worst = 0.0
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if x == y or (math.isnan(x) and math.isnan(y)):
            continue
        if noise is None or not (math.isfinite(x) and math.isfinite(y)):
            return math.inf
        # A sum that never moved may move by its last bits: a noise of 0 is not believed.
        floor = max(noise[i], 1e-6 * max(abs(x), abs(y)))
        worst = max(worst, abs(x - y) / floor) if floor else math.inf
    return worst
