"""The pod of a node, as Kubernetes is asked for it (pure).

Two containers of one image, which see each other's processes and share /dev/shm: `agent` holds agent and keeper, `ranks` the
ranks of each attempt. What ends the ranks, the kernel for their memory too, leaves agent, keeper and snapshots.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import UsageError
from .options import KubernetesOptions
from .pod.place import NODE_VARIABLE

AGENT, RANKS = "agent", "ranks"
RUN, INDEX = "unbroken/run", "unbroken/index"
PROGRAM = "unbroken.cluster.kubernetes.pod.node"
RANKS_PROGRAM = "unbroken.cluster.kubernetes.pod.ranks"
HOSTNAME = "kubernetes.io/hostname"
LEAVE_MARGIN_S = 5
_SHARED = ("env", "envFrom", "volumeMounts", "securityContext", "imagePullPolicy")
_AGENT_CPUS = "1"
Manifest = dict[str, Any]


def make_pod(
    options: KubernetesOptions,
    run_id: str,
    name: str,
    index: int,
    *,
    template: Mapping[str, Any] | None = None,
    exclude: Collection[str] = (),
    node: str = "",
) -> Manifest:
    """The pod of a run's node number `index`: on none of the nodes to `exclude`, or on `node` alone. `template` is a Pod, or {}."""
    pod: Manifest = copy.deepcopy(dict(template or {}))
    meta, spec = pod.setdefault("metadata", {}), pod.setdefault("spec", {})
    users: Manifest = next(iter(spec.get("containers", ())), {})
    meta["name"] = name
    meta["labels"] = {
        **meta.get("labels", {}), "app.kubernetes.io/name": "unbroken", RUN: run_id, INDEX: str(index),
    }  # fmt: skip
    spec.update(
        {
            "restartPolicy": "OnFailure", "shareProcessNamespace": True, "enableServiceLinks": False,
            "terminationGracePeriodSeconds": int(float(options.grace)),
            "affinity": _affinity(spec.get("affinity", {}), run_id, exclude, node),
            "volumes": [*spec.get("volumes", ()), *_volumes(options)],
            "containers": [_agent(options, run_id, users), _ranks(options, run_id, users)],
        }
    )  # fmt: skip
    # A script of the user's must not speak to the API in our name.
    spec.setdefault("automountServiceAccountToken", False)
    return {"apiVersion": "v1", "kind": "Pod", **{k: v for k, v in pod.items() if k in ("metadata", "spec")}}


def name_pod(run_id: str, index: int, token: str) -> str:
    """A name that Kubernetes takes for the pod of a run's node."""
    run = re.sub(r"[^a-z0-9-]", "-", run_id.lower()).strip("-")[:32]
    return f"unbroken-{run}-{index}-{token}"


def read_template(path: Path | None) -> Manifest:
    """A Pod from a file that has one, or the spec of one; {} without a file. Raises UsageError."""
    if path is None:
        return {}
    import yaml

    try:
        found = yaml.safe_load(path.read_text())
    except OSError as e:
        raise UsageError(f"the template cannot be read: {e.strerror}", where=str(path)) from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise UsageError(f"the template is no YAML: {' '.join(str(e).split())}", where=str(path)) from e
    if not isinstance(found, dict):
        raise UsageError("the template is neither a Pod nor the spec of one", where=str(path))
    if "kind" not in found and "spec" not in found:
        found = {"spec": found}
    spec = found.get("spec")
    if found.get("kind", "Pod") != "Pod" or not isinstance(spec, dict):
        raise UsageError("the template is neither a Pod nor the spec of one", where=str(path),
                         hint="Give the part below 'template:' of a Job, or a Pod")  # fmt: skip
    if len(spec.get("containers") or ()) > 1:
        raise UsageError("the template has more than one container", where=str(path),
                         hint="Leave one: what it says of environment and volumes counts for agent and ranks")  # fmt: skip
    return found


def _container(options: KubernetesOptions, name: str, users: Mapping[str, Any]) -> Manifest:
    made: Manifest = {k: copy.deepcopy(users[k]) for k in _SHARED if k in users}
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    mounts += [
        {"name": f"mount-{i}", "mountPath": m.rpartition(":")[2]} for i, m in enumerate(options.mounts)
    ]
    node = {"name": NODE_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    return {
        **made, "name": name, "image": options.image, "env": [*made.get("env", ()), node],
        "volumeMounts": [*made.get("volumeMounts", ()), *mounts],
        # What is told of the end of a container stands in its status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }  # fmt: skip


def _agent(options: KubernetesOptions, run_id: str, users: Mapping[str, Any]) -> Manifest:
    made = _container(options, AGENT, users)
    # Images made for CUDA ask for every GPU of the node; this container has none.
    made["env"] = [*made["env"], {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]
    program = [options.python, "-m", PROGRAM]
    grace = int(float(options.grace))
    leave = [*program, "leave", "--run-id", run_id, "--within", str(grace - LEAVE_MARGIN_S)]
    return {
        **made, "command": [*program, "hold", "--run-id", run_id, "--idle", f"{float(options.idle):g}"],
        "resources": _resources({"cpu": _AGENT_CPUS}, options.keeper_memory, {}),
        # The only notice that a pod has where the kubelet itself ends it.
        "lifecycle": {"preStop": {"exec": {"command": leave}}},
    }  # fmt: skip


def _ranks(options: KubernetesOptions, run_id: str, users: Mapping[str, Any]) -> Manifest:
    made = _container(options, RANKS, users)
    gpus = {options.gpu_resource: str(options.gpus)} if options.gpus else {}
    cpus = {"cpu": options.cpus} if options.cpus else {}
    ours = _resources(cpus, options.memory, gpus)
    theirs = users.get("resources", {})
    resources = {k: {**theirs.get(k, {}), **ours.get(k, {})} for k in ("requests", "limits")}
    return {
        **made, "command": [options.python, "-m", RANKS_PROGRAM, "hold", "--run-id", run_id],
        "resources": {k: v for k, v in resources.items() if v},
    }  # fmt: skip


def _resources(asked: Mapping[str, str], memory: int | None, devices: Mapping[str, str]) -> Manifest:
    sized = {"memory": str(int(memory))} if memory else {}
    found = {"requests": {**asked, **sized, **devices}, "limits": {**sized, **devices}}
    return {k: v for k, v in found.items() if v}


def _volumes(options: KubernetesOptions) -> list[Manifest]:
    limit = {"sizeLimit": str(int(options.shm))} if options.shm else {}
    found: list[Manifest] = [{"name": "shm", "emptyDir": {"medium": "Memory", **limit}}]
    for i, mount in enumerate(options.mounts):
        source = mount.rpartition(":")[0]
        kind = (
            {"hostPath": {"path": source}} if source.startswith("/")
            else {"persistentVolumeClaim": {"claimName": source}}
        )  # fmt: skip
        found.append({"name": f"mount-{i}", **kind})
    return found


def _affinity(users: Mapping[str, Any], run_id: str, exclude: Collection[str], node: str) -> Manifest:
    """One pod of the run on a node, none where it must not be."""
    made: Manifest = copy.deepcopy(dict(users))
    apart = made.setdefault("podAntiAffinity", {})
    ours = {"labelSelector": {"matchLabels": {RUN: run_id}}, "topologyKey": HOSTNAME}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    apart[required] = [*apart.get(required, ()), ours]
    fields = _fields(exclude, node)
    if fields:
        nodes = made.setdefault("nodeAffinity", {}).setdefault(required, {})
        terms = nodes.get("nodeSelectorTerms") or [{}]
        # Terms are alternatives: each has to keep out what is to be kept out.
        nodes["nodeSelectorTerms"] = [
            {**t, "matchFields": [*t.get("matchFields", ()), *fields]} for t in terms
        ]
    return made


def _fields(exclude: Collection[str], node: str) -> Sequence[Manifest]:
    if node:
        return [{"key": "metadata.name", "operator": "In", "values": [node]}]
    # The API takes one name for each of these.
    return [{"key": "metadata.name", "operator": "NotIn", "values": [n]} for n in sorted(exclude)]
