"""From a verdict of the logs, or none, to the one that also takes in what the supervisor saw."""

from __future__ import annotations

from ...progress.records.verdict import Verdict
from ..judge.facts import Facts
from .early_exit import blame_early_exit
from .kills import with_kill
from .root import with_root


def add_observations(verdict: Verdict, facts: Facts) -> Verdict:
    """The verdict with the kills, the roots and the early exits that only a supervisor sees."""
    return blame_early_exit(with_root(with_kill(verdict, facts), facts), facts)
