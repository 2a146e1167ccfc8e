"""Kubernetes' API as a run uses it: through kubernetes_asyncio, in plain objects, with its refusals in words.

That client is made from the same description of the API as the official one, and asynchronous as the contract is: the official
one takes a thread for each watch and each exec, of which a run has one a node.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import MissingExtra, RunError, UsageError
from ..contract import ClusterAway
from .manifest import Manifest
from .options import KubernetesOptions

_CALL_S = 20.0
_UNAVAILABLE = (502, 503, 504)
_WATCH_S = 240
_TOKEN_EVERY_S = 300
_IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MERGE = "application/merge-patch+json"
DOCS = "docs/kubernetes-rbac.yaml"


@dataclass(frozen=True)
class Permission:
    """Something that the API may allow. `needed`: a run cannot do without; else `why` says what is lost."""

    verb: str
    resource: str
    subresource: str = ""
    needed: bool = True
    whole_cluster: bool = False

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}" + (f"/{self.subresource}" if self.subresource else "")


NEEDED = (
    *(Permission(v, "pods") for v in ("create", "delete", "get", "list", "watch")),
    # A websocket is a GET; some versions ask for create as well.
    Permission("get", "pods", "exec"),
    Permission("create", "pods", "exec"),
    Permission("get", "pods", "log"),
)
CONFIG_MAPS = tuple(Permission(v, "configmaps", needed=False) for v in ("get", "create", "update"))
SEE_NODES = tuple(Permission(v, "nodes", needed=False, whole_cluster=True) for v in ("get", "list", "watch"))
PATCH_NODES = (Permission("patch", "nodes", needed=False, whole_cluster=True),)


class Refused(RunError):
    """The API answered, and did not do it. `status` is HTTP's, `reason` Kubernetes' word."""

    def __init__(self, status: int, reason: str, message: str, *, where: str = "") -> None:
        super().__init__(message or reason or f"HTTP {status}", where=where or "the Kubernetes API")
        self.status, self.reason = status, reason


class ApiUnanswered(ClusterAway):
    """The API cannot be reached, or does not answer."""


class ApiUnavailable(Refused, ClusterAway):
    """What stands before the API answers for it, or it is just starting: HTTP 502 to 504."""


def load_library() -> Any:
    """The client library. Raises MissingExtra."""
    try:
        import kubernetes_asyncio
        import kubernetes_asyncio.client
        import kubernetes_asyncio.config
        import kubernetes_asyncio.stream
    except ModuleNotFoundError:
        raise MissingExtra("kubernetes_asyncio", "kubernetes", what="a Kubernetes cluster") from None
    return kubernetes_asyncio


class Api:
    """One namespace of a cluster. `open` first, in the event loop that it is used in; then `close`."""

    def __init__(self, options: KubernetesOptions) -> None:
        self._options = options
        self.namespace = options.namespace
        self.host = ""
        self._clients: list[Any] = []
        self._refreshing: asyncio.Task[None] | None = None
        self.core: Any = None
        self._exec: Any = None
        self._reviews: Any = None

    async def open(self) -> None:
        """Reads how the cluster is reached. Raises UsageError where nothing says so, MissingExtra."""
        if self.core is not None:
            return
        library = load_library()
        configuration = library.client.Configuration()
        await self._configure(library, configuration)
        configuration.connection_pool_maxsize = 0  # each node holds one connection
        self.host = configuration.host
        plain = library.client.ApiClient(configuration)
        streams = library.stream.WsApiClient(configuration, heartbeat=20)
        self._clients = [plain, streams]
        self.core = library.client.CoreV1Api(plain)
        self._reviews = library.client.AuthorizationV1Api(plain)
        self._exec = library.client.CoreV1Api(streams)

    async def _configure(self, library: Any, configuration: Any) -> None:
        o, config = self._options, library.config
        file = os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())
        named = str(o.kubeconfig) if o.kubeconfig else file
        if not o.kubeconfig and not os.environ.get("KUBECONFIG") and not Path(named).is_file():
            if not (_IN_CLUSTER / "token").is_file():
                raise UsageError(
                    "nothing says how the Kubernetes cluster is reached: there is no kubeconfig, and this is no pod",
                    where=named, hint="Give --cluster kubernetes,kubeconfig=FILE, or set KUBECONFIG",
                )  # fmt: skip
            config.load_incluster_config(client_configuration=configuration)
            if not self.namespace:
                self.namespace = (_IN_CLUSTER / "namespace").read_text().strip()
            return
        import yaml

        missing = [p for p in named.split(os.pathsep) if p and not Path(p).is_file()]
        if missing and len(missing) == len(named.split(os.pathsep)):
            raise UsageError("there is no such kubeconfig", where=missing[0])
        try:
            loader = await config.load_kube_config(
                named, context=o.context or None, client_configuration=configuration, persist_config=False
            )
        except (config.ConfigException, yaml.YAMLError, OSError, ValueError, TypeError, AttributeError) as e:
            # The library raises what its parsers do: of a file that is no kubeconfig anything.
            raise UsageError(
                f"the kubeconfig cannot be used: {' '.join(str(e).split())[:300]}", where=named,
                hint="kubectl config get-contexts shows what it has; context=NAME chooses one",
            ) from e  # fmt: skip
        if not self.namespace:
            contexts, current = config.list_kube_config_contexts(named)
            chosen = next((c for c in contexts if c["name"] == o.context), current)
            self.namespace = chosen["context"].get("namespace", "")
        self.namespace = self.namespace or "default"
        refresh = library.config.kube_config.refresh_token(loader, configuration, _TOKEN_EVERY_S)
        self._refreshing = asyncio.create_task(_keep(refresh))

    async def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
        for client in self._clients:
            await client.close()
        self._clients, self.core = [], None

    # --- calls

    async def call(
        self, method: Callable[..., Any], *args: Any, within_s: float = _CALL_S, **kwargs: Any
    ) -> Any:
        """The answer of one of the library's methods, as JSON has it. Raises Refused, ApiUnanswered."""
        text = await self.read(method, *args, within_s=within_s, **kwargs)
        try:
            return json.loads(text)
        except ValueError:
            raise ApiUnanswered(
                f"what answers is no Kubernetes API: {text[:80]!r}", where=self.host
            ) from None

    async def read(
        self, method: Callable[..., Any], *args: Any, within_s: float = _CALL_S, **kwargs: Any
    ) -> bytes:
        """The same for what is no JSON."""
        import aiohttp

        try:
            async with asyncio.timeout(within_s), self._opened(method, *args, **kwargs) as response:
                data: bytes = await response.read()
                if response.status >= 300:
                    raise _refusal(response.status, data, self.host)
                return data
        except (TimeoutError, OSError, aiohttp.ClientError) as e:
            raise ApiUnanswered(
                f"the Kubernetes API cannot be reached: {_describe(e)}", where=self.host
            ) from e

    @contextlib.asynccontextmanager
    async def _opened(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        response = await method(*args, _preload_content=False, **kwargs)
        try:
            yield response
        finally:
            response.release()

    async def list(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[list[Any], str]:
        """The items of a list, and the version of the whole: a watch goes on from there."""
        found = await self.call(method, *args, **kwargs)
        return list(found.get("items") or ()), str(found.get("metadata", {}).get("resourceVersion", ""))

    async def watch(
        self, method: Callable[..., Any], *args: Any, version: str, **kwargs: Any
    ) -> AsyncIterator[tuple[str, Any]]:
        """(kind, object) of each change after that version, until the server ends the watch. Raises Refused (410 where it has
        forgotten the version), ApiUnanswered."""
        import aiohttp

        slow = aiohttp.ClientTimeout(total=None, sock_connect=_CALL_S, sock_read=_WATCH_S + 30)
        try:
            async with self._opened(
                method, *args, watch=True, resource_version=version, allow_watch_bookmarks=True,
                timeout_seconds=_WATCH_S, _request_timeout=slow, **kwargs,
            ) as response:  # fmt: skip
                if response.status >= 300:
                    raise _refusal(response.status, await response.read(), self.host)
                data = b""
                async for piece in response.content.iter_any():
                    *lines, data = (data + piece).split(b"\n")
                    for line in lines:
                        if line.strip():
                            event = json.loads(line)
                            yield _checked(event, self.host)
        except (TimeoutError, OSError, ValueError, aiohttp.ClientError) as e:
            raise ApiUnanswered(f"the watch broke: {_describe(e)}", where=self.host) from e

    async def may(self, permission: Permission) -> bool:
        """Whether the API says that we may do that."""
        asked = {"verb": permission.verb, "resource": permission.resource}
        if permission.subresource:
            asked["subresource"] = permission.subresource
        if not permission.whole_cluster:
            asked["namespace"] = self.namespace
        review = {
            "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }  # fmt: skip
        answer = await self.call(self._reviews.create_self_subject_access_review, review)
        return bool(answer.get("status", {}).get("allowed"))

    async def may_all(self, permissions: tuple[Permission, ...]) -> bool:
        """Whether all of that is allowed."""
        return all(await asyncio.gather(*(self.may(p) for p in permissions)))

    async def create_pod(self, pod: Manifest, *, only_try: bool = False) -> Manifest:
        """Makes a pod, or only asks whether it would be made. Raises Refused, ApiUnanswered."""
        tried: dict[str, Any] = {"dry_run": "All"} if only_try else {}
        made: Manifest = await self.call(self.core.create_namespaced_pod, self.namespace, pod, **tried)
        return made

    async def delete_pod(self, name: str, *, uid: str = "", grace_s: int | None = None) -> None:
        """Asks a pod to end; nothing where it is gone. With `uid` only that very one. Raises Refused, ApiUnanswered."""
        body: Manifest = {"kind": "DeleteOptions", "apiVersion": "v1"}
        if uid:
            body["preconditions"] = {"uid": uid}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        try:
            await self.call(self.core.delete_namespaced_pod, name, self.namespace, body=body)
        except Refused as e:
            if e.status not in (404, 409):
                raise

    async def read_log(self, name: str, container: str) -> str:
        """The last lines that a container printed; "" where nobody can read them."""
        with contextlib.suppress(Refused, ApiUnanswered):
            data = await self.read(
                self.core.read_namespaced_pod_log, name, self.namespace, container=container, tail_lines=20
            )
            return data.decode(errors="replace").strip()
        return ""

    async def run_in(
        self, stack: contextlib.AsyncExitStack, pod: str, container: str, argv: Sequence[str]
    ) -> Any:
        """A websocket to a program that is started in a container. Raises Refused, ApiUnanswered."""
        import aiohttp

        try:
            async with asyncio.timeout(_CALL_S):
                opening = await self._exec.connect_get_namespaced_pod_exec(
                    pod, self.namespace, container=container, command=[*argv], stdin=True, stdout=True, stderr=True,
                    tty=False, _preload_content=False,
                )  # fmt: skip
                return await stack.enter_async_context(opening)
        except aiohttp.WSServerHandshakeError as e:
            raise Refused(
                e.status, "", f"nothing can be run in it: HTTP {e.status}, {e.message}", where=pod
            ) from e
        except (TimeoutError, OSError, aiohttp.ClientError) as e:
            raise ApiUnanswered(f"nothing can be run in it: {_describe(e)}", where=pod) from e


def read_status(value: Mapping[str, Any], host: str) -> Refused:
    """What the API says in a Status."""
    status = int(value.get("code") or 500)
    return (ApiUnavailable if status in _UNAVAILABLE else Refused)(
        status,
        str(value.get("reason") or ""),
        str(value.get("message") or ""),
        where=host,
    )


def _checked(event: Any, host: str) -> tuple[str, Any]:
    kind, value = event["type"], event["object"]
    if kind == "ERROR":
        raise read_status(value, host)
    return kind, value


def _refusal(status: int, data: bytes, host: str) -> Refused:
    with contextlib.suppress(ValueError):
        value = json.loads(data)
        if isinstance(value, dict) and value.get("kind") == "Status":
            return read_status({**value, "code": value.get("code") or status}, host)
    kind = ApiUnavailable if status in _UNAVAILABLE else Refused
    return kind(status, "", data.decode(errors="replace").strip()[:300], where=host)


def _describe(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return " ".join(str(getattr(error, "strerror", None) or error or type(error).__name__).split())[:300]


async def _keep(refresh: Any) -> None:
    """Renews the token of a kubeconfig whose tokens come from a program."""
    with contextlib.suppress(Exception):  # the next call says what the matter is
        await refresh
