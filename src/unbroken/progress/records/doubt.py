"""Of a node whose processes are not proven gone: why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Doubt:
    """Why it is not proven that a node's processes of `attempt`, and of those before it, are gone. `held` is how they
    were held ("cgroup", "parent", "marks"): another way knows nothing of them and cannot prove it later."""

    attempt: int
    why: str
    held: str = ""
