"""What is said of an incident and of a run's end, without anything that is secret."""

from __future__ import annotations

from typing import Any

from ...diagnose.redact.redact import Redactor
from ...progress.records.incident import Incident

SCHEMA = 1


def describe_incident(run_id: str, incident: Incident, redactor: Redactor) -> dict[str, Any]:
    """The message of one incident. `needs_person`: the run has stopped by it."""
    v = incident.verdict
    where = ", ".join(
        p for p in (incident.node or "", f"rank {incident.rank}" if incident.rank is not None else "") if p
    )
    sure = f", {v.confidence:.0%} sure" if v is not None else ""
    line = v.root.text.strip()[:300] if v is not None and v.root is not None else ""
    stops = incident.action == "stop"
    text = (
        f"unbroken {run_id}: incident {incident.number} after step {incident.step}: {incident.reason}"
        f"{f' ({where}{sure})' if where else ''}. {'STOPPED, a person is needed' if stops else incident.action}: {redactor(incident.why)}"
        f"{f' | {redactor(line)}' if line else ''}"
    )
    return {
        "schema": SCHEMA, "kind": "incident", "run": run_id, "incident": incident.number, "step": incident.step,
        "reason": incident.reason, "category": str(v.category) if v is not None and v.category else None,
        "node": incident.node, "rank": incident.rank, "confidence": v.confidence if v is not None else None,
        "action": incident.action, "needs_person": stops, "why": redactor(incident.why), "line": redactor(line),
        "at": incident.detected, "text": text,
    }  # fmt: skip


def describe_end(run_id: str, how: str, step: int, why: str, redactor: Redactor) -> dict[str, Any]:
    """The message at a run's end: `how` is completed, interrupted or stopped."""
    return {
        "schema": SCHEMA, "kind": "end", "run": run_id, "how": how, "step": step, "why": redactor(why),
        "needs_person": how == "stopped",
        "text": f"unbroken {run_id}: {how} at step {step}{f': {redactor(why)}' if why else ''}",
    }  # fmt: skip
