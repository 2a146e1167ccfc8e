"""Whom to test next, round after round, until all is known or the time is over."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ...errors import UsageError
from .judging import find_bad, judge
from .model import FaultModel, Judgement, Pair, PairResult, sort_pair

_CERTAIN = 0.99999
"""Who is at fault with this probability is not tested any more: it only spoils its partner's tests."""
_LIKELY = 0.1
"""Above this probability a node's routes are given up: it will be kept off."""


class PairwiseTest:
    """Pairs nodes, round after round.

    Everybody meets somebody whom it did not meet yet, so that nodes that fail now and then are found by repetition; whoever was
    in a bad test meets partners that were in none. The links that the run uses come in the last rounds, when most nodes are known:
    a link that fails there can be told from a node that fails now and then, which earlier it cannot; each one twice.
    """

    def __init__(
        self,
        nodes: Iterable[str],
        routes: Iterable[tuple[str, str]] = (),
        *,
        seconds: float = 300.0,
        test_s: float = 30.0,
        seed: int = 0,
        model: FaultModel = FaultModel(),
    ) -> None:
        """`routes` are the pairs between which the run sends, in the order in which they are tested. `seconds` is for
        everything, `test_s` for one round. Raises UsageError for fewer than two nodes."""
        self._nodes = sorted(set(nodes))
        if len(self._nodes) < 2:
            raise UsageError(
                "a pairwise test needs two nodes", hint="Test one node alone with unbroken check"
            )
        here = set(self._nodes)
        self._routes = list(dict.fromkeys(sort_pair(a, b) for a, b in routes if {a, b} <= here))
        self._seconds, self._test_s, self._model = seconds, test_s, model
        ends = Counter(n for pair in self._routes for n in pair)
        self._for_routes = max(ends.values()) + 1 if ends else 0
        """So many rounds at the end are for the routes: no node is in two tests at once, and each bad one is repeated."""
        self._random = random.Random(seed)
        self._results: list[PairResult] = []
        self._met: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._count: dict[str, int] = defaultdict(int)
        self._partners: frozenset[str] | None = None
        self._judged: Judgement | None = None
        self._over = False

    @property
    def results(self) -> Sequence[PairResult]:
        """All that was tested so far."""
        return self._results

    def next_round(self, elapsed_s: float) -> list[Pair]:
        """The pairs to test at once, none of which shares a node; empty where no round fits into the time that is left."""
        if elapsed_s + self._test_s > self._seconds:
            self._over, self._judged = True, None
            return []
        judgement = self.judge()
        gone = {c.node for c in judgement.convicted if c.confidence >= _CERTAIN}
        free = [n for n in self._nodes if n not in gone]
        if self._partners is not None:
            return self._pair_with_partners(free)
        doubted = {n for g in judgement.groups for n in g} | {
            n for n, p in judgement.probability.items() if p > 0.0
        }
        picked = _Picked()
        if int((self._seconds - elapsed_s) // self._test_s) <= self._for_routes:
            for pair in self._find_routes(judgement):
                picked.take(*pair)
        suspects = [n for n in free if n in doubted and n not in picked.nodes]
        clean = [n for n in free if n not in doubted and n not in picked.nodes]
        self._random.shuffle(suspects)
        self._random.shuffle(clean)
        # Where the number is odd, whoever was tested most sits out.
        clean.sort(key=lambda n: -self._count[n])
        self._match(suspects, clean, picked)
        self._match_among(clean[::-1], picked)
        if not clean:
            self._match_among(suspects, picked)
        return picked.pairs

    def take(self, results: Iterable[PairResult]) -> None:
        """Notes what a round said; pairs of which nothing was heard are simply missing."""
        self._judged = None
        for r in results:
            a, b = r.nodes
            self._results.append(r)
            self._met[a][b] += 1
            self._met[b][a] += 1
            self._count[a] += 1
            self._count[b] += 1

    def judge(self) -> Judgement:
        """What is known so far: at the deadline, the answer."""
        if self._judged is None:
            found = judge(self._results, self._routes, self._model)
            self._judged = self._keep_untested(found) if self._over else found
        return self._judged

    def _keep_untested(self, found: Judgement) -> Judgement:
        """Nodes that were cleared so late that there was no round left for their routes leave too: nothing is known of those ways."""
        bad = {n for r in find_bad(self._results, self._model.slow) for n in r.nodes}
        off = found.kept_off
        late = {
            n for p in self._routes if not self._met[p[0]][p[1]] and not off & {*p} for n in p if n in bad
        }
        return replace(found, groups=tuple(sorted((*found.groups, *((n,) for n in late))))) if late else found

    def go_on_with(self, suspects: Iterable[str], partners: Iterable[str], seconds: float) -> None:
        """From here on only the suspects are tested, each with one of the partners, which are known to be good: in the
        background, for so many seconds more. What was found stays."""
        self._nodes, self._partners = sorted(set(suspects)), frozenset(partners) - set(suspects)
        self._over = False
        self._seconds = seconds
        # The link stays out of use: an end of it returns as sure as any other suspect. To be ten times as sure took 82 tests, at
        # 30 s each more than half an hour.
        self._model = replace(self._model, doubt_at_link=self._model.doubt)
        self._judged = None

    # --- who meets whom

    def _find_routes(self, judgement: Judgement) -> list[Pair]:
        """Routes that were not tested yet, in their order. Not at nodes whose last test was bad, as long as they may be at fault:
        another partner tells a node from its link, which the same test again would not. Not at nodes that probably failed with
        others than their neighbours: they are kept off, and their routes with them."""
        routes = set(self._routes)
        chance = judgement.probability
        bad = [
            r for r in find_bad(self._results, self._model.slow) if not judgement.convicted_nodes & {*r.nodes}
        ]
        elsewhere = {n for r in bad if r.nodes not in routes for n in r.nodes}
        last = {n: r for r in self._results for n in r.nodes}
        just_now = {n for r in bad for n in r.nodes if last[n] is r}
        out = judgement.convicted_nodes | {
            n
            for n in elsewhere | just_now
            if chance.get(n, 0.0) >= (_LIKELY if n not in just_now else self._model.doubt_at_link)
        }
        return [p for p in self._routes if not out & {*p} and not self._met[p[0]][p[1]]]

    def _match(self, suspects: Sequence[str], clean: Sequence[str], picked: _Picked) -> None:
        """Each suspect with a clean one that it met least often."""
        for s in suspects:
            met = self._met[s]
            left = [n for n in clean if n not in picked.nodes]
            if left:
                picked.take(s, min(left, key=lambda n: met[n]))

    def _match_among(self, nodes: Sequence[str], picked: _Picked) -> None:
        """Those that are left with each other, unmet ones first."""
        left = [n for n in nodes if n not in picked.nodes]
        while len(left) > 1:
            n = left.pop(0)
            met = self._met[n]
            k = next((i for i, m in enumerate(left) if not met[m]), None)
            if k is None:
                k = min(range(len(left)), key=lambda i: met[left[i]])
            picked.take(n, left.pop(k))

    def _pair_with_partners(self, suspects: Sequence[str]) -> list[Pair]:
        picked = _Picked()
        partners = sorted(self._partners or ())
        self._random.shuffle(partners)
        waiting = sorted(suspects, key=lambda n: self._count[n])
        self._match(waiting, partners, picked)
        return picked.pairs


class _Picked:
    """The pairs of one round: each node once."""

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self.nodes: set[str] = set()

    def take(self, a: str, b: str) -> None:
        if a not in self.nodes and b not in self.nodes:
            self.pairs.append(sort_pair(a, b))
            self.nodes |= {a, b}
