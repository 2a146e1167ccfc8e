"""How likely chance alone gives such a difference: tests for answers compared one by one, and for two means."""

from __future__ import annotations

import math
from collections.abc import Sequence

EXACT = 16
"""So many samples that differ are permuted in full: 65,536 sums."""


def p_value(difference: float, stderr: float) -> float:
    """Two-sided p of a difference with this standard error, normal approximation."""
    if stderr == 0:
        return 1.0 if difference == 0 else 0.0
    return math.erfc(abs(difference / stderr) / math.sqrt(2))


def paired_p(changes: Sequence[float]) -> float:
    """Two-sided p of the samples' changes: that their signs are chance.

    Exact where every sample that changed did so by as much (McNemar's test: binomial), or where few changed (all signs
    are tried); else the normal approximation of the same test.
    """
    moved = [c for c in changes if c != 0]
    if not moved:
        return 1.0
    sizes = [abs(c) for c in moved]
    if max(sizes) - min(sizes) <= 1e-12 * max(sizes):
        return _binomial(sum(c > 0 for c in moved), len(moved))
    if len(moved) <= EXACT:
        sums = [0.0]
        for s in sizes:
            sums = [x + y for x in sums for y in (s, -s)]
        found = abs(math.fsum(moved)) * (1 - 1e-9)
        return sum(abs(x) >= found for x in sums) / len(sums)
    return p_value(math.fsum(moved), math.sqrt(math.fsum(s * s for s in sizes)))


def constant_p(before: int, after: int) -> float:
    """Two-sided p that two groups of so many samples, each of them all alike, differ by chance (Fisher's exact test)."""
    if before < 1 or after < 1:
        return 1.0
    log = math.lgamma(before + after + 1) - math.lgamma(before + 1) - math.lgamma(after + 1)
    return min(1.0, 2 * math.exp(-log))


def _binomial(up: int, n: int) -> float:
    """Two-sided p of `up` heads in `n` throws; summed in logarithms, so that it does not vanish for large n."""
    few = min(up, n - up)
    if 2 * few == n:
        return 1.0
    logs = [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2) for k in range(few + 1)]  # fmt: skip
    top = max(logs)
    return min(1.0, 2 * math.exp(top) * math.fsum(math.exp(x - top) for x in logs))
