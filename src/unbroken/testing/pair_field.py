"""Simulated nodes and links with faults, for the pairwise test: what docs/pairwise.md calls the fault model."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ..detect.pairwise import PairResult, sort_pair


class PairFault(StrEnum):
    """What is injected. The last three are of a link between two nodes, the others of a node."""

    DEAD = "dead"
    HANGING = "hanging"
    SLOW = "slow"
    INTERMITTENT = "intermittent"
    LINK = "link"
    ONE_WAY = "one-way link"
    SLOW_LINK = "slow link"


LINKS = (PairFault.LINK, PairFault.ONE_WAY, PairFault.SLOW_LINK)
_NOISE = 0.03
"""The spread of the rate between healthy nodes, as a share of it."""
_SLOWEST, _LEAST_SLOW = 0.2, 0.7
"""A slow node or link reaches between these shares of the rate of a healthy one."""


@dataclass
class PairField:
    """Nodes in a ring (each sends to the next), some of them at fault. `ring` are the routes that the run uses."""

    nodes: Sequence[str]
    faulty: Mapping[str, PairFault] = field(default_factory=dict)
    links: Mapping[tuple[str, str], PairFault] = field(default_factory=dict)
    fails: float = 0.5
    """How often a test fails that an intermittent node is part of."""
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        slow: list[object] = [n for n, f in self.faulty.items() if f is PairFault.SLOW]
        slow += [p for p, f in self.links.items() if f is PairFault.SLOW_LINK]
        self._share = {k: self._random.uniform(_SLOWEST, _LEAST_SLOW) for k in slow}

    @property
    def ring(self) -> list[tuple[str, str]]:
        """The pairs of neighbours."""
        count = len(self.nodes)
        turns = count if count > 2 else count - 1
        return [sort_pair(self.nodes[i], self.nodes[(i + 1) % count]) for i in range(turns)]

    @classmethod
    def scatter(
        cls, count: int, faults: int, kinds: Sequence[PairFault] = tuple(PairFault), seed: int = 0
    ) -> PairField:
        """So many nodes with so many faults, each of a kind by chance. Bad links lie between healthy nodes of the ring: at a
        node that is at fault nobody could see them, and it leaves anyway."""
        draw = random.Random(seed)
        nodes = [f"node-{i:03d}" for i in range(count)]
        chosen = [draw.choice(kinds) for _ in range(faults)]
        of_nodes = [f for f in chosen if f not in LINKS]
        places = draw.sample(range(count), len(of_nodes))
        faulty = {nodes[i]: f for i, f in zip(places, of_nodes, strict=True)}
        bare = cls(nodes)
        free = [p for p in bare.ring if not faulty.keys() & {*p}]
        of_links = [f for f in chosen if f in LINKS][: len(free)]
        links = dict(zip(draw.sample(free, len(of_links)), of_links, strict=True))
        return cls(nodes, faulty, links, seed=seed)

    def test(self, pairs: Iterable[tuple[str, str]]) -> list[PairResult]:
        """One round: what the test of each pair says."""
        return [self._test(*sort_pair(a, b)) for a, b in pairs]

    def passes(self, group: Sequence[str]) -> bool:
        """Whether an allgather over a group ends: no pair of it fails. Rates are not looked at."""
        return all(r.passed for r in self.test((a, b) for i, a in enumerate(group) for b in group[i + 1 :]))

    def _test(self, a: str, b: str) -> PairResult:
        here = [f for f in (self.faulty.get(a), self.faulty.get(b), self.links.get((a, b))) if f is not None]
        rate = max(0.1, self._random.gauss(1.0, _NOISE))
        for f in here:
            if f in (PairFault.DEAD, PairFault.HANGING, PairFault.LINK):
                return PairResult((a, b), False, lost=(a, b))
            if f is PairFault.ONE_WAY:
                return PairResult((a, b), False, lost=(a,))
            if f is PairFault.INTERMITTENT and self._random.random() < self.fails:
                return PairResult((a, b), False, lost=self._random.choice([(a,), (b,), (a, b)]))
        slowest = min((self._share.get(k, 1.0) for k in (a, b, (a, b))), default=1.0)
        return PairResult((a, b), True, rate * slowest)
