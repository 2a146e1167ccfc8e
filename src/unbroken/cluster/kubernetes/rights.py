"""What is wrong before a run starts: no way to the cluster, no right, no such namespace, a pod that nobody would make."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import Sequence

from ...errors import DoesNotFit, RunError, UnbrokenError
from ...units import plural
from ..contract import Request
from .api import DOCS, NEEDED, SEE_NODES, Api, ApiUnanswered, ApiUnavailable, Permission, Refused
from .conditions import Object, read_capacity
from .manifest import Manifest, make_pod, name_pod
from .options import KubernetesOptions

_RANKS_PER_CPU = 64
_RANKS_MOST = 4096
_QUOTA = re.compile(
    r"exceeded quota: (?P<name>[^,]+), requested: (?P<asked>.*), used: (?P<used>.*), limited: (?P<limit>.*)"
)


async def check_rights(api: Api) -> None:
    """Raises RunError where we may not do what a run cannot do without."""
    allowed = await asyncio.gather(*(api.may(p) for p in NEEDED))
    lacking: list[Permission] = [p for p, ok in zip(NEEDED, allowed, strict=True) if not ok]
    if lacking:
        raise RunError(
            f"the Kubernetes API does not let us {', '.join(str(p) for p in lacking)}", where=f"namespace {api.namespace}",
            hint=f"Have an administrator apply {DOCS} with your namespace and account, or choose another: namespace=NAME",
        )  # fmt: skip


async def check_pod(api: Api, options: KubernetesOptions, run_id: str, template: Manifest) -> None:
    """Has the API look at a pod as a run's without making it. Raises what it says, in words."""
    pod = make_pod(options, run_id, name_pod(run_id, 0, secrets.token_hex(4)), 0, template=template)
    try:
        await api.create_pod(pod, only_try=True)
    except Refused as e:
        if (waiting := read_quota(e)) is not None and not waiting.never:
            return  # it may be free when the pods are made
        raise explain(e, api) from e


class QuotaReached(DoesNotFit):
    """A quota of the namespace stands against a pod. `never`: it would even if nothing else were there."""

    def __init__(self, message: str, *, never: bool, where: str) -> None:
        super().__init__(message, where=where, hint="Ask for less, or have the quota raised")
        self.never = never


def read_quota(error: Refused) -> QuotaReached | None:
    """What a refusal for a quota says; None where it is another one."""
    found = _QUOTA.search(error.message)
    if error.status != 403 or found is None:
        return None
    asked, limit = _read_amounts(found["asked"]), _read_amounts(found["limit"])
    never = any(asked[k] > limit[k] for k in asked if k in limit)
    words = f"the quota {found['name']} is reached: asked for {found['asked']}, used {found['used']} of {found['limit']}"
    return QuotaReached(words, never=never, where=error.where or "")


def _read_amounts(text: str) -> dict[str, float]:
    """`requests.nvidia.com/gpu=8,pods=1` as numbers; what is no number is left out."""
    found = {}
    for part in text.split(","):
        name, _, amount = part.strip().partition("=")
        with contextlib.suppress(ValueError):
            found[name] = read_quantity(amount)
    return found


def read_quantity(text: str) -> float:
    """A quantity of Kubernetes, such as 500m, 64Gi or 8. Raises ValueError."""
    units = {
        "m": 1e-3,
        "k": 1e3,
        "M": 1e6,
        "G": 1e9,
        "T": 1e12,
        "Ki": 2**10,
        "Mi": 2**20,
        "Gi": 2**30,
        "Ti": 2**40,
    }
    for unit in sorted(units, key=len, reverse=True):
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * units[unit]
    return float(text)


def explain(error: Refused, api: Api) -> UnbrokenError:
    """A refusal to make a pod, with what to do."""
    if isinstance(error, ApiUnavailable):
        return ApiUnanswered(error.message, where=api.host)
    if (quota := read_quota(error)) is not None:
        return quota
    where = f"namespace {api.namespace}"
    if error.status == 404:
        return RunError(f"there is no namespace {api.namespace}", where=api.host,
                        hint="Choose one: namespace=NAME; kubectl get namespaces shows them")  # fmt: skip
    if error.status == 401:
        return RunError(f"the Kubernetes API does not know us: {error.message}", where=api.host,
                        hint="Log in again, or name another kubeconfig or context")  # fmt: skip
    if "PodSecurity" in error.message:
        return RunError(f"the namespace does not allow such pods: {error.message}", where=where,
                        hint="Give the securityContext that it asks for in a template: template=FILE")  # fmt: skip
    return RunError(f"Kubernetes does not make the pod: {error.message}", where=where,
                    hint="Look at the options of --cluster kubernetes, and at the template")  # fmt: skip


async def check_size(api: Api, options: KubernetesOptions, request: Request) -> None:
    """Raises DoesNotFit where the cluster will never have so much, as far as it lets us see."""
    if request.ranks_per_node > _RANKS_MOST:
        raise _too_many_ranks(request, "a node")
    if not await api.may_all(SEE_NODES[:2]):
        return
    nodes, _ = await api.list(api.core.list_node)
    compare_size(options, request, nodes)


def compare_size(options: KubernetesOptions, request: Request, nodes: Sequence[Object]) -> None:
    """The same, from the nodes that there are. Raises DoesNotFit."""
    if options.autoscaled:
        return
    cpus = max((read_capacity(n, "cpu") for n in nodes), default=0)
    if cpus and request.ranks_per_node > _RANKS_PER_CPU * cpus:
        raise _too_many_ranks(request, f"nodes of {cpus} processors")
    wanted = request.nodes + request.spares
    able = [n for n in nodes if read_capacity(n, options.gpu_resource) >= options.gpus]
    if not request.replaces and len(able) < wanted:
        what = f" with {options.gpus} {options.gpu_resource}" if options.gpus else ""
        raise DoesNotFit(
            f"the cluster has {plural(len(able), 'node')}{what}, the run asks for {wanted}",
            hint="Ask for fewer --nodes, --spares or gpus; where nodes are made on demand, add autoscaled=yes",
        )  # fmt: skip


def _too_many_ranks(request: Request, where: str) -> DoesNotFit:
    return DoesNotFit(
        f"{plural(request.ranks_per_node, 'rank')} on {where} would not train but wait",
        hint="Use fewer --nproc",
    )
