"""What the state of a pod or a node means, in words: from the API's own objects (pure)."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .manifest import AGENT, INDEX, RANKS

Object = Mapping[str, Any]
"""An object as the API's JSON has it."""
_PULLING = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "ErrImageNeverPull")
_NEVER_PULLED = re.compile(
    r"not found|manifest unknown|denied|unauthorized|no such host|authentication required|invalid reference|does not exist",
    re.I,
)
_BROKEN = ("InvalidImageName", "CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_DISRUPTIONS = {
    "PreemptionByScheduler": "a pod of higher priority takes its place",
    "DeletionByTaintManager": "the node has a taint that the pod does not tolerate",
    "EvictionByEvictionAPI": "it is evicted, as by a drain or an autoscaler",
    "DeletionByPodGC": "its node is gone",
    "TerminationByKubelet": "the kubelet ends it, for pressure on the node or a shutdown",
}
_OUT = ("NoSchedule", "NoExecute")
_HELD_BY = "node.kubernetes.io/"


@dataclass(frozen=True)
class PodWaiting:
    """Why a pod does not run yet. `never`: it will not without somebody's doing; `hint` says whose, and what."""

    why: str
    never: bool = False
    hint: str = ""


def find_index(pod: Object) -> int:
    """The number of a pod among those of its run."""
    try:
        return int(pod["metadata"].get("labels", {}).get(INDEX, "0"))
    except ValueError:
        return 0


def find_node(pod: Object) -> str:
    """The node that a pod was given; "" for none yet."""
    return str(pod.get("spec", {}).get("nodeName") or "")


def find_condition(thing: Object, kind: str) -> Object:
    """One of an object's conditions; {} where it has none of that kind."""
    found = (c for c in thing.get("status", {}).get("conditions") or () if c.get("type") == kind)
    return next(found, {})


def find_container(pod: Object, name: str) -> Object:
    """The status of one of a pod's containers; {} where nothing is known of it."""
    found = (c for c in pod.get("status", {}).get("containerStatuses") or () if c.get("name") == name)
    return next(found, {})


def is_running(pod: Object) -> bool:
    """Whether both of its containers run."""
    return all("running" in find_container(pod, c).get("state", {}) for c in (AGENT, RANKS))


def is_leaving(pod: Object) -> bool:
    """Whether it was asked to end."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def is_over(pod: Object) -> bool:
    """Whether it has ended for good."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def has_ended_surely(pod: Object) -> bool:
    """Whether the kubelet has said of each of its containers that it has ended: of one that was force-deleted it has not."""
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    return bool(statuses) and all("terminated" in s.get("state", {}) for s in statuses)


def has_never_run(pod: Object) -> bool:
    """Whether none of its containers was ever started."""
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    return all(not s.get("restartCount") and set(s.get("state", {})) <= {"waiting"} for s in statuses)


def read_waiting(pod: Object, *, was_running: bool = False) -> PodWaiting:
    """Why a pod that was asked for does not run, or not any more: one that `was_running` may be started again after an end."""
    scheduled = find_condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return PodWaiting(f"no node takes the pod: {scheduled.get('message') or scheduled.get('reason')}")
    for name in (AGENT, RANKS):
        status = find_container(pod, name)
        if found := _read_container(pod, name, status, was_running):
            return found
    if not find_node(pod):
        return PodWaiting("the scheduler has not looked at the pod yet")
    return PodWaiting(f"{find_node(pod)} makes the containers")


def _read_container(pod: Object, name: str, status: Object, was_running: bool) -> PodWaiting | None:
    state = status.get("state", {})
    waiting, ended = state.get("waiting") or {}, _last_end(status)
    reason, message = waiting.get("reason", ""), " ".join(str(waiting.get("message", "")).split())[:400]
    image = status.get("image") or next(
        (c.get("image", "") for c in pod.get("spec", {}).get("containers", ()) if c.get("name") == name), ""
    )
    said = f"{reason}: {message}" if message else reason
    if reason in _PULLING:
        never = bool(_NEVER_PULLED.search(message)) or reason == "ErrImageNeverPull"
        return PodWaiting(f"the image {image} cannot be pulled ({said})", never,
                       "Look at the image's name, and at imagePullSecrets (in a template, or of the service account)")  # fmt: skip
    if reason in _BROKEN:
        return PodWaiting(f"the container {name} cannot be made ({said})", True,
                       f"Look at the image and the template: kubectl describe pod {pod['metadata']['name']}")  # fmt: skip
    if ended and (reason == "CrashLoopBackOff" or "terminated" in state):
        # What ends well is not started again; what was started again and ended again will not do better.
        never = not was_running or ended.get("exitCode") == 0 or status.get("restartCount", 0) > 0
        return PodWaiting(f"the container {name} ends at once ({read_container_end(ended)})", never, "")
    return None


def _last_end(status: Object) -> Object:
    found = status.get("state", {}).get("terminated") or status.get("lastState", {}).get("terminated")
    return found or {}


def read_container_end(ended: Object) -> str:
    """How a container ended, from `terminated` of its status."""
    how = f"code {ended.get('exitCode')}" + (f", signal {ended['signal']}" if ended.get("signal") else "")
    reason = str(ended.get("reason") or "")
    lines = str(ended.get("message") or "").strip().splitlines()
    words = [w for w in (reason if reason not in ("", "Error", "Completed") else "", how) if w]
    return ", ".join(words) + (f": {lines[-1].strip()[:300]}" if lines else "")


def find_killed_for_memory(before: Object, now: Object) -> list[str]:
    """The containers of a pod that the kernel has ended for their memory since `before`."""
    found = []
    for name in (AGENT, RANKS):
        count = find_container(now, name).get("restartCount", 0)
        ended = _last_end(find_container(now, name))
        if ended.get("reason") == "OOMKilled" and count > find_container(before, name).get("restartCount", 0):
            found.append(name)
    return found


def read_end(pod: Object) -> str:
    """Why a pod ends, or has ended."""
    status, name = pod.get("status", {}), pod["metadata"]["name"]
    disrupted = find_condition(pod, "DisruptionTarget")
    reason = str(disrupted.get("reason") or status.get("reason") or "")
    message = " ".join(str(status.get("message") or disrupted.get("message") or "").split())[:300]
    why = _DISRUPTIONS.get(reason, reason)
    if not why:
        why = "it is deleted" if is_leaving(pod) or not is_over(pod) else f"it has {status.get('phase')}"
    return f"pod {name}: {why}" + (f" ({message})" if message and message not in why else "")


def find_grace(pod: Object) -> float:
    """For how many seconds a pod that was asked to end may still run, as it was said."""
    return float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)


def read_time(text: str) -> float:
    """A time of the API in seconds since the Unix epoch."""
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def is_silent(pod: Object) -> bool:
    """Whether the pod is said not to be ready although its containers run: its node is not heard of."""
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    return find_condition(pod, "Ready").get("status") == "False" and bool(statuses) and all(
        s.get("ready") and "running" in s.get("state", {}) for s in statuses
    )  # fmt: skip


def find_deadline(pod: Object) -> float | None:
    """When the pod is ended by its own limit, in seconds since the Unix epoch; None where it has none."""
    limit, start = pod.get("spec", {}).get("activeDeadlineSeconds"), pod.get("status", {}).get("startTime")
    return read_time(start) + float(limit) if limit and start else None


def read_unready(node: Object) -> str:
    """Why a node is not ready; "" where it is."""
    ready = find_condition(node, "Ready")
    if ready.get("status") == "True":
        return ""
    if not ready:
        return "the node has said nothing yet"
    state = "NotReady" if ready.get("status") == "False" else "no news"
    return f"{state}: {ready.get('message') or ready.get('reason') or 'its kubelet says nothing'}"


def read_held(node: Object) -> str:
    """Why no new pod is put on a node, by people or by the node's own state; "" where one is. A cordon of ours is none."""
    if node.get("spec", {}).get("unschedulable"):
        return "somebody has cordoned it"
    held = [t["key"].removeprefix(_HELD_BY) for t in _taints(node) if t["key"].startswith(_HELD_BY)]
    return f"it has the taint {', '.join(held)}" if held else ""


def _taints(node: Object) -> Iterable[Mapping[str, str]]:
    return [t for t in node.get("spec", {}).get("taints") or () if t.get("effect") in _OUT]


def find_boot(node: Object) -> str:
    """The node's name for its boot; "" where it tells none."""
    return str(node.get("status", {}).get("nodeInfo", {}).get("bootID") or "")


def read_capacity(node: Object, resource: str) -> int:
    """How much of a whole resource (GPUs, cores) a node can ever give."""
    text = str(node.get("status", {}).get("allocatable", {}).get(resource, "0"))
    try:
        return int(text) if not text.endswith("m") else int(text[:-1]) // 1000
    except ValueError:
        return 0
