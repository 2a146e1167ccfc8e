"""What a test of two nodes says, what may be at fault, and what is concluded: the data of the pairwise test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ...errors import UsageError

Pair = tuple[str, str]
"""Two nodes, sorted."""


def sort_pair(a: str, b: str) -> Pair:
    """The pair of two nodes, whichever is named first. Raises UsageError for a node with itself."""
    if a == b:
        raise UsageError(
            f"node {a} cannot be tested against itself", hint="Name two nodes, or test its GPUs alone"
        )
    return (a, b) if a < b else (b, a)


@dataclass(frozen=True)
class PairResult:
    """One test of two nodes. `rate` is the bandwidth that was reached, in any unit that is the same for all tests (0 where it
    failed); `lost` names the senders whose data did not arrive, where that is known."""

    nodes: Pair
    passed: bool
    rate: float = 0.0
    lost: tuple[str, ...] = ()

    def other(self, node: str) -> str:
        """The partner of one of its two nodes."""
        return self.nodes[1] if node == self.nodes[0] else self.nodes[0]


class NodeFault(StrEnum):
    """How a convicted node showed itself."""

    FAILING = "fails every test"
    INTERMITTENT = "fails some tests"
    SLOW = "is slow in every test"


@dataclass(frozen=True)
class FaultModel:
    """What may be at fault and how often, before anything was tested. See docs/pairwise.md.

    The shares of nodes that fail every test and that fail an unknown share of them, the shares of links that fail: of those
    that the run uses, and of any others; `hiccup` is the chance that a test fails with nothing at fault.
    """

    solid: float = 0.02
    intermittent: float = 0.02
    link: float = 0.03
    other_link: float = 1e-6
    hiccup: float = 1e-5
    slow: float = 0.8
    """A rate below this share of the median is slow (lower still where healthy pairs differ more)."""
    sure_of_node: float = 0.999
    """Above this probability a node is convicted."""
    sure_of_link: float = 0.95
    """Above this one a link is probably bad: nobody is cordoned for it, both ends only leave until they are tested again."""
    certain_of_link: float = 0.995
    """Above this one it is settled that it is the link. The ten tests of the first move do not reach it: a node that fails now
    and then may have failed just there. Some 17 of both ends do, in the background."""
    doubt: float = 1e-3
    """A node above this probability is kept off the next attempt."""
    doubt_at_link: float = 1e-4
    """An end of a bad link too, above this one: it may be a node that fails now and then, and happened to pass elsewhere."""
    broken_test: float = 0.25
    """Where more than this share of the tests without the worst fifth of the nodes is bad nobody is convicted: the test
    itself, or the whole fabric, is at fault."""


@dataclass(frozen=True)
class Conviction:
    """A node at fault: how it showed itself, the probability, and on what it rests: bad tests of all tests that say
    something of it, with how many different partners."""

    node: str
    fault: NodeFault
    confidence: float
    bad: int
    tests: int
    partners: int

    def __str__(self) -> str:
        return (
            f"{self.node} {self.fault}: {self.bad} of {self.tests} bad, with {self.partners} partners that pass "
            f"otherwise ({self.confidence:.2%} sure)"
        )


@dataclass(frozen=True)
class BadLink:
    """The way between two nodes is at fault, and neither of them, as far as it can be told: an end that fails now and then
    may look the same, so both are tested further until it is `settled`. `sender` is set where data is lost in one direction
    only."""

    nodes: Pair
    slow: bool
    confidence: float
    bad: int
    tests: int
    sender: str | None = None
    settled: bool = False

    def __str__(self) -> str:
        a, b = self.nodes
        way = (
            f"from {self.sender} to {b if self.sender == a else a}" if self.sender else f"between {a} and {b}"
        )
        how = f"{'' if self.settled else 'probably '}{'is slow' if self.slow else 'fails'}"
        return f"the link {way} {how}: {self.bad} of {self.tests} tests bad, both ends pass with others ({self.confidence:.1%} sure)"


@dataclass(frozen=True)
class Judgement:
    """What the tests say. `groups` are the smallest sets of nodes that surely hold a culprit each, the ends of a bad link
    among them as long as it might be one of them; `probability` is that of each node to be at fault; `repeats` counts the clean
    tests of each node that was not convicted; `undecided` says why nobody is convicted."""

    convicted: tuple[Conviction, ...] = ()
    links: tuple[BadLink, ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()
    probability: Mapping[str, float] = field(default_factory=dict)
    repeats: Mapping[str, int] = field(default_factory=dict)
    undecided: str = ""

    @property
    def convicted_nodes(self) -> frozenset[str]:
        """The nodes to cordon."""
        return frozenset(c.node for c in self.convicted)

    @property
    def suspects(self) -> frozenset[str]:
        """Nodes that leave now and are tested further, in the background; innocents among them return."""
        return frozenset(n for g in self.groups for n in g) - self.convicted_nodes

    @property
    def kept_off(self) -> frozenset[str]:
        """All that is not used in the next attempt."""
        return self.convicted_nodes | self.suspects

    def describe(self, node: str) -> str:
        """What is known of one node, never that it is healthy."""
        for c in self.convicted:
            if c.node == node:
                return str(c)
        r = self.repeats.get(node, 0)
        clean = f"p below {min(1.0, 3 / r):.2g} after {r} repeats" if r else "not tested"
        if node in self.suspects:
            return f"{node} is a suspect ({self.probability.get(node, 0.0):.1%}): {clean}"
        return f"{node}: {clean}"
