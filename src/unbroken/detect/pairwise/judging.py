"""From the results of tests of pairs to convicted nodes, bad links and groups of suspects."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from statistics import median

from .model import BadLink, Conviction, FaultModel, Judgement, NodeFault, Pair, PairResult
from .posterior import TooTangled, components, node_probabilities, pair_probability

_FEW_NODES = 3
_FEW = 8
"""Fewer tests, or nodes, than this say nothing of the whole fabric."""


def judge(
    results: Sequence[PairResult], routes: Collection[Pair] = (), model: FaultModel = FaultModel()
) -> Judgement:
    """What the tests say. `routes` are the pairs between which the run sends: only there a bad link is likely.

    A node is convicted where nearly all explanations of the bad tests need it. Where several explain them, all of their nodes
    are suspects. Whatever happens, an answer is given: at worst that all are suspects.
    """
    bad = find_bad(results, model.slow)
    nodes = {n for r in results for n in r.nodes}
    if why := _find_broken_test(results, bad, len(nodes), model.broken_test):
        return Judgement(groups=(tuple(sorted(nodes)),), undecided=why)
    evidence = _Evidence(results, bad, frozenset(routes), model)
    sure: dict[str, float] = {}
    while True:
        found = evidence.explain(sure)
        new = {n: p for n, p in found.nodes.items() if p >= model.sure_of_node}
        if not new:
            break
        sure |= new
    convicted = tuple(evidence.convict(n, p, sure) for n, p in sorted(sure.items()))
    links = tuple(
        evidence.name_link(pair, p) for pair, p in sorted(found.links.items()) if p >= model.sure_of_link
    )
    ends = {n for link in links for n in link.nodes}
    doubted = {n for n, p in found.nodes.items() if p >= (model.doubt_at_link if n in ends else model.doubt)}
    groups = [tuple(sorted(doubted & g)) for g in found.groups if doubted & g]
    repeats = {n: evidence.count_clean(n) for n in sorted(nodes - set(sure))}
    return Judgement(
        convicted, links, tuple(sorted(groups)), {**found.nodes, **sure}, repeats, found.undecided
    )


def find_bad(results: Sequence[PairResult], share: float) -> list[PairResult]:
    """The tests that failed, and those that passed at a rate far below that of the other nodes: below `share` of the median
    of each node's best one, and lower still where healthy pairs differ by more than that (six times their spread)."""
    rates = [r.rate for r in results if r.passed and r.rate > 0]
    best: dict[str, float] = {}
    for r in results:
        for n in r.nodes:
            best[n] = max(best.get(n, 0.0), r.rate if r.passed else 0.0)
    reached = [rate for rate in best.values() if rate > 0]
    below = 0.0
    if len(reached) >= _FEW_NODES:
        middle = median(reached)
        # Among few nodes one that is slow is part of half of the tests.
        spread = _find_spread(rates if len(reached) >= _FEW else reached)
        below = min(share * middle, middle - 6 * spread)
    return [r for r in results if not r.passed or 0 < r.rate < below]


def _find_spread(values: Sequence[float]) -> float:
    """The standard deviation, as the median deviation says it: single values do not count."""
    middle = median(values)
    return 1.4826 * median(abs(v - middle) for v in values)


def _find_broken_test(
    results: Sequence[PairResult], bad: Sequence[PairResult], nodes: int, most: float
) -> str:
    """Why the tests say nothing of single nodes; "" where they do: the worst fifth of the nodes does not explain them."""
    count = Counter(n for r in bad for n in r.nodes)
    worst = {n for n, _ in count.most_common(max(1, nodes // 5))}
    others = [r for r in results if not worst & {*r.nodes}]
    left = sum(not worst & {*r.nodes} for r in bad)
    if len(others) < _FEW or left <= most * len(others):
        return ""
    return f"{len(bad)} of {len(results)} tests are bad: the test itself, or the whole fabric, is at fault"


@dataclass
class _Explained:
    """Probabilities of nodes and links that are not convicted yet."""

    nodes: dict[str, float] = field(default_factory=dict)
    links: dict[Pair, float] = field(default_factory=dict)
    groups: list[set[str]] = field(default_factory=list)
    undecided: str = ""


class _Evidence:
    """The tests, by node and by pair."""

    def __init__(
        self,
        results: Sequence[PairResult],
        bad: Sequence[PairResult],
        routes: frozenset[Pair],
        model: FaultModel,
    ) -> None:
        self._routes, self._model = routes, model
        self._of_node: dict[str, list[tuple[PairResult, bool]]] = defaultdict(list)
        self._of_pair: dict[Pair, list[tuple[PairResult, bool]]] = defaultdict(list)
        self._bad_pairs = dict.fromkeys(r.nodes for r in bad)
        are_bad = {id(r) for r in bad}
        for r in results:
            entry = (r, id(r) in are_bad)
            self._of_pair[r.nodes].append(entry)
            for n in r.nodes:
                self._of_node[n].append(entry)

    def count_clean(self, node: str) -> int:
        """How many tests of a node were good."""
        return sum(not b for _, b in self._of_node[node])

    def explain(self, sure: Mapping[str, float]) -> _Explained:
        """What explains the bad tests that the convicted do not; their tests say nothing of their partners."""
        found = _Explained()
        links = {
            pair: self._weigh_link(pair, self._of_pair[pair])
            for pair in self._bad_pairs
            if pair[0] not in sure and pair[1] not in sure
        }
        for group in components(links):
            mine = {pair: links[pair] for pair in group}
            members = sorted({n for pair in group for n in pair})
            faulty = {n: self._weigh_node(n, sure) for n in members}
            try:
                probabilities = node_probabilities(faulty, mine)
                found.links |= {
                    pair: pair_probability(pair, faulty, mine) * self._link_share(pair) for pair in group
                }
            except TooTangled:
                # Safe and dear: nobody is convicted, all of them leave.
                probabilities = dict.fromkeys(members, 0.5)
                found.undecided = f"{len(members)} nodes have failed with each other in too many ways"
            found.nodes |= probabilities
            found.groups.append(set(members))
        return found

    def _weigh_node(self, node: str, sure: Mapping[str, float]) -> float:
        """The weight of a node's being at fault, against 1: it fails every test, or a share of them that is not known (any
        share is as likely, so k bad of n have the chance 1 / ((n + 1) * comb(n, k)))."""
        bads = [b for r, b in self._of_node[node] if r.other(node) not in sure]
        n, k = len(bads), sum(bads)
        solid = self._model.solid if k == n else 0.0
        return solid + self._model.intermittent / ((n + 1) * comb(n, k))

    def _weigh_link(self, pair: Pair, tests: Sequence[tuple[PairResult, bool]]) -> float:
        return self._prior(pair, tests) + self._model.hiccup ** sum(b for _, b in tests)

    def _link_share(self, pair: Pair) -> float:
        prior = self._prior(pair, self._of_pair[pair])
        return prior / self._weigh_link(pair, self._of_pair[pair])

    def _prior(self, pair: Pair, tests: Iterable[tuple[PairResult, bool]]) -> float:
        if not all(b for _, b in tests):
            return 0.0  # a link is at fault in each test or not at all
        return self._model.link if pair in self._routes else self._model.other_link

    def convict(self, node: str, confidence: float, sure: Mapping[str, float]) -> Conviction:
        """The conviction of a node, with what it rests on: tests with other convicted ones are left out."""
        said = [(r, b) for r, b in self._of_node[node] if r.other(node) not in sure] or self._of_node[node]
        bad = [r for r, b in said if b]
        if any(not b for _, b in said):
            fault = NodeFault.INTERMITTENT
        else:
            fault = NodeFault.SLOW if all(r.passed for r in bad) else NodeFault.FAILING
        partners = len({r.other(node) for r in bad})
        return Conviction(node, fault, min(confidence, 1.0), len(bad), len(said), partners)

    def name_link(self, pair: Pair, confidence: float) -> BadLink:
        """A bad link, and the direction where it is one alone."""
        tests = [r for r, _ in self._of_pair[pair]]
        lost = Counter(s for r in tests for s in r.lost)
        one_way = len(lost) == 1 and all(len(r.lost) == 1 for r in tests)
        sender = next(iter(lost)) if one_way else None
        slow = all(r.passed for r in tests)
        settled = confidence >= self._model.certain_of_link
        return BadLink(pair, slow, min(confidence, 1.0), len(tests), len(tests), sender, settled)
