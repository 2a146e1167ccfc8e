"""What memory hands to reports: one past incident that resembles the present one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Similar:
    """A past incident. `score` lies in [0, 1]; `text` is its root line; `confirmed` says that a person or a later
    success stood behind its reason."""

    id: str
    score: float
    outcome: str
    reason: str | None
    text: str
    action: str
    confirmed: bool = False
    when: float = 0.0
    note: str = ""
