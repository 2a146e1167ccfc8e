"""One interruption: what happened, its verdict, what was done, what it cost."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from ... import atomic
from .. import RunDir
from .verdict import Verdict

SCHEMA = 1


@dataclass
class Incident:
    """`kind` is failed, hung, lease, agent_lost, node_lost, preempted, supervisor_lost or start_failed; times are seconds since the epoch, `phases`
    seconds each (detect, stop, diagnose, schedule, start, restore_and_first_step, replay)."""

    number: int
    attempt: int
    kind: str
    step: int
    last_sign: float
    detected: float
    verdict: Verdict | None = None
    action: str = ""
    why: str = ""
    nodes: dict[str, str] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    resumed: float | None = None
    resumed_step: int | None = None
    steps_lost: int | None = None
    next_attempt: int | None = None

    def as_json(self) -> dict[str, Any]:
        value = asdict(self)
        value["verdict"] = self.verdict.as_json() if self.verdict else None
        value["phases"] = {k: round(v, 3) for k, v in self.phases.items()}
        return {"schema": SCHEMA, **value}

    def write(self, run_dir: RunDir) -> None:
        """Writes incidents/NNNN.json, whole."""
        atomic.write_json(run_dir.incident(self.number), self.as_json())


def read_incidents(run_dir: RunDir) -> list[dict[str, Any]]:
    """All incidents of a run, oldest first, in their JSON form."""
    found = []
    for path in sorted(run_dir.incidents.glob("[0-9]*.json")):
        found.append(json.loads(path.read_bytes()))
    return found
