"""Nodes: a scheduler, and a kubelet on each that starts the containers of its pods as processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kmock

from unbroken.cluster.kubernetes.manifest import RUN
from unbroken.cluster.kubernetes.pod.place import pod_folder

from .api import FakeApi, Object, stamp
from .containers import Container

_TICK_S = 0.03


@dataclass
class Pod:
    """What a kubelet knows of a pod that it runs. `memory` is what both containers share."""

    uid: str
    memory: Path
    containers: dict[str, Container] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    last: dict[str, Object] = field(default_factory=dict)
    ending: asyncio.Task[None] | None = None

    def remove(self) -> None:
        """Ends what is in it, and what lies in its memory goes with it: no pod after it finds a file there."""
        for container in self.containers.values():
            container.kill()
        shutil.rmtree(self.memory, ignore_errors=True)


@dataclass
class Node:
    """A node. `heard`: whether the API server and its kubelet reach each other; `on`: whether it has power."""

    name: str
    gpus: int = 0
    on: bool = True
    heard: bool = True
    boot: str = field(default_factory=lambda: str(uuid.uuid4()))
    pods: dict[str, Pod] = field(default_factory=dict)
    sockets: set[Any] = field(default_factory=set)


class Nodes:
    """All nodes of a cluster. `images` can be pulled."""

    def __init__(
        self, api: FakeApi, names: list[str], folder: Path, env: Mapping[str, str], gpus: int
    ) -> None:
        self.api, self.folder, self.env = api, folder, dict(env)
        self.nodes = {n: Node(n, gpus) for n in names}
        self.images = {"registry.test/unbroken:1"}
        self.held = False
        """Whether the scheduler gives no pod a node."""
        api.run_in, api.read_log = self.run_in, self.read_log
        for node in self.nodes.values():
            api.put("nodes", self._make_object(node), "ADDED")

    def _make_object(self, node: Node) -> Object:
        return {
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": node.name, "uid": str(uuid.uuid4()), "labels": {"kubernetes.io/hostname": node.name}},
            "spec": {},
            "status": {
                "allocatable": {"cpu": "8", "nvidia.com/gpu": str(node.gpus)}, "nodeInfo": {"bootID": node.boot},
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }  # fmt: skip

    def find_object(self, node: str) -> Object:
        return self.api.objects["nodes", "", node]

    def say_ready(self, node: Node) -> None:
        """What the node controller says of it."""
        item = self.find_object(node.name)
        ok = node.on and node.heard
        item["status"]["conditions"] = [
            {"type": "Ready", "status": "True"} if ok
            else {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown",
                  "message": "Kubelet stopped posting node status."}
        ]  # fmt: skip
        item["status"]["nodeInfo"]["bootID"] = node.boot
        self.api.put("nodes", item)

    async def run(self) -> None:
        """The scheduler and the kubelets, until it is cancelled."""
        while True:
            for pod in self.api.find("pods"):
                if not pod["spec"].get("nodeName"):
                    self._schedule(pod)
            for node in self.nodes.values():
                if node.on:
                    self._sync(node)
            await asyncio.sleep(_TICK_S)

    # --- the scheduler

    def _schedule(self, pod: Object) -> None:
        whys = {}
        for node in self.nodes.values():
            why = self._find_obstacle(node, pod)
            if not why:
                pod["spec"]["nodeName"] = node.name
                pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
                self.api.put("pods", pod)
                return
            whys[why] = whys.get(why, 0) + 1
        said = ", ".join(f"{n} {why}" for why, n in sorted(whys.items()))
        message = f"0/{len(self.nodes)} nodes are available: {said}."
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        if pod["status"].get("conditions") != [condition]:
            pod["status"]["conditions"] = [condition]
            self.api.put("pods", pod)

    def _find_obstacle(self, node: Node, pod: Object) -> str:
        item, spec = self.find_object(node.name), pod["spec"]
        if self.held:
            return "Insufficient nvidia.com/gpu"
        if not (node.on and node.heard):
            return "node(s) had untolerated taint {node.kubernetes.io/unreachable: }"
        if item["spec"].get("unschedulable") or item["spec"].get("taints"):
            return "node(s) had untolerated taint"
        required = "requiredDuringSchedulingIgnoredDuringExecution"
        affinity = spec.get("affinity", {})
        terms = affinity.get("nodeAffinity", {}).get(required, {}).get("nodeSelectorTerms")
        if terms and not any(self._matches(t, node.name) for t in terms):
            return "node(s) didn't match Pod's node affinity/selector"
        for other in self.api.find("pods", pod["metadata"]["namespace"]):
            if other["spec"].get("nodeName") == node.name and other["status"].get("phase") not in (
                "Failed",
                "Succeeded",
            ):
                for rule in affinity.get("podAntiAffinity", {}).get(required, ()):
                    wanted = rule["labelSelector"]["matchLabels"].items()
                    if wanted <= other["metadata"].get("labels", {}).items():
                        return "node(s) didn't match pod anti-affinity rules"
        return ""

    @staticmethod
    def _matches(term: Object, name: str) -> bool:
        for rule in term.get("matchFields", ()):
            assert rule["key"] == "metadata.name" and len(rule["values"]) == 1, "the API takes one name"
            if (name in rule["values"]) != (rule["operator"] == "In"):
                return False
        return True

    # --- the kubelet

    def _sync(self, node: Node) -> None:
        there = {
            p["metadata"]["uid"]: p for p in self.api.find("pods") if p["spec"].get("nodeName") == node.name
        }
        if not node.heard:
            return  # it goes on with what it has
        for uid in [u for u in node.pods if u not in there]:
            node.pods.pop(uid).remove()  # somebody has removed the object
        for uid, item in there.items():
            pod = node.pods.get(uid) or self._make_pod(node, item)
            if "deletionTimestamp" in item["metadata"]:
                if pod.ending is None:
                    pod.ending = asyncio.create_task(self._end(node, pod, item))
            elif item["status"].get("phase") not in ("Failed", "Succeeded"):
                self._run(node, pod, item)

    @staticmethod
    def _make_pod(node: Node, item: Object) -> Pod:
        meta = item["metadata"]
        memory = pod_folder(meta.get("labels", {}).get(RUN, ""), node.name)
        shutil.rmtree(memory, ignore_errors=True)  # of tests that were killed
        pod = node.pods[meta["uid"]] = Pod(meta["uid"], memory)
        return pod

    def _run(self, node: Node, pod: Pod, item: Object) -> None:
        deadline = item["spec"].get("activeDeadlineSeconds")
        if (
            deadline
            and pod.containers
            and time.time() - min(c.started for c in pod.containers.values()) > deadline
        ):
            for container in pod.containers.values():
                container.kill()
            item["status"] |= {
                "phase": "Failed",
                "reason": "DeadlineExceeded",
                "message": "it was active too long",
            }
            self._say(pod, item)
            return
        for spec in item["spec"]["containers"]:
            name = spec["name"]
            if spec["image"] not in self.images:
                self._say_waiting(item, spec)
                return
            container = pod.containers.get(name)
            if container is None:
                pod.containers[name] = self._start(node, item, spec)
            elif container.poll() is not None and container.code != 0 and pod.restarts.get(name, 0) < 5:
                pod.last[name] = self._describe_end(container)
                pod.restarts[name] = pod.restarts.get(name, 0) + 1
                self._say(pod, item)  # the end is seen before the next start
                if not container.refused and time.time() - container.started > 1:
                    pod.containers[name] = self._start(node, item, spec)
        self._say(pod, item)

    def _start(self, node: Node, item: Object, spec: Object) -> Container:
        env = dict(self.env)
        for variable in spec.get("env", ()):
            path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            env[variable["name"]] = node.name if path == "spec.nodeName" else variable.get("value", "")
        gpus = int(spec.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0))
        if gpus:
            env["NVIDIA_VISIBLE_DEVICES"] = ",".join(f"GPU-{node.name}-{i}" for i in range(gpus))
        log = self.folder / f"{item['metadata']['name']}.{spec['name']}.log"
        return Container(spec["name"], spec["command"], env, log)

    def _describe_end(self, container: Container) -> Object:
        text = container.log.read_text(errors="replace") if container.log.exists() else ""
        ended: Object = {
            "exitCode": container.code, "reason": "Completed" if container.code == 0 else "Error",
            "message": "\n".join(text.splitlines()[-3:]) if container.code else "", "finishedAt": stamp(),
            "containerID": container.id,
        }  # fmt: skip
        if container.refused:
            ended |= {"reason": "StartError", "message": container.refused}
        elif container.code == 128 + signal.SIGKILL:
            ended["reason"] = "OOMKilled" if getattr(container, "no_memory", False) else "Error"
        return ended

    def _say_waiting(self, item: Object, spec: Object) -> None:
        message = f'failed to pull and unpack image "{spec["image"]}": {spec["image"]}: not found'
        statuses = [
            {"name": c["name"], "image": c["image"], "ready": False, "restartCount": 0, "lastState": {},
             "state": {"waiting": {"reason": "ErrImagePull", "message": message}}}
            for c in item["spec"]["containers"]
        ]  # fmt: skip
        if item["status"].get("containerStatuses") != statuses:
            item["status"]["containerStatuses"] = statuses
            self.api.put("pods", item)

    def _say(self, pod: Pod, item: Object) -> None:
        """Brings the pod's status up to date, where it has changed."""
        statuses = []
        for name, container in pod.containers.items():
            running = container.poll() is None
            state = (
                {"running": {"startedAt": stamp(container.started)}}
                if running
                else {"terminated": self._describe_end(container)}
            )
            if not running and "terminated" in pod.last.get(f"{name}.said", {}):
                state = pod.last[f"{name}.said"]  # with its time
            if not running:
                pod.last[f"{name}.said"] = state
            else:
                pod.last.pop(f"{name}.said", None)
            last = {"terminated": pod.last[name]} if name in pod.last else {}
            statuses.append(
                {"name": name, "ready": running, "restartCount": pod.restarts.get(name, 0), "state": state, "lastState": last,
                 "image": "registry.test/unbroken:1", "containerID": container.id}
            )  # fmt: skip
        status = item["status"]
        phase = status.get("phase", "Pending")
        if phase != "Failed" and pod.containers:
            over = all(c.code == 0 for c in pod.containers.values())
            phase = "Succeeded" if over and "deletionTimestamp" not in item["metadata"] else "Running"
        new = {
            **status,
            "phase": phase,
            "containerStatuses": statuses,
            "startTime": status.get("startTime", stamp()),
        }
        new["conditions"] = [c for c in status.get("conditions", ()) if c["type"] != "Ready"]
        new["conditions"].append({"type": "Ready", "status": "True" if phase == "Running" else "False"})
        if json.dumps(new, sort_keys=True) != json.dumps(status, sort_keys=True):
            item["status"] = new
            self.api.put("pods", item)

    async def _end(self, node: Node, pod: Pod, item: Object) -> None:
        """preStop, SIGTERM, and SIGKILL when the time of grace is over; the object goes last."""
        deadline = time.monotonic() + item["metadata"]["deletionGracePeriodSeconds"]
        specs = {c["name"]: c for c in item["spec"]["containers"]}

        async def end(container: Container) -> None:
            hook = specs[container.name].get("lifecycle", {}).get("preStop")
            if hook and container.poll() is None:
                process = await asyncio.create_subprocess_exec(
                    *hook["exec"]["command"], env=container.env, cwd="/", start_new_session=True
                )
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), max(0.0, deadline - time.monotonic()))
            container.signal(signal.SIGTERM)
            while container.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            await asyncio.to_thread(container.kill)
            while container.poll() is None:
                await asyncio.sleep(0.01)

        await asyncio.gather(*(end(c) for c in pod.containers.values()))
        pod.remove()
        while not (node.heard and node.on):
            await asyncio.sleep(_TICK_S)
        if self.api.objects.get(("pods", item["metadata"]["namespace"], item["metadata"]["name"])) is item:
            self._say(pod, item)
            self.api.put("pods", item, "DELETED")
        node.pods.pop(pod.uid, None)

    # --- what the API asks of kubelets

    def _find(self, item: Object) -> tuple[Node, Pod]:
        node = self.nodes[item["spec"].get("nodeName", "")]
        if not (node.on and node.heard):
            raise kmock.KubernetesError(
                status=500, reason="InternalError", message="dial tcp: no route to host"
            )
        return node, node.pods[item["metadata"]["uid"]]

    def read_log(self, item: Object, container: str) -> str:
        return self._find(item)[1].containers[container].log.read_text(errors="replace")

    def run_in(self, item: Object, name: str, argv: list[str]) -> Any:
        node, pod = self._find(item)
        container = pod.containers.get(name)
        if container is None or container.poll() is not None:
            raise kmock.KubernetesError(
                status=500, reason="InternalError", message=f"container not found ({name})"
            )

        async def serve(socket: Any) -> None:
            node.sockets.add(socket)
            try:
                await _serve(socket, argv, container.env)
            finally:
                node.sockets.discard(socket)

        return serve


async def _serve(socket: Any, argv: list[str], env: Mapping[str, str]) -> None:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *argv, env=env, cwd="/", stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, limit=1 << 20
    )

    async def forward(channel: int, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(1 << 15):
            await socket.send_bytes(bytes([channel]) + data)

    async def take() -> None:
        assert process.stdin is not None
        async for message in socket:
            process.stdin.write(message.data[1:])
        process.stdin.close()  # the connection is gone

    assert process.stdout is not None and process.stderr is not None
    outputs = [
        asyncio.create_task(forward(1, process.stdout)),
        asyncio.create_task(forward(2, process.stderr)),
    ]
    taking = asyncio.create_task(take())
    ended = asyncio.create_task(process.wait())
    await asyncio.wait({ended, taking}, return_when=asyncio.FIRST_COMPLETED)
    if not ended.done():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(ended), 3)
    with contextlib.suppress(ConnectionError, RuntimeError, TimeoutError):
        if ended.done():
            await asyncio.wait(outputs, timeout=1)
            status = {"status": "Success"} if process.returncode == 0 else {
                "status": "Failure", "reason": "NonZeroExitCode", "message": f"command terminated with exit code {process.returncode}",
                "details": {"causes": [{"reason": "ExitCode", "message": str(process.returncode)}]},
            }  # fmt: skip
            await socket.send_bytes(b"\x03" + json.dumps(status).encode())
            await socket.close()
    for task in (*outputs, taking):
        task.cancel()
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        await process.wait()
