"""What the supervisor knows of an attempt's end, and where its logs lie: what a diagnosis is given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ....diagnose.judge.facts import Facts, HangFact
from ....progress import RunDir
from ..attempt.attempt import Attempt


def logs_of(run_dir: RunDir, attempt: Attempt) -> list[Path]:
    """The rank logs of an attempt that exist."""
    paths = [run_dir.rank_log(attempt.number, s.node, r) for r, s in sorted(attempt.ranks.items())]
    return [p for p in paths if p.exists()]


def facts_of(attempt: Attempt, lost_nodes: Sequence[str], hang: HangFact | None) -> Facts:
    """What the supervisor knows of an attempt's end, beside its logs."""
    return Facts(
        exits=attempt.exits(),
        lost_nodes=tuple(lost_nodes),
        hang=hang,
        nodes=tuple((r, s.node) for r, s in sorted(attempt.ranks.items())),
        oom_kills=tuple(r for r, s in sorted(attempt.ranks.items()) if s.oom),
        completed=attempt.all_finished,
        step=attempt.step if attempt.step >= 0 else None,
    )
