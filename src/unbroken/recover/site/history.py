"""What happened to each node and each GPU over all runs, and what that says of it today. Pure. See docs/nodes.md.

A GPU is known by its UUID: one that was moved takes its history along. What is old counts for less and less.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

HALF_LIFE_S = 30 * 86_400.0
AVOID_AT = 1.5
"""Above this score a node is asked for last: two sure incidents of the last days."""
MOST_AVOIDED = 8
LEMON_SHARE = 0.5
_PRIOR_MOST = 0.5


@dataclass(frozen=True)
class NodeIncident:
    """One incident that was blamed on a node, or on one GPU of it. `at` is in seconds since the epoch; `confidence` the
    verdict's; `run` and `incident` say which."""

    at: float
    run: str
    incident: int
    node: str
    reason: str
    confidence: float
    gpu: str = ""


@dataclass(frozen=True)
class Sighting:
    """These GPUs were in that node."""

    at: float
    node: str
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class NodeScore:
    """How much is held against a node at a moment: the sum of its incidents' confidence, halved every 30 days."""

    node: str
    score: float = 0.0
    incidents: int = 0
    runs: int = 0
    last: float = 0.0
    reasons: Mapping[str, int] = field(default_factory=dict)
    gpus: Mapping[str, float] = field(default_factory=dict)

    @property
    def prior(self) -> float:
        """How likely it is, before anything is known of a new incident, that this node is its cause: never above one half."""
        return min(_PRIOR_MOST, self.score / (self.score + 4.0))


def score_nodes(
    incidents: Iterable[NodeIncident], sightings: Iterable[Sighting], now: float
) -> dict[str, NodeScore]:
    """By node. An incident of a GPU counts where that GPU was seen last."""
    place: dict[str, str] = {}
    for s in sorted(sightings, key=lambda s: s.at):
        place.update(dict.fromkeys(s.gpus, s.node))
    mine: dict[str, list[NodeIncident]] = defaultdict(list)
    for i in incidents:
        mine[place.get(i.gpu, i.node) if i.gpu else i.node].append(i)
    return {node: _score(node, found, now) for node, found in mine.items()}


def _score(node: str, found: list[NodeIncident], now: float) -> NodeScore:
    weights = [i.confidence * 0.5 ** (max(0.0, now - i.at) / HALF_LIFE_S) for i in found]
    gpus: dict[str, float] = defaultdict(float)
    for i, w in zip(found, weights, strict=True):
        if i.gpu:
            gpus[i.gpu] += w
    return NodeScore(
        node, sum(weights), len(found), len({i.run for i in found}), max(i.at for i in found),
        dict(Counter(i.reason for i in found).most_common()), dict(gpus),
    )  # fmt: skip


def find_avoided(scores: Mapping[str, NodeScore], most: int = MOST_AVOIDED) -> list[str]:
    """The nodes not to ask for, the worst first; never more than a few, so that a detector gone mad cannot empty a site."""
    bad = sorted((s for s in scores.values() if s.score >= AVOID_AT), key=lambda s: (-s.score, s.node))
    return [s.node for s in bad[:most]]


def find_lemons(scores: Mapping[str, NodeScore], share: float = LEMON_SHARE) -> list[NodeScore]:
    """The fewest nodes that together stand for this share of all that is held against any, the worst first: those to tell
    the cluster's owner of. Only nodes with two incidents, or more, are among them."""
    ordered = sorted(scores.values(), key=lambda s: (-s.score, s.node))
    total, sum_, lemons = sum(s.score for s in ordered), 0.0, []
    for s in ordered:
        if total <= 0 or sum_ >= share * total:
            break
        sum_ += s.score
        if s.incidents > 1:
            lemons.append(s)
    return lemons
