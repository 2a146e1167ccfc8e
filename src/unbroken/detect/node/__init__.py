"""Whether a node is fit to train: one check per file, each quick, none of which needs torch. See docs/check.md.

check_node, Surroundings    all quick checks, within a deadline
Checked, State              good, bad, or not checked; what cannot be read is never good
"""

from .checked import Checked, State
from .quick import Surroundings, check_node

__all__ = ["Checked", "State", "Surroundings", "check_node"]
