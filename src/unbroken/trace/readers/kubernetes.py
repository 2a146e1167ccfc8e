"""Kubernetes: `kubectl get pods -A -o json` and `kubectl get events -A -o json`, alone or together.

Pods of one job (by label or owner) are one row: GPUs summed, from the first pod's creation to the last
container's end. Events fill in what a pod that is gone no longer says, and become incidents where a node or
the scheduler took a pod away.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...samples.schema import INCIDENTS, JOBS
from ...samples.tables import Note
from ..store import Store
from .base import Head, ReadOptions, json_items
from .staging import Draft, stage

GROUP_LABELS = (
    "training.kubeflow.org/job-name",
    "pytorch-job-name",
    "volcano.sh/job-name",
    "ray.io/cluster",
    "leaderworkerset.sigs.k8s.io/name",
    "batch.kubernetes.io/job-name",
    "job-name",
)
"""Labels that say which job a pod belongs to, the outermost first."""

USER_LABELS = ("user", "owner", "app.kubernetes.io/created-by", "submitter", "username")
TEAM_LABELS = ("team", "project", "kueue.x-k8s.io/queue-name")
LOST = {
    "Preempted": "Preempted",
    "Preempting": "Preempted",
    "Evicted": "Evicted",
    "NodeNotReady": "NodeFailure",
    "TaintManagerEviction": "NodeFailure",
    "NodeLost": "NodeFailure",
    "OOMKilling": "OutOfMemoryError",
    "SystemOOM": "OutOfMemoryError",
}
"""Reasons of events that took a pod away, and the reason of the incident."""


class KubernetesReader:
    """Reads pods and events in JSON."""

    name = "kubernetes"
    title = "Kubernetes: pods or events, kubectl get ... -o json"

    def score(self, head: Head) -> int:
        """Sure where the kinds are seen."""
        if not head.is_json:
            return 0
        kinds = re.findall(r'"kind"\s*:\s*"(Pod|PodList|Event|EventList|List)"', head.text)
        if not kinds:
            return 0
        return 95 if '"metadata"' in head.text else 60

    def read(self, store: Store, head: Head, options: ReadOptions) -> None:
        """Adds jobs from pods, and incidents (and jobs whose pods are gone) from events."""
        items = json_items(head.path)
        pods = [i for i in items if i.get("kind", "Pod") == "Pod" and "spec" in i]
        events = [i for i in items if i.get("kind") == "Event" or "involvedObject" in i or "regarding" in i]
        other = len(items) - len(pods) - len(events)
        if other:
            store.note(
                Note(
                    "set aside", "objects that are neither pods nor events", other, len(items), head.path.name
                )
            )
        cluster = options.cluster or "kubernetes"
        jobs = group_pods(pods, cluster)
        known = {(p["metadata"].get("namespace"), p["metadata"].get("name")) for p in pods}  # type: ignore[attr-defined]
        jobs += from_events(events, known, cluster)
        if jobs:
            add_jobs(store, jobs, head.path.name)
        incidents = list(incidents_of(events, cluster, head.path.name))
        if incidents:
            add_incidents(store, incidents)
        if pods:
            store.note(
                Note(
                    "assumption",
                    f"{len(pods)} pods are {len(jobs)} jobs: grouped by job label or owner; a pod deleted before its end is CANCELLED",
                    source=head.path.name,
                )
            )


@dataclass
class PodJob:
    """The pods of one job, folded together."""

    job_id: str
    name: str
    namespace: str
    user: str | None
    team: str | None
    submit: dt.datetime | None = None
    start: dt.datetime | None = None
    end: dt.datetime | None = None
    gpus: float = 0.0
    cpus: float = 0.0
    mem_gib: float = 0.0
    nodes: set[str] = field(default_factory=set)
    states: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    exit_code: int | None = None


def group_pods(pods: Iterable[Mapping[str, Any]], cluster: str) -> list[dict[str, Any]]:
    """One row a job."""
    jobs: dict[tuple[str, str], PodJob] = {}
    for pod in pods:
        meta, spec, status = pod.get("metadata") or {}, pod.get("spec") or {}, pod.get("status") or {}
        labels = meta.get("labels") or {}
        namespace = meta.get("namespace") or "default"
        group = (
            next((labels[k] for k in GROUP_LABELS if labels.get(k)), None) or owner(meta) or meta.get("name")
        )
        attempt = labels.get("batch.kubernetes.io/controller-uid") or labels.get("controller-uid") or ""
        key = (namespace, f"{group}/{attempt}" if attempt else str(group))
        job = jobs.setdefault(
            key,
            PodJob(
                f"{namespace}/{group}" + (f"#{attempt[:8]}" if attempt else ""),
                str(group),
                namespace,
                next((labels[k] for k in USER_LABELS if labels.get(k)), None),
                next((labels[k] for k in TEAM_LABELS if labels.get(k)), None) or namespace,
            ),
        )
        for container in spec.get("containers") or ():
            wanted = {**((container.get("resources") or {}).get("requests") or {})}
            wanted |= (container.get("resources") or {}).get("limits") or {}
            job.gpus += sum(quantity(v) for k, v in wanted.items() if re.search(r"/(gpu|mig-)", k))
            job.cpus += quantity(wanted.get("cpu", 0))
            job.mem_gib += quantity(wanted.get("memory", 0)) / 2**30
        if spec.get("nodeName"):
            job.nodes.add(spec["nodeName"])
        fold_times(job, meta, status)
    return [row_of(j, cluster) for j in jobs.values()]


def fold_times(job: PodJob, meta: Mapping[str, Any], status: Mapping[str, Any]) -> None:
    """Adds one pod's times and end to its job."""
    containers = status.get("containerStatuses") or ()
    starts, ends = [], []
    for c in containers:
        for state in (c.get("state") or {}, c.get("lastState") or {}):
            for kind in ("terminated", "running"):
                if inner := state.get(kind):
                    starts.append(when(inner.get("startedAt")))
                    if kind == "terminated" and state is (c.get("state") or {}):
                        ends.append(when(inner.get("finishedAt")))
                        if inner.get("exitCode"):
                            job.exit_code = int(inner["exitCode"])
                            job.reasons.append(str(inner.get("reason") or ""))
    submit = when(meta.get("creationTimestamp"))
    job.submit = least(job.submit, submit)
    job.start = least(job.start, *starts, *([when(status.get("startTime"))] if not starts else []))
    deleted = when(meta.get("deletionTimestamp"))
    phase = status.get("phase") or "Unknown"
    if status.get("reason"):
        job.reasons.append(str(status["reason"]))
    if deleted and phase not in ("Succeeded", "Failed"):
        phase = "Cancelled"
        ends.append(deleted)
    job.states.append(phase)
    job.end = most(job.end, *ends)


def row_of(job: PodJob, cluster: str) -> dict[str, Any]:
    """The job as a row: failed if any pod failed, running if any runs, else as its pods ended."""
    for phase, state in (
        ("Failed", "FAILED"),
        ("Cancelled", "CANCELLED"),
        ("Running", "RUNNING"),
        ("Pending", "PENDING"),
        ("Succeeded", "SUCCEEDED"),
    ):
        if phase in job.states:
            word = state
            break
    else:
        word = "UNKNOWN"
    raw = next((r for r in job.reasons if r and r not in ("Completed", "Error")), None)
    return {
        "job_id": job.job_id,
        "cluster": cluster,
        "user": job.user,
        "team": job.team,
        "name": job.name,
        "state": word,
        "state_raw": raw or word.capitalize(),
        "submit_utc": job.submit,
        "start_utc": job.start,
        "end_utc": job.end,
        "node_num": len(job.nodes) or None,
        "gpu_num": job.gpus,
        "cpu_num": job.cpus,
        "mem_gib": job.mem_gib,
        "exit_code": job.exit_code,
        "nodes": sorted(job.nodes) or None,
    }


def from_events(
    events: Iterable[Mapping[str, Any]], known: set[tuple[Any, Any]], cluster: str
) -> list[dict[str, Any]]:
    """Jobs for pods that only events remember: from Scheduled to Killing; how they ended is not known."""
    seen: dict[tuple[str, str], dict[str, dt.datetime | None]] = {}
    for e in events:
        about = e.get("involvedObject") or e.get("regarding") or {}
        if about.get("kind") != "Pod" or (about.get("namespace"), about.get("name")) in known:
            continue
        slot = seen.setdefault((about.get("namespace") or "default", about.get("name") or "?"), {})
        time = event_time(e)
        first = when(e.get("firstTimestamp")) or time
        match e.get("reason"):
            case "Scheduled" | "FailedScheduling" | "SuccessfulCreate":
                slot["submit"] = least(slot.get("submit"), first)
                if e.get("reason") == "Scheduled":
                    slot["start"] = least(slot.get("start"), time)
            case "Started":
                slot["start"] = least(slot.get("start"), first)
            case "Killing" | "Evicted" | "Preempted":
                slot["end"] = most(slot.get("end"), time)
    return [
        {
            "job_id": f"{ns}/{pod}",
            "cluster": cluster,
            "team": ns,
            "name": pod,
            "state": "UNKNOWN" if t.get("end") else "RUNNING",
            "state_raw": "known from events only",
            "submit_utc": t.get("submit"),
            "start_utc": t.get("start"),
            "end_utc": t.get("end"),
        }
        for (ns, pod), t in seen.items()
        if t.get("submit") or t.get("start")
    ]


def incidents_of(events: Iterable[Mapping[str, Any]], cluster: str, source: str) -> Iterable[dict[str, Any]]:
    """Events that took a pod or a node away."""
    for e in events:
        reason = LOST.get(str(e.get("reason")))
        if not reason:
            continue
        about = e.get("involvedObject") or e.get("regarding") or {}
        node = about.get("name") if about.get("kind") == "Node" else (e.get("source") or {}).get("host")
        yield {
            "incident_id": (e.get("metadata") or {}).get("uid")
            or (e.get("metadata") or {}).get("name")
            or "event",
            "cluster": cluster,
            "job_id": f"{about.get('namespace')}/{about.get('name')}" if about.get("kind") == "Pod" else None,
            "node": node,
            "time_utc": event_time(e),
            "outcome": "failed",
            "category": "Infrastructure"
            if reason in ("NodeFailure", "Evicted", "Preempted")
            else "Framework",
            "reason": reason,
            "source": source,
        }


def add_jobs(store: Store, rows: list[dict[str, Any]], source: str) -> None:
    """Stages rows that were built in Python, through the same finish as every other."""
    import pyarrow as pa

    table = pa.Table.from_pylist([{c: r.get(c) for c in JOBS.names} for r in rows], schema=JOBS.arrow())
    raw = store.fresh("k8s")
    store.con.register(f"{raw}_arrow", table)
    store.con.execute(f"CREATE TABLE {raw} AS SELECT * FROM {raw}_arrow")
    store.con.unregister(f"{raw}_arrow")
    columns = {c: f'"{c}"' for c in JOBS.names if c not in ("state", "queue_s", "duration_s", "source")}
    stage(
        store,
        Draft(raw, columns, '"state"', text="job_id", state_extra={"UNKNOWN": "UNKNOWN"}),
        source,
    )


def add_incidents(store: Store, rows: list[dict[str, Any]]) -> None:
    """Adds incidents that were built in Python."""
    import pyarrow as pa

    table = pa.Table.from_pylist(
        [{c: r.get(c) for c in INCIDENTS.names} for r in rows], schema=INCIDENTS.arrow()
    )
    part = store.fresh("incidents_part")
    store.con.register(f"{part}_arrow", table)
    store.con.execute(f"CREATE TABLE {part} AS SELECT * FROM {part}_arrow")
    store.con.unregister(f"{part}_arrow")
    store.add_part("incidents", part)


def owner(meta: Mapping[str, Any]) -> str | None:
    """The name of the controller that owns the pod."""
    for o in meta.get("ownerReferences") or ():
        if o.get("controller") or o.get("kind") not in ("Node",):
            return str(o.get("name"))
    return None


def event_time(event: Mapping[str, Any]) -> dt.datetime | None:
    """When the event was last seen."""
    series = event.get("series") or {}
    return (
        when(event.get("lastTimestamp"))
        or when(series.get("lastObservedTime"))
        or when(event.get("eventTime"))
        or when((event.get("metadata") or {}).get("creationTimestamp"))
    )


def when(text: Any) -> dt.datetime | None:
    """A time in UTC without a zone, or None."""
    if not isinstance(text, str) or not text:
        return None
    try:
        value = dt.datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return value.astimezone(dt.UTC).replace(tzinfo=None) if value.tzinfo else value


def least(*times: dt.datetime | None) -> dt.datetime | None:
    """The earliest of those that are there."""
    return min((t for t in times if t), default=None)


def most(*times: dt.datetime | None) -> dt.datetime | None:
    """The latest of those that are there."""
    return max((t for t in times if t), default=None)


SUFFIX = {
    "m": 1e-3,
    "k": 1e3,
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


def quantity(value: Any) -> float:
    """A Kubernetes quantity as a number: 500m, 64Gi, 8; 0 for what is none."""
    m = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([a-zA-Z]*)", str(value).strip())
    if not m or (m[2] and m[2] not in SUFFIX):
        return 0.0
    return float(m[1]) * SUFFIX.get(m[2], 1.0)
