"""Wrong numbers without an error: replicas that differ, and steps that come out differently when they are computed again.

ReplicaWatch, ReplicaFinding    from comparisons of what ranks hold to ranks that are suspect
StepSuspicion                   which steps are worth computing again, within a budget
judge_repeats, RepeatFinding    what the repeats of a step say of the card that made them

Pure: no torch, no process. See docs/corruption.md.
"""

from .repeats import RepeatFinding, RepeatKind, judge_repeats, measure_noise
from .replicas import ReplicaFinding, ReplicaWatch
from .suspicion import StepSuspicion, SuspicionSettings

__all__ = [
    "RepeatFinding",
    "RepeatKind",
    "ReplicaFinding",
    "ReplicaWatch",
    "StepSuspicion",
    "SuspicionSettings",
    "judge_repeats",
    "measure_noise",
]
