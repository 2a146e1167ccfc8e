"""What the state of pods and nodes means, in words: from objects as the API shows them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from unbroken.cluster.contract import Cordon
from unbroken.cluster.kubernetes.api import Refused
from unbroken.cluster.kubernetes.conditions import (
    find_killed_for_memory,
    has_ended_surely,
    has_never_run,
    is_silent,
    read_end,
    read_held,
    read_unready,
    read_waiting,
)
from unbroken.cluster.kubernetes.cordons import KEY, make_patch, read_cordon
from unbroken.cluster.kubernetes.pod.ranks import find_devices
from unbroken.cluster.kubernetes.rights import read_quantity, read_quota


def pod(*statuses: dict[str, Any], **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "p"}, "spec": {"nodeName": "k0", "containers": [{"name": "agent", "image": "reg/a:1"}]},
        "status": {"containerStatuses": list(statuses), **status},
    }  # fmt: skip


def container(name: str = "agent", **fields: Any) -> dict[str, Any]:
    return {"name": name, "image": "reg/a:1", "restartCount": 0, "ready": True, **fields}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return container(state={"waiting": {"reason": reason, "message": message}})


@pytest.mark.parametrize(
    ("status", "says", "never"),
    [
        (waiting("ErrImagePull", "manifest for reg/a:1 not found: manifest unknown"), "reg/a:1 cannot be pulled", True),
        (waiting("ImagePullBackOff", "pull access denied"), "pull access denied", True),
        (waiting("ErrImagePull", "dial tcp: i/o timeout"), "i/o timeout", False),
        (waiting("InvalidImageName", "couldn't parse"), "cannot be made", True),
        (waiting("CreateContainerConfigError", 'secret "x" not found'), 'secret "x" not found', True),
        (waiting("ContainerCreating"), "k0 makes the containers", False),
        (
            container(state={"terminated": {"exitCode": 1, "reason": "Error", "message": "a\nNo module named unbroken"}}),
            "ends at once (code 1: No module named unbroken)", True,
        ),
        (
            container(state={"waiting": {"reason": "CrashLoopBackOff"}}, restartCount=2,
                      lastState={"terminated": {"exitCode": 128, "reason": "StartError", "message": "no python3"}}),
            "StartError, code 128: no python3", True,
        ),
    ],
)  # fmt: skip
def test_why_a_pod_does_not_run(status: dict[str, Any], says: str, never: bool) -> None:
    found = read_waiting(pod(status))
    assert says in found.why and found.never is never


@pytest.mark.parametrize(
    ("code", "restarts", "never"),
    [(137, 0, False), (1, 1, True), (0, 0, True)],
    ids=["once", "again", "well, and nobody starts it again"],
)
def test_one_that_was_running_may_be_started_again(code: int, restarts: int, never: bool) -> None:
    ended = pod(container("ranks", restartCount=restarts, state={"terminated": {"exitCode": code}}))
    assert read_waiting(ended, was_running=True).never == never
    assert read_waiting(ended).never, "one that never ran"


def test_a_pod_that_no_node_takes_says_what_the_scheduler_said() -> None:
    message = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    found = read_waiting(pod(conditions=[condition]))
    assert message in found.why and not found.never


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ({"conditions": [{"type": "DisruptionTarget", "reason": "PreemptionByScheduler"}]}, "higher priority takes its place"),
        ({"conditions": [{"type": "DisruptionTarget", "reason": "EvictionByEvictionAPI"}]}, "a drain or an autoscaler"),
        ({"reason": "Evicted", "message": "The node was low on resource: memory.", "phase": "Failed"}, "low on resource: memory"),
        ({"reason": "NodeShutdown", "message": "Pod was terminated in response to imminent node shutdown.", "phase": "Failed"},
         "imminent node shutdown"),
        ({"phase": "Failed"}, "it has Failed"),
        ({}, "it is deleted"),
    ],
)  # fmt: skip
def test_why_a_pod_ends(status: dict[str, Any], says: str) -> None:
    assert says in read_end(pod(**status))


def test_only_what_the_kubelet_said_of_each_container_proves_that_it_has_ended() -> None:
    ended = {"terminated": {"exitCode": 0}}
    assert has_ended_surely(pod(container(state=ended), container("ranks", state=ended)))
    assert not has_ended_surely(pod(container(state=ended), container("ranks", state={"running": {}})))
    assert not has_ended_surely(pod()), "of nothing nothing is known"
    assert has_never_run(pod()) and has_never_run(pod(waiting("ErrImagePull")))
    assert not has_never_run(pod(container(state=ended)))
    assert not has_never_run(pod({**waiting("CrashLoopBackOff"), "restartCount": 1}))


def test_a_pod_that_is_not_ready_while_its_containers_run_is_on_a_node_that_is_not_heard_of() -> None:
    running = container(state={"running": {}})
    unready = [{"type": "Ready", "status": "False"}]
    assert is_silent(pod(running, conditions=unready))
    assert not is_silent(pod({**running, "ready": False}, conditions=unready))
    assert not is_silent(pod(running, conditions=[{"type": "Ready", "status": "True"}]))


def test_a_container_that_was_ended_for_its_memory_is_told_once() -> None:
    before = pod(container("ranks", state={"running": {}}))
    after = pod(
        container(
            "ranks", state={"running": {}}, restartCount=1, lastState={"terminated": {"reason": "OOMKilled"}}
        )
    )
    assert find_killed_for_memory(before, after) == ["ranks"] and find_killed_for_memory(after, after) == []


def node(ready: str = "True", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "k0", "resourceVersion": "7"}, "spec": spec,
            "status": {"conditions": [{"type": "Ready", "status": ready, "message": "kubelet stopped"}]}}  # fmt: skip


def test_what_a_node_says_of_itself() -> None:
    assert read_unready(node()) == "" and "kubelet stopped" in read_unready(node("Unknown"))
    assert "NotReady" in read_unready(node("False"))
    assert read_held(node()) == "" and "cordoned" in read_held(node(unschedulable=True))
    pressure = [{"key": "node.kubernetes.io/memory-pressure", "effect": "NoSchedule"}]
    assert "memory-pressure" in read_held(node(taints=pressure))
    ours = [{"key": KEY, "effect": "NoSchedule"}]
    assert read_held(node(taints=ours)) == "", "what the run itself put out of use is not taken from it"


def test_a_cordon_is_a_taint_beside_those_of_others_and_goes_alone() -> None:
    theirs = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    cordon = Cordon("k0", "unbroken", "XID 79 twice", 1234.5)
    found = node(taints=[theirs])
    patch = make_patch(found, cordon)
    assert patch["metadata"]["resourceVersion"] == "7" and theirs in patch["spec"]["taints"]
    tainted = {
        "metadata": {"name": "k0", "annotations": patch["metadata"]["annotations"]},
        "spec": patch["spec"],
    }
    assert read_cordon(tainted) == cordon
    assert make_patch(tainted, None)["spec"]["taints"] == [theirs]
    untainted = {**tainted, "spec": {"taints": [theirs]}}
    assert read_cordon(untainted) is None, "whoever took the taint away has released the node"
    assert read_cordon({"metadata": {"name": "k0", "annotations": {KEY: "{"}}, "spec": patch["spec"]}) is None


def test_a_quota_that_may_become_free_is_waited_for() -> None:
    text = 'pods "p" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=8, used: requests.nvidia.com/gpu=8, limited: requests.nvidia.com/gpu={}'
    full = read_quota(Refused(403, "Forbidden", text.format(8)))
    small = read_quota(Refused(403, "Forbidden", text.format(4)))
    assert full is not None and not full.never and "gpus is reached" in str(full)
    assert small is not None and small.never
    assert read_quota(Refused(403, "Forbidden", "violates PodSecurity")) is None
    assert [read_quantity(t) for t in ("500m", "64Gi", "8", "2k")] == [0.5, 64 * 2**30, 8, 2000]


def test_gpus_are_named_as_the_container_was_told() -> None:
    assert find_devices({"NVIDIA_VISIBLE_DEVICES": "GPU-1, GPU-2"}) == ["GPU-1", "GPU-2"]
    assert find_devices({"NVIDIA_VISIBLE_DEVICES": "void", "CUDA_VISIBLE_DEVICES": "0,1"}) == ["0", "1"]
    assert find_devices({}, devices="/nowhere*") == []


def test_the_ranks_container_may_start_later_than_the_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its silence had ended the report without a word: who had asked waited for five minutes."""
    from unbroken.cluster.kubernetes.pod import node

    answers = iter(
        [FileNotFoundError(2, "no socket yet"), ConnectionResetError(104, "it ended"), {"boot": "b"}]
    )

    def ask(path: str, what: str) -> object:
        found = next(answers)
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(node.door, "ask", ask)
    monkeypatch.setattr(node, "_LOOK_S", 0.0)
    program = node.PodProgram.__new__(node.PodProgram)
    program._socket = "ranks.sock"
    assert asyncio.run(program._survey_ranks()) == {"boot": "b"}
