"""What goes wrong without an error: hangs, from the steps that do not come.

HangDetector, Hang      step progress against deadlines that follow the phase
StepPattern             steps and losses read from the log of a script that does not tell them
collect_stacks          what a process is doing, without disturbing it
"""

from .hang import Hang, HangDetector, Level, RankView
from .logstep import StepPattern
from .stacks import ProcessInfo, collect_stacks, late_ranks

__all__ = [
    "Hang",
    "HangDetector",
    "Level",
    "ProcessInfo",
    "RankView",
    "StepPattern",
    "collect_stacks",
    "late_ranks",
]
