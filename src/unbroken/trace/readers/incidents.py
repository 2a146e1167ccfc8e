"""Incidents: verdicts of `unbroken diagnose` and `unbroken run` in JSON, and logs of node faults."""

from __future__ import annotations

import datetime as dt
import re
from typing import Any

from ...samples.tables import Note
from ..store import Store
from .base import Head, ReadOptions, json_items
from .kubernetes import add_incidents, when


class IncidentReader:
    """Reads verdicts: one JSON object, a list, or one a line (incidents/0001.json, --json output)."""

    name = "incidents"
    title = "incidents: verdicts of `unbroken diagnose --json` and of a run's incidents/*.json"

    def score(self, head: Head) -> int:
        """Sure where a verdict's keys are seen."""
        keys = ('"outcome"', '"reason"', '"recoverable"', '"category"', '"action"')
        if not head.is_json:
            return 0
        return 90 if sum(k in head.text for k in keys) >= 3 else 0

    def read(self, store: Store, head: Head, options: ReadOptions) -> None:
        """Adds one incident a verdict; healthy ends are counted and left out."""
        rows, healthy = [], 0
        for i, item in enumerate(json_items(head.path)):
            verdict = flatten_incidents(item)
            if verdict.get("outcome") in ("completed", "running", "cancelled", "time_limit"):
                healthy += 1
                continue
            rows.append(
                incident_of(item, verdict, f"{head.path.stem}-{i}" if i else head.path.stem, options, head)
            )
        if healthy:
            store.note(
                Note("info", "verdicts that are no failures: left out", healthy, source=head.path.name)
            )
        if rows:
            add_incidents(store, rows)


def flatten_incidents(item: dict[str, Any]) -> dict[str, Any]:
    """The verdict in an incident file, or the object itself."""
    inner = item.get("verdict")
    return inner if isinstance(inner, dict) else item


def incident_of(
    item: dict[str, Any], verdict: dict[str, Any], number: str, options: ReadOptions, head: Head
) -> dict[str, Any]:
    """One row; what a verdict does not say stays empty."""
    root, faulty = verdict.get("root") or {}, verdict.get("faulty") or {}
    both = {**verdict, **item}

    def pick(*names: str) -> Any:
        return next((both[n] for n in names if both.get(n) is not None), None)

    return {
        "incident_id": str(pick("incident_id", "incident", "id") or number),
        "cluster": options.cluster or pick("cluster"),
        "job_id": None if pick("job_id", "run_id", "run") is None else str(pick("job_id", "run_id", "run")),
        "node": faulty.get("node") or root.get("node"),
        "gpu": faulty.get("gpu") if isinstance(faulty.get("gpu"), int) else None,
        "time_utc": moment(pick("time_utc", "time", "at") or root.get("time")),
        "outcome": verdict.get("outcome"),
        "category": verdict.get("category"),
        "reason": verdict.get("reason"),
        "gpu_num": number_or_none(pick("gpu_num", "world_size")),
        "to_failure_s": number_or_none(pick("to_failure_s", "elapsed_s")),
        "lost_s": number_or_none(pick("lost_s", "cost_s", "downtime_s")),
        "action": verdict.get("action"),
        "source": head.path.name,
    }


class FaultReader:
    """Reads InfiniteHBD's fault_trace.json: fault_start and fault_end of nodes, in days."""

    name = "node-faults"
    title = "node faults: fault_trace.json (events fault_start, fault_end)"

    def score(self, head: Head) -> int:
        """Sure where its keys are seen."""
        return 95 if head.is_json and '"event_time"' in head.text and '"fault_' in head.text else 0

    def read(self, store: Store, head: Head, options: ReadOptions) -> None:
        """Adds one incident a fault; a start without an end has no cost."""
        origin = dt.datetime(2024, 3, 30)
        opened: dict[str, dict[str, Any]] = {}
        rows: list[dict[str, Any]] = []
        stray = 0
        for e in sorted(json_items(head.path), key=lambda e: float(str(e.get("event_time") or 0))):
            node, kind = str(e.get("node_id")), str(e.get("event_type") or e.get("event") or e.get("type"))
            time = origin + dt.timedelta(days=float(str(e.get("event_time") or 0)))
            if kind == "fault_start":
                row = {
                    "incident_id": f"{node[:8]}-{len(rows)}",
                    "cluster": options.cluster or "InfiniteHBD",
                    "node": node,
                    "time_utc": time,
                    "outcome": "failed",
                    "category": "Infrastructure",
                    "reason": fault_name(e),
                    "source": head.path.name,
                }
                rows.append(row)
                opened[node] = row
            elif begun := opened.pop(node, {}):
                begun["lost_s"] = (time - begun["time_utc"]).total_seconds()
            else:
                stray += 1
        if stray:
            store.note(Note("set aside", "ends of faults without a start", stray, source=head.path.name))
        store.note(
            Note("assumption", "days count from 2024-03-30, the first of the release", source=head.path.name)
        )
        if rows:
            add_incidents(store, rows)


def fault_name(event: dict[str, Any]) -> str:
    """The class of a fault, or its level where it has none."""
    kind = event.get("fault_type")
    inner = kind if isinstance(kind, dict) else {}
    return str(inner.get("Class") or inner.get("Level") or kind or "Unknown")


def number_or_none(value: Any) -> float | None:
    """A float, or None."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None


def moment(value: Any) -> dt.datetime | None:
    """A time from ISO text or seconds since 1970."""
    if isinstance(value, (int, float)) and value > 0:
        return dt.datetime.fromtimestamp(value, dt.UTC).replace(tzinfo=None)
    return when(re.sub(r" UTC$", "+00:00", value)) if isinstance(value, str) else None
