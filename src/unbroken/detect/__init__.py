"""What goes wrong without an error: hangs, from the steps that do not come; training that diverges, from its loss.

HangDetector, Hang      step progress against deadlines that follow the phase
StepPattern             steps and losses read from the log of a script that does not tell them
LossWatch, LossFinding  losses that leave their band and do not come back, and NaN
corruption              replicas that differ, and cards that do not agree with themselves
node                    whether a node is fit to train
pairwise                which nodes and links are at fault, from tests of pairs
collect_stacks          what a process is doing, without disturbing it
explain_hang            who waits for whom, and which ranks hold the others up
"""

from .hang import Hang, HangDetector, Level, RankView
from .logstep import StepPattern
from .loss import LossFinding, LossKind, LossSettings, LossWatch
from .stacks import Culprit, HangPicture, ProcessInfo, RankStep, collect_stacks, explain_hang

__all__ = [
    "Culprit",
    "Hang",
    "HangDetector",
    "HangPicture",
    "Level",
    "LossFinding",
    "LossKind",
    "LossSettings",
    "LossWatch",
    "ProcessInfo",
    "RankStep",
    "RankView",
    "StepPattern",
    "collect_stacks",
    "explain_hang",
]
