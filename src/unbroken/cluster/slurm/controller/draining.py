"""Puts nodes out of use for everybody, by draining them, and gives them back."""

from __future__ import annotations

import asyncio
import os
import pwd
import time
from collections.abc import Iterable, Mapping

from ....errors import RunError
from ...contract import Cordon
from .commands import Slurm, SlurmRefused
from .cordons import as_reason, find_expired, read_cordon
from .records import NodeRecord

_NO_RIGHT = ("Invalid user id", "ccess denied", "ermission denied", "ccess/permission denied")
_PAUSE_S = 0.1
_UNDRAIN_LOOKS = 50


class NoRight(RunError):
    """Only an operator may drain nodes here."""


class Draining:
    """Drains with owner, reason and expiry. Raises NoRight where this user may not, Refused for what Slurm refuses else."""

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm

    async def find_lack_of_right(self) -> str:
        """Why this user may not drain nodes, as far as that can be told without trying; "" where nothing speaks against it.

        Slurm lets root, its own user and operators do it; who is an operator its accounting knows.
        """
        uid = os.geteuid()
        config = await self._slurm.read_config()
        if uid == 0 or config.get("SlurmUser", "").endswith(f"({uid})"):
            return ""
        name = pwd.getpwuid(uid).pw_name
        if config.get("AccountingStorageType") == "accounting_storage/none":
            return f"{name} is neither root nor {config.get('SlurmUser', 'its own user')}, and this Slurm has no accounting that names operators"
        try:
            said = await self._slurm.call("sacctmgr", "-nP", "show", "user", name, "format=adminlevel")
        except RunError:
            return ""
        level = said.strip().lower() or "none"
        return f"{name} has no operator's rights (AdminLevel {level})" if level == "none" else ""

    async def drain(self, cordon: Cordon) -> None:
        """Drains a node; what runs there goes on."""
        await self._update(cordon.node, "drain", f"reason={as_reason(cordon)}")

    async def undrain(self, node: str) -> None:
        """Gives a drained node back, and waits a moment until the controller has heard of it again, as it does then."""
        await self._update(node, "undrain")
        for _ in range(_UNDRAIN_LOOKS):
            record = (await self._slurm.list_nodes([node])).get(node)
            if record is None or record.responds:
                return
            await asyncio.sleep(_PAUSE_S)

    async def read(self, nodes: Mapping[str, NodeRecord]) -> dict[str, Cordon]:
        """The cordons that these nodes have now; those of ours that have expired are lifted where we may."""
        now = time.time()
        for name in find_expired(nodes, now):
            try:
                await self.undrain(name)
            except NoRight:
                break
        found = {n: c for n, r in nodes.items() if (c := read_cordon(r)) is not None}
        return {n: c for n, c in found.items() if not c.has_expired(now)}

    async def _update(self, node: str, state: str, *more: str) -> None:
        try:
            await self._slurm.call("scontrol", "update", f"nodename={node}", f"state={state}", *more)
        except SlurmRefused as e:
            if any(text in e.said for text in _NO_RIGHT):
                raise NoRight(
                    f"this user may not {state} nodes: {e.said}",
                    where=node,
                    hint="Ask an operator of the cluster",
                ) from e
            raise


class Nodes:
    """All nodes of the site, for `unbroken nodes`: no run is needed."""

    def __init__(self, slurm: Slurm) -> None:
        self._slurm, self._draining = slurm, Draining(slurm)

    async def list(self) -> tuple[dict[str, NodeRecord], dict[str, Cordon]]:
        """Every node, and the cordons that hold. Those of ours that have expired are lifted."""
        nodes = await self._slurm.list_nodes()
        return nodes, await self._draining.read(nodes)

    async def cordon(self, cordon: Cordon) -> None:
        """Drains a node. Raises RunError for a node that is not there and for another owner's cordon, NoRight."""
        held = (await self._find([cordon.node])).get(cordon.node)
        if held is not None and held.owner != cordon.owner:
            raise RunError(f"it is cordoned by {held.owner} ({held.reason})", where=cordon.node)
        await self._draining.drain(cordon)

    async def release(self, node: str, owner: str) -> bool:
        """Undoes that owner's cordon; False where there is none. Raises RunError for another owner's, NoRight."""
        held = (await self._find([node])).get(node)
        if held is None:
            return False
        check_owner(held, owner)
        await self._draining.undrain(node)
        return True

    async def _find(self, names: Iterable[str]) -> dict[str, Cordon]:
        names = [*names]
        try:
            nodes = await self._slurm.list_nodes(names)
        except SlurmRefused as e:
            if "not found" not in e.said:
                raise
            nodes = {}
        for name in names:
            if name not in nodes:
                raise RunError("Slurm knows no such node", where=name, hint="unbroken nodes ls lists them")
        return await self._draining.read(nodes)


def check_owner(held: Cordon, owner: str) -> None:
    """Raises RunError unless this owner may undo it."""
    if held.owner != owner:
        raise RunError(
            f"it was cordoned by {held.owner}, not by {owner}",
            where=held.node,
            hint=f"Ask {held.owner}: {held.reason}",
        )
