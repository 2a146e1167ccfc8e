"""Which nodes and links are at fault, from tests of pairs of nodes: whom to test next, and what follows. See docs/pairwise.md.

PairwiseTest            whom to pair in each round, until the deadline
judge, Judgement        convicted nodes and links, groups of suspects, and how sure each answer is
TwoRounds               the published test, to compare with

Beside it, with processes: `running` (rounds on real nodes) and `probe` (one side of a test; needs torch).

Pure: no process, no clock, no network. Who runs the tests calls it with the results.
"""

from .judging import judge
from .model import BadLink, Conviction, FaultModel, Judgement, NodeFault, PairResult, sort_pair
from .published import TwoRounds
from .rounds import PairwiseTest

__all__ = [
    "BadLink",
    "Conviction",
    "FaultModel",
    "Judgement",
    "NodeFault",
    "PairResult",
    "PairwiseTest",
    "TwoRounds",
    "judge",
    "sort_pair",
]
