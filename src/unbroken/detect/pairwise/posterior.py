"""How probable it is that each node, and each link, is at fault: exact, by summing over all explanations of the bad tests.

Each bad pair is explained by a node of it that is at fault, or by its link. Nodes are at fault or not, independently, with a
weight; a pair of two healthy nodes has the weight of its link being at fault. That is a Markov random field over the graph of
bad pairs, nearly a tree: nodes with one neighbour are summed out one after the other, and only what lies in cycles is tried
both ways.
"""

from __future__ import annotations

from collections.abc import Mapping

from .model import Pair

_MOST_TRIES = 20_000


class TooTangled(Exception):
    """The bad pairs form too many cycles to be summed over: nothing is concluded."""


def weigh(healthy: Mapping[str, float], faulty: Mapping[str, float], links: Mapping[Pair, float]) -> float:
    """The summed weight of all explanations. `healthy` and `faulty` are the weights of each node's two states, `links` that of
    a pair whose nodes are both healthy. Raises TooTangled."""
    near: dict[str, dict[str, float]] = {n: {} for n in healthy}
    for (a, b), w in links.items():
        near[a][b] = near[b][a] = w
    return _sum(dict(healthy), dict(faulty), near, [_MOST_TRIES])


def _sum(
    healthy: dict[str, float], faulty: dict[str, float], near: dict[str, dict[str, float]], tries: list[int]
) -> float:
    total = 1.0
    leaves = [n for n, beside in near.items() if len(beside) < 2]
    while leaves:
        leaf = leaves.pop()
        if leaf not in near:
            continue
        beside = near.pop(leaf)
        good, bad = healthy[leaf], faulty[leaf]
        if not beside:
            total *= good + bad
            continue
        ((other, link),) = beside.items()
        healthy[other] *= good * link + bad
        faulty[other] *= good + bad
        del near[other][leaf]
        if len(near[other]) < 2:
            leaves.append(other)
    if not near:
        return total
    tries[0] -= 1
    if tries[0] < 0:
        raise TooTangled
    chosen = max(near, key=lambda n: len(near[n]))
    beside = near[chosen]
    rest = {n: {o: w for o, w in b.items() if o != chosen} for n, b in near.items() if n != chosen}
    as_bad = _sum(
        {n: healthy[n] for n in rest},
        {n: faulty[n] for n in rest},
        {n: dict(b) for n, b in rest.items()},
        tries,
    )
    as_good = _sum(
        {n: healthy[n] * beside.get(n, 1.0) for n in rest}, {n: faulty[n] for n in rest}, rest, tries
    )
    return total * (faulty[chosen] * as_bad + healthy[chosen] * as_good)


def node_probabilities(faulty: Mapping[str, float], links: Mapping[Pair, float]) -> dict[str, float]:
    """The probability of each node of one component to be at fault. Raises TooTangled."""
    healthy = dict.fromkeys(faulty, 1.0)
    total = weigh(healthy, faulty, links)
    if total <= 0.0:
        raise TooTangled
    return {n: weigh({**healthy, n: 0.0}, faulty, links) / total for n in faulty}


def pair_probability(pair: Pair, faulty: Mapping[str, float], links: Mapping[Pair, float]) -> float:
    """The probability that both nodes of a pair are healthy, so that their link explains its bad tests. Raises TooTangled."""
    healthy = dict.fromkeys(faulty, 1.0)
    cleared = {**faulty, pair[0]: 0.0, pair[1]: 0.0}
    return weigh(healthy, cleared, links) / weigh(healthy, faulty, links)


def components(links: Mapping[Pair, float]) -> list[list[Pair]]:
    """The pairs, grouped by what hangs together."""
    home: dict[str, list[Pair]] = {}
    for pair in links:
        a, b = (home.get(n) for n in pair)
        joined = [pair, *(a or []), *((b or []) if b is not a else [])]
        for p in joined:
            for n in p:
                home[n] = joined
    return list({id(g): g for g in home.values()}.values())
