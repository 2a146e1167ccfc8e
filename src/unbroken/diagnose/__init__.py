"""Logs in, verdict out: what failed first in a training job, where, whether a restart can help, what to do.

    from unbroken.diagnose import diagnose
    verdict = diagnose(["logs/"])

Works offline, without torch and without a language model.
"""

from __future__ import annotations

from ..progress.records.verdict import REASONS, Action, Cascade, Category, Faulty, Outcome, Root, Verdict
from .engine import Diagnosis, diagnose, examine, judge_unread
from .judge.facts import CorruptionFact, Facts, HangFact, LossFact, RankExit, RankPlace
from .match.partial import Limits

__all__ = [
    "REASONS",
    "Action",
    "Cascade",
    "Category",
    "CorruptionFact",
    "Diagnosis",
    "Facts",
    "Faulty",
    "HangFact",
    "Limits",
    "LossFact",
    "Outcome",
    "RankExit",
    "RankPlace",
    "Root",
    "Verdict",
    "diagnose",
    "examine",
    "judge_unread",
]
