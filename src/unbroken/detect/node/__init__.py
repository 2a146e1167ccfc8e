"""Whether a node is fit to train: one check per file, each quick, none of which needs torch. See docs/check.md.

check_node, CheckedNode    all quick checks, within a deadline
CheckResult, State              good, bad, or not checked; what cannot be read is never good
"""

from .quick import CheckedNode, check_node
from .result import CheckResult, State

__all__ = ["CheckResult", "CheckedNode", "State", "check_node"]
