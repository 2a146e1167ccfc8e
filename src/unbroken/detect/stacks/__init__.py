"""Where processes stand, seen from outside, and who of them waits for whom.

process      what is known of one process and of those that it started
collecting   from outside, each with a deadline
standing     what a rank is doing
waiting      who holds the others up, and what each was doing
"""

from .collecting import collect_native, collect_stacks
from .process import ChildInfo, ProcessInfo
from .standing import Doing, in_collective
from .waiting import Culprit, HangPicture, RankStep, StackGroup, explain_hang, name_place

__all__ = [
    "ChildInfo",
    "Culprit",
    "Doing",
    "HangPicture",
    "ProcessInfo",
    "RankStep",
    "StackGroup",
    "collect_native",
    "collect_stacks",
    "explain_hang",
    "in_collective",
    "name_place",
]
