"""When a run goes back to the command that it had: the one that took its place while it ran has failed before any step."""

from __future__ import annotations

from collections.abc import Sequence

from ...progress.records.decision import Decision
from ...progress.records.verdict import Action
from .policy import OUTSIDE


def goes_back(decision: Decision, proven: Sequence[str]) -> bool:
    """Whether the run goes back to `proven` (() for none) instead of stopping.

    Not for what came from outside the training, which the command has no part in. It never happens twice in a row: the
    command that the run goes back to has made steps before, and if it fails now, there is none before it.
    """
    stops = decision.action is Action.STOP and decision.charged.cause not in OUTSIDE
    return bool(proven) and stops and not decision.charged.reached
