"""What one process of a rehearsal is to do, and how it is handed over."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class RehearsalPlan:
    """What one process of a rehearsal is to do."""

    trace: str
    """Folder for the traces."""
    steps: int
    """The process ends itself before the optimizer's step with this number, counted from 0 since the training's start."""
    kill_at: int = -1
    """In the first attempt the process is killed before this step; -1: never."""
    kill_rank: int = 0
    protected: str = ""
    """The folder that the rehearsal was started in: nothing there is written to."""
    allowed: str = ""
    """The rehearsal's own folder."""
    reference: tuple[tuple[str, ...], ...] = ()
    """By rank, the weights before each step of the undisturbed training: a resumed process finds in them where it is."""
    frozen_time: bool = False
    fixed_entropy: bool = False


def as_json(plan: RehearsalPlan) -> str:
    """What `main` reads."""
    return json.dumps(asdict(plan))
