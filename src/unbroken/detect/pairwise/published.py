"""The published test (Acme, NSDI'24, section 6.1): two rounds of allgather, as a baseline.

All nodes in pairs, one triple if their number is odd; members of failing groups are suspects; each suspect is then paired with
a node known to be good, and convicted if that fails.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

Group = tuple[str, ...]


class TwoRounds:
    """Two rounds over the nodes; a group passes or fails as a whole."""

    def __init__(self, nodes: Iterable[str], seed: int = 0) -> None:
        self._nodes = sorted(set(nodes))
        self._random = random.Random(seed)

    def first(self) -> list[Group]:
        """Everybody in pairs, one triple if the number is odd."""
        order = self._nodes[:]
        self._random.shuffle(order)
        groups: list[Group] = [tuple(order[i : i + 2]) for i in range(0, len(order) - 1, 2)]
        if len(order) % 2 and groups:
            groups[-1] = (*groups[-1], order[-1])
        return groups

    def second(self, passed: Mapping[Group, bool]) -> list[tuple[str, str]]:
        """(suspect, known good) for each suspect; those that find no partner are left out, and stay suspects."""
        suspects = [n for g, ok in passed.items() if not ok for n in g]
        good = [n for g, ok in passed.items() if ok for n in g]
        self._random.shuffle(good)
        return list(zip(suspects, good, strict=False))

    @staticmethod
    def convict(pairs: Sequence[tuple[str, str]], passed: Sequence[bool]) -> frozenset[str]:
        """Those whose second test failed."""
        return frozenset(s for (s, _), ok in zip(pairs, passed, strict=True) if not ok)
