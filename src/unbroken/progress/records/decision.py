"""What was decided about an incident, and what counts of those before it."""

from __future__ import annotations

from dataclasses import dataclass, field

from .verdict import Action


@dataclass(frozen=True)
class PastIncident:
    """An incident before this one. `step` is the highest completed step when it happened (-1 for none); `reached`
    says that its own attempt had completed one, `named` that it was known which node it was, `at` when it was noticed
    (seconds since the epoch)."""

    cause: str
    fingerprint: str
    step: int
    reached: bool = True
    named: bool = field(default=True, compare=False)
    at: float | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Rollback:
    """Nothing after step `before` of the attempts so far is restored any more, and the samples with the absolute numbers in
    `skip` ([start, stop) each) are never used."""

    before: int
    skip: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Decision:
    """What to do. `exclude` are nodes not to use again; `suspects` leave at once, are tested aside and return where nothing is found;
    `test_pairs` asks for a test of all nodes before the next attempt. `delay_s` is how long to wait before the restart. `charged` is what
    the incident counts as from now on: its budget is `charged.cause`. `rollback` is for a loss that does not come back."""

    action: Action
    why: str
    charged: PastIncident
    exclude: tuple[str, ...] = ()
    delay_s: float = 0.0
    rollback: Rollback | None = None
    suspects: tuple[str, ...] = ()
    test_pairs: bool = False
