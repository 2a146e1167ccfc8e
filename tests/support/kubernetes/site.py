"""A whole cluster in a thread of its own, and what can happen to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import kmock

from .api import FakeApi, Object, stamp
from .nodes import Node, Nodes

IMAGE = "registry.test/unbroken:1"


class KubernetesSite:
    """Start it by `with`. `kubeconfig` is what the client is given."""

    def __init__(
        self, folder: Path, names: list[str], env: Mapping[str, str] | None = None, gpus: int = 0
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._names, self._gpus = folder, names, gpus
        kept = {k: v for k, v in os.environ.items() if not k.startswith("UNBROKEN_")}
        self._env = kept | dict(env or {})
        self.kubeconfig = folder / "kubeconfig"
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self.api: FakeApi
        self.all: Nodes
        self.errors: list[BaseException] = []

    def __enter__(self) -> KubernetesSite:
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run()), name="kubernetes", daemon=True
        )
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None and self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        for node in self.all.nodes.values():
            for pod in node.pods.values():
                pod.remove()
        assert not self.errors, self.errors

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.api = FakeApi()
        async with self.api, kmock.Server(self.api) as server:
            self.all = Nodes(self.api, self._names, self.folder, self._env, self._gpus)
            self._write_config(str(server.url).rstrip("/"))
            running = asyncio.create_task(self.all.run())
            running.add_done_callback(lambda t: None if t.cancelled() else self.errors.append(t.exception()))  # type: ignore[arg-type]
            self._ready.set()
            await self._stop.wait()
            running.cancel()
            self.api.break_watches()
            for node in self.all.nodes.values():
                for socket in list(node.sockets):
                    with contextlib.suppress(Exception):
                        await asyncio.wait_for(socket.close(), 1)

    def _write_config(self, url: str) -> None:
        self.kubeconfig.write_text(
            f"""apiVersion: v1
kind: Config
current-context: test
clusters: [{{name: test, cluster: {{server: "{url}"}}}}]
users: [{{name: test, user: {{token: t}}}}]
contexts: [{{name: test, context: {{cluster: test, user: test, namespace: team}}}}]
"""
        )

    def do(self, work: Callable[[], Any]) -> Any:
        """Does something in the cluster's own thread."""

        async def call() -> Any:
            found = work()
            return await found if isinstance(found, Coroutine) else found

        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(30)

    # --- what is there

    def pods(self) -> list[Object]:
        found: list[Object] = self.do(lambda: list(self.api.find("pods")))
        return found

    def find_pod(self, node: str) -> Object:
        return next(p for p in self.pods() if p["spec"].get("nodeName") == node)

    # --- what happens

    def power_off(self, node: str, *, remove: bool = False) -> None:
        """The machine is gone; nobody has heard that its containers ended. `remove`: somebody force-deletes the pod's object."""

        def work() -> None:
            found = self.all.nodes[node]
            found.on = False
            self._cut(found)
            for pod in found.pods.values():
                pod.remove()
            found.pods.clear()
            self.all.say_ready(found)
            if remove:
                self.force_delete(node)

        self.do(work)

    def force_delete(self, node: str) -> None:
        """In the cluster's thread: the pod's object goes, whatever runs there."""
        for item in [p for p in self.api.find("pods") if p["spec"].get("nodeName") == node]:
            self.api.delete_pod(item, 0)

    def cut(self, node: str) -> None:
        """The node runs on, and nobody reaches it."""

        def work() -> None:
            self.all.nodes[node].heard = False
            self._cut(self.all.nodes[node])
            self.all.say_ready(self.all.nodes[node])

        self.do(work)

    def _cut(self, node: Node) -> None:
        for socket in list(node.sockets):
            transport = getattr(socket._req, "transport", None)
            if transport is not None:
                transport.abort()

    def restore(self, node: str) -> None:
        """The node is there again; one that was off is started again."""

        def work() -> None:
            found = self.all.nodes[node]
            if not found.on:
                found.boot = str(uuid.uuid4())
            found.on = found.heard = True
            self.all.say_ready(found)

        self.do(work)

    def evict(self, node: str, grace: float, reason: str = "EvictionByEvictionAPI") -> None:
        """Its pods are asked to end."""

        def work() -> None:
            for item in [p for p in self.api.find("pods") if p["spec"].get("nodeName") == node]:
                condition = {"type": "DisruptionTarget", "status": "True", "reason": reason}
                item["status"].setdefault("conditions", []).append(condition)
                self.api.delete_pod(item, grace)

        self.do(work)

    def limit(self, in_s: float) -> None:
        """All pods end in so many seconds by their own limit."""

        def work() -> None:
            for item in self.api.find("pods"):
                start = item["status"]["startTime"]
                import datetime

                began = datetime.datetime.fromisoformat(start.replace("Z", "+00:00")).timestamp()
                item["spec"]["activeDeadlineSeconds"] = int(time.time() - began + in_s)
                self.api.put("pods", item)

        self.do(work)

    def kill_for_memory(self, node: str, container: str) -> None:
        """The kernel ends all of a container."""

        def work() -> None:
            for pod in self.all.nodes[node].pods.values():
                found = pod.containers[container]
                found.no_memory = True  # type: ignore[attr-defined]
                found.kill()

        self.do(work)

    def set_unschedulable(self, node: str, value: bool) -> None:
        def work() -> None:
            item = self.all.find_object(node)
            item["spec"]["unschedulable"] = value
            self.api.put("nodes", item)

        self.do(work)


__all__ = ["IMAGE", "KubernetesSite", "stamp"]
