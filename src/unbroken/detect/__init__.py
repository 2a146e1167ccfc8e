"""What goes wrong without an error: hangs, from the steps that do not come; training that diverges, from its loss.

HangDetector, Hang      step progress against deadlines that follow the phase
StepPattern             steps and losses read from the log of a script that does not tell them
LossWatch, LossFinding  losses that leave their band and do not come back, and NaN
corruption              replicas that differ, and cards that do not agree with themselves
node                    whether a node is fit to train
pairwise                which nodes and links are at fault, from tests of pairs
collect_stacks          what a process is doing, without disturbing it
"""

from .hang import Hang, HangDetector, Level, RankView
from .logstep import StepPattern
from .loss import LossFinding, LossKind, LossSettings, LossWatch
from .stacks import ProcessInfo, collect_stacks, late_ranks

__all__ = [
    "Hang",
    "HangDetector",
    "Level",
    "LossFinding",
    "LossKind",
    "LossSettings",
    "LossWatch",
    "ProcessInfo",
    "RankView",
    "StepPattern",
    "collect_stacks",
    "late_ranks",
]
