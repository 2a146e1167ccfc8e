"""One interruption: what happened, its verdict, what was done, what it cost. From the decision to a page it is this type."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from ... import atomic
from ...errors import ContractError
from .. import RunDir
from .decision import Decision
from .state import Record
from .verdict import Outcome, Root, Verdict

SCHEMA = 3
_FROM_RECORD = "its file could not be written at the time: this is what the run's journal has of it"


@dataclass
class Incident:
    """`kind` is failed, hung, loss_spike, corrupted, lease, agent_lost, node_lost, preempted, slow, supervisor_lost or start_failed; times are seconds since the epoch, `phases`
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
    warm: int | None = None
    """How many ranks of the next attempt started from warm processes; None where that was not tried."""
    cold_why: str = ""
    """Why the others started cold."""
    resized: str = ""
    """With how many nodes the run went on, and when it takes one in again; "" where with as many as before."""

    def decide(self, verdict: Verdict, decision: Decision) -> None:
        """Takes in what it was and what is done about it."""
        self.verdict, self.step = verdict, decision.charged.step
        self.action, self.why = decision.action.value, decision.why

    @property
    def ended_attempt(self) -> bool:
        """Whether it ended its attempt; a supervisor that is succeeded in time ends none."""
        return self.next_attempt != self.attempt

    @property
    def reason(self) -> str:
        """What to call it where people read."""
        if not self.ended_attempt:
            return "SupervisorLost"
        return self.kind if self.verdict is None else self.verdict.title

    @property
    def detected_s(self) -> float:
        """Seconds from the last sign of life until it was noticed."""
        return max(0.0, self.phases.get("detect", 0.0), self.detected - self.last_sign)

    @property
    def resumed_s(self) -> float | None:
        """Seconds from noticing until the first step above the highest one before; None where that never came."""
        return None if self.resumed is None else max(0.0, self.resumed - self.detected)

    @property
    def node(self) -> str | None:
        """The node at fault, as far as it is known."""
        v = self.verdict
        named = (v.faulty.node if v and v.faulty else None, v.root.node if v and v.root else None)
        # Of an attempt that failed by itself, `nodes` were lost while it was ended: none of them is known to be the cause.
        lost = next(iter(self.nodes), None) if self.kind in ("node_lost", "agent_lost") else None
        return named[0] or named[1] or lost

    @property
    def rank(self) -> int | None:
        """The rank at fault, as far as it is known."""
        v = self.verdict
        for part in (v.faulty, v.root) if v is not None else ():
            if part is not None and part.rank is not None:
                return part.rank
        return None

    def as_json(self) -> dict[str, Any]:
        value = asdict(self)
        value["verdict"] = self.verdict.as_json() if self.verdict else None
        value["phases"] = {k: round(v, 3) for k, v in self.phases.items()}
        if self.warm is None:  # as before there were any
            del value["warm"], value["cold_why"]
        if not self.resized:  # as before a run could become smaller
            del value["resized"]
        return {"schema": SCHEMA if self.resized else 2 if self.warm is not None else 1, **value}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Incident:
        """Reads the JSON form, also of older and newer versions. Raises ContractError on a wrong shape."""
        try:
            verdict = value.get("verdict")
            return cls(
                number=int(value["incident"] if "incident" in value else value["number"]),
                attempt=int(value["attempt"]),
                kind=str(value["kind"]),
                step=int(value["step"]),
                last_sign=float(value["last_sign"]),
                detected=float(value["detected"]),
                verdict=Verdict.from_json(verdict) if verdict else None,
                action=str(value.get("action", "")),
                why=str(value.get("why", "")),
                nodes=dict(value.get("nodes") or {}),
                phases={str(k): float(v) for k, v in (value.get("phases") or {}).items()},
                resumed=value.get("resumed"),
                resumed_step=value.get("resumed_step"),
                steps_lost=value.get("steps_lost"),
                next_attempt=value.get("next_attempt"),
                warm=value.get("warm"),
                cold_why=str(value.get("cold_why", "")),
                resized=str(value.get("resized", "")),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ContractError(f"not an incident: {e}") from e

    @classmethod
    def from_record(cls, r: Record) -> Incident:
        """What a record of the journal (kind `incident`) has of it. Raises ContractError."""
        try:
            first = str(r.get("fingerprint", "")).split("/", 2)[2:]
            verdict = Verdict(
                Outcome(r.get("outcome", "unknown")), reason=r.get("reason"),
                root=Root(text=first[0]) if first else None, notes=(_FROM_RECORD,),
            )  # fmt: skip
            when = float(r["t"])
            return cls(
                int(r["incident"]), int(r["attempt"]), str(r["what"]), int(r["step"]), when, when, verdict,
                action=str(r.get("action", "")), why=str(r.get("why", "")),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError) as e:
            raise ContractError(f"not the record of an incident: {e}") from e

    def take_resumed(self, r: Record) -> None:
        """Takes in what the journal's record (kind `resumed`) has of its end."""
        self.resumed = self.detected + float(r.get("seconds", 0.0))
        self.resumed_step, self.steps_lost = r.get("first_step"), r.get("steps_lost")
        self.next_attempt = r.get("attempt")

    def write(self, run_dir: RunDir) -> None:
        """Writes incidents/NNNN.json, whole."""
        atomic.write_json(run_dir.incident(self.number), self.as_json())


def read_incidents(run_dir: RunDir) -> list[dict[str, Any]]:
    """All incidents of a run, oldest first, in their JSON form."""
    found = []
    for path in sorted(run_dir.incidents.glob("[0-9]*.json")):
        found.append(json.loads(path.read_bytes()))
    return found
