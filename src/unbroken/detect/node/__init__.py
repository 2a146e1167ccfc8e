"""Whether a node is fit to train: one check per file, quick ones without torch, and active ones. See docs/check.md.

check_node, CheckedNode            all quick checks, within a deadline
CheckResult, State                 good, bad, or not checked; what cannot be read is never good
read_versions, compare_versions    what is installed, against the other nodes'
active                             checks that make a device work; they need torch
"""

from .quick import CheckedNode, check_node
from .result import CheckResult, State
from .versions import compare_versions, read_versions

__all__ = ["CheckResult", "CheckedNode", "State", "check_node", "compare_versions", "read_versions"]
