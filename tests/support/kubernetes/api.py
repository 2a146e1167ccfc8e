"""The API: kmock takes requests apart and answers errors; versions, watches, selectors, conflicts, rights and quotas are here.

Each pod that is made is checked against Kubernetes' own schema (kubernetes-validate), strictly: an unknown field is refused.
"""

from __future__ import annotations

import asyncio
import copy
import datetime
import json
import uuid
from collections.abc import Callable
from typing import Any

import aiohttp.web
import kmock
import kubernetes_validate

Object = dict[str, Any]
Key = tuple[str, str, str]
VERSION = "1.33"
_KINDS = {"pods": "Pod", "nodes": "Node", "configmaps": "ConfigMap"}


def stamp(seconds: float | None = None) -> str:
    now = (
        datetime.datetime.now(datetime.UTC)
        if seconds is None
        else datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    )
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")


def merge(into: Object, patch: Object) -> Object:
    """A JSON merge patch."""
    for key, value in patch.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict):
            into[key] = merge(into[key] if isinstance(into.get(key), dict) else {}, value)
        else:
            into[key] = value
    return into


class FakeApi(kmock.KubernetesScaffold):
    """Objects with versions, and a history of their changes that can be forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[Key, Object] = {}
        self.version = 100
        self.history: list[tuple[int, str, str, Object]] = []
        self.forgotten = 100
        self.namespaces = {"default", "team"}
        self.denied: set[str] = set()
        """`list pods`, `create pods/exec`: what nobody may do."""
        self.quota: dict[str, int] = {}
        """Most pods by namespace."""
        self.conflicts = 0
        """So many updates meet somebody else's first."""
        self.seen: list[str] = []
        self.changed = asyncio.Event()
        self.run_in: Callable[..., Any] | None = None
        self.read_log: Callable[[Object, str], str] | None = None
        self._streams: set[asyncio.Task[Any]] = set()

    # --- objects

    def put(self, plural: str, item: Object, kind: str = "MODIFIED") -> Object:
        """Stores a changed object under a new version, and has watches see it."""
        meta = item["metadata"]
        key = (plural, meta.get("namespace", ""), meta["name"])
        self.version += 1
        meta["resourceVersion"] = str(self.version)
        if kind == "DELETED":
            self.objects.pop(key, None)
        else:
            self.objects[key] = item
        self.history.append((self.version, plural, kind, copy.deepcopy(item)))
        self.changed.set()
        self.changed = asyncio.Event()
        return item

    def find(self, plural: str, namespace: str = "") -> list[Object]:
        return [
            o for (p, n, _), o in self.objects.items() if p == plural and (not namespace or n == namespace)
        ]

    def forget_history(self) -> None:
        """Versions of before are too old from now on, and watches are ended."""
        self.forgotten = self.version
        self.history.clear()
        self.break_watches()

    def break_watches(self) -> None:
        for task in self._streams:
            task.cancel()

    # --- requests

    async def _handle(self, request: kmock.Request) -> aiohttp.web.StreamResponse:
        plural = request.resource.plural if request.resource is not None else None
        if plural == "selfsubjectaccessreviews":
            return self._review(request.data)
        if plural not in _KINDS:
            return await super()._handle(request)
        verb = self._find_verb(request)
        what = f"{plural}/{request.subresource}" if request.subresource else plural
        self.seen.append(f"{verb} {what}")
        if f"{verb} {what}" in self.denied:
            where = (
                f' in the namespace "{request.namespace}"' if request.namespace else " at the cluster scope"
            )
            raise kmock.KubernetesError(
                status=403, reason="Forbidden",
                message=f'{plural} is forbidden: User "test" cannot {verb} resource "{what}" in API group ""{where}',
            )  # fmt: skip
        if request.subresource == "exec":
            return await self._exec(request)
        if request.subresource == "log":
            assert self.read_log is not None
            text = self.read_log(self._get(plural, request), request.params["container"])
            return aiohttp.web.Response(text=text)
        match verb:
            case "list":
                items = [o for o in self.find(plural, request.namespace or "") if self._selects(request, o)]
                return self._json(
                    {"kind": f"{_KINDS[plural]}List", "apiVersion": "v1", "metadata": {"resourceVersion": str(self.version)},
                     "items": items}
                )  # fmt: skip
            case "watch":
                return await self._watch(plural, request)
            case "get":
                return self._json(self._get(plural, request))
            case "create":
                return self._create(plural, request)
            case "patch" | "update":
                return self._update(plural, request, verb)
            case "delete":
                return self._delete(plural, request)
        raise kmock.KubernetesError(status=405, reason="MethodNotAllowed", message=str(request.method))

    @staticmethod
    def _find_verb(request: kmock.Request) -> str:
        method = str(request.method.value if hasattr(request.method, "value") else request.method).lower()
        if method == "get":
            watches = request.params.get("watch", "").lower() == "true"
            return "watch" if watches else "get" if request.name else "list"
        return {"post": "create", "put": "update"}.get(method, method)

    @staticmethod
    def _json(value: Object, status: int = 200) -> aiohttp.web.Response:
        return aiohttp.web.json_response(value, status=status)

    def _get(self, plural: str, request: kmock.Request) -> Object:
        found = self.objects.get((plural, request.namespace or "", request.name or ""))
        if found is None:
            raise kmock.KubernetesError(
                status=404, reason="NotFound", message=f'{plural} "{request.name}" not found'
            )
        return found

    @staticmethod
    def _selects(request: kmock.Request, item: Object) -> bool:
        wanted = [t for t in request.params.get("labelSelector", "").split(",") if t]
        labels = item["metadata"].get("labels", {})
        return all(labels.get(k) == v for k, _, v in (t.partition("=") for t in wanted))

    def _review(self, review: Object) -> aiohttp.web.Response:
        asked = review["spec"]["resourceAttributes"]
        what = asked["resource"] + (f"/{asked['subresource']}" if asked.get("subresource") else "")
        return self._json(
            {**review, "status": {"allowed": f"{asked['verb']} {what}" not in self.denied}}, 201
        )

    def _create(self, plural: str, request: kmock.Request) -> aiohttp.web.Response:
        item, namespace = copy.deepcopy(request.data), request.namespace or ""
        if namespace and namespace not in self.namespaces:
            raise kmock.KubernetesError(
                status=404, reason="NotFound", message=f'namespaces "{namespace}" not found'
            )
        try:
            kubernetes_validate.validate(item, VERSION, strict=True)
        except kubernetes_validate.ValidationError as e:
            raise kmock.KubernetesError(status=422, reason="Invalid", message=str(e)) from e
        meta = item["metadata"]
        if (plural, namespace, meta["name"]) in self.objects:
            raise kmock.KubernetesError(
                status=409, reason="AlreadyExists", message=f"{meta['name']} already exists"
            )
        most, used = self.quota.get(namespace), len(self.find(plural, namespace))
        if plural == "pods" and most is not None and used >= most:
            raise kmock.KubernetesError(
                status=403, reason="Forbidden",
                message=f'pods "{meta["name"]}" is forbidden: exceeded quota: team-quota, requested: pods=1, used: pods={used}, limited: pods={most}',
            )  # fmt: skip
        meta |= {"namespace": namespace, "uid": str(uuid.uuid4()), "creationTimestamp": stamp()}
        if plural == "pods":
            item["status"] = {"phase": "Pending"}
        if request.params.get("dryRun") != "All":
            self.put(plural, item, "ADDED")
        return self._json(item, 201)

    def _update(self, plural: str, request: kmock.Request, verb: str) -> aiohttp.web.Response:
        found = self._get(plural, request)
        given = request.data.get("metadata", {}).get("resourceVersion")
        if self.conflicts:
            self.conflicts -= 1
            self.put(plural, found)
        if given is not None and given != found["metadata"]["resourceVersion"]:
            raise kmock.KubernetesError(
                status=409, reason="Conflict",
                message=f'Operation cannot be fulfilled on {plural} "{request.name}": the object has been modified',
            )  # fmt: skip
        if verb == "patch" and "merge-patch" not in request.headers.get("Content-Type", ""):
            raise kmock.KubernetesError(
                status=415, reason="UnsupportedMediaType", message="only merge patches here"
            )
        after = merge(found, copy.deepcopy(request.data)) if verb == "patch" else copy.deepcopy(request.data)
        return self._json(self.put(plural, after))

    def _delete(self, plural: str, request: kmock.Request) -> aiohttp.web.Response:
        found = self._get(plural, request)
        options = request.data or {}
        wanted = options.get("preconditions", {}).get("uid")
        if wanted not in (None, found["metadata"]["uid"]):
            raise kmock.KubernetesError(status=409, reason="Conflict", message="the UID does not match")
        grace = options.get("gracePeriodSeconds", found["spec"].get("terminationGracePeriodSeconds", 30))
        return self._json(self.delete_pod(found, grace))

    def delete_pod(self, pod: Object, grace: float) -> Object:
        """Asks a pod to end; without grace, or before any node has it, its object is gone at once."""
        meta = pod["metadata"]
        if grace == 0 or not pod["spec"].get("nodeName"):
            return self.put("pods", pod, "DELETED")
        if "deletionTimestamp" not in meta or grace < meta["deletionGracePeriodSeconds"]:
            at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=grace)
            meta["deletionTimestamp"], meta["deletionGracePeriodSeconds"] = stamp(at.timestamp()), int(grace)
            self.put("pods", pod)
        return pod

    async def _watch(self, plural: str, request: kmock.Request) -> aiohttp.web.StreamResponse:
        raw = request._raw_request
        assert raw is not None
        since = int(request.params.get("resourceVersion") or self.version)
        response = aiohttp.web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(raw)

        async def send(kind: str, item: Object) -> None:
            await response.write(json.dumps({"type": kind, "object": item}).encode() + b"\n")

        async def stream() -> None:
            at = since
            if at < self.forgotten:
                gone = {
                    "kind": "Status",
                    "status": "Failure",
                    "code": 410,
                    "reason": "Expired",
                    "message": "too old",
                }
                await send("ERROR", gone)
                return
            while True:
                changed = self.changed
                for version, p, kind, item in [h for h in self.history if h[0] > at]:
                    at = version
                    if p == plural and request.namespace in (None, item["metadata"].get("namespace")):
                        if self._selects(request, item):
                            await send(kind, item)
                        elif request.params.get("allowWatchBookmarks", "").lower() == "true":
                            await send(
                                "BOOKMARK", {"kind": _KINDS[plural], "metadata": {"resourceVersion": str(at)}}
                            )
                await changed.wait()

        task = asyncio.create_task(stream())
        self._streams.add(task)
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
            self._streams.discard(task)
        return response

    async def _exec(self, request: kmock.Request) -> aiohttp.web.StreamResponse:
        raw, pod = request._raw_request, self._get("pods", request)
        assert raw is not None and self.run_in is not None
        socket = aiohttp.web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        argv = [str(v) for v in raw.query.getall("command")]
        ready = self.run_in(pod, request.params["container"], argv)  # raises where nothing can be run there
        await socket.prepare(raw)
        await ready(socket)
        return socket
