"""The nodes of a cluster without a run: what `unbroken nodes` lists, puts out of use and gives back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ..contract import Cordon
from .api import Api
from .conditions import Object, read_held, read_unready
from .cordons import Cordons
from .options import KubernetesOptions

T = TypeVar("T")


@dataclass(frozen=True)
class NodeLine:
    """One node, as it is shown."""

    states: frozenset[str]
    gres: str = ""


class KubernetesNodes:
    """Each call opens the API and closes it."""

    def __init__(self, options: KubernetesOptions) -> None:
        self._options = options

    async def list(self) -> tuple[Mapping[str, NodeLine], Mapping[str, Cordon]]:
        """All nodes, and the cordons that hold. Raises RunError."""

        async def read(api: Api, cordons: Cordons) -> tuple[Mapping[str, NodeLine], Mapping[str, Cordon]]:
            nodes, _ = await api.list(api.core.list_node)
            lines = {str(n["metadata"]["name"]): describe_line(n, self._options.gpu_resource) for n in nodes}
            return lines, await cordons.read()

        return await self._with(read)

    async def cordon(self, cordon: Cordon) -> None:
        """Raises RunError where another owner's holds, or it is not allowed."""
        await self._with(lambda api, cordons: cordons.put(cordon))

    async def release(self, node: str, owner: str) -> bool:
        """Whether there was a cordon of that owner. Raises RunError for another owner's."""
        return await self._with(lambda api, cordons: cordons.lift(node, owner))

    async def _with(self, work: Callable[[Api, Cordons], Awaitable[T]]) -> T:
        api = Api(self._options)
        try:
            await api.open()
            return await work(api, Cordons(api, self._options.cordon))
        finally:
            await api.close()


def describe_line(node: Object, resource: str) -> NodeLine:
    """A node's state in words as short as columns are."""
    states = {"notready" if read_unready(node) else "ready"}
    if read_held(node):
        states.add("cordoned")
    count = str(node.get("status", {}).get("allocatable", {}).get(resource, ""))
    return NodeLine(frozenset(states), f"{resource}:{count}" if count and count != "0" else "")
