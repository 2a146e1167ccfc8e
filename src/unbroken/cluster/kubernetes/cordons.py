"""Nodes out of use: a taint with an annotation where we may change nodes, else a list that runs of unbroken in the namespace
read, and keep away from by anti-affinity."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ...errors import RunError
from ..contract import Cordon
from .api import CONFIG_MAPS, MERGE, PATCH_NODES, SEE_NODES, Api, Refused
from .conditions import Object
from .manifest import Manifest

_log = logging.getLogger("unbroken.kubernetes")
KEY = "unbroken/cordon"
CONFIG_MAP = "unbroken-cordons"
_TRIES = 8
_CONFLICT = 409


class Cordons:
    """Those of one cluster, as far as one namespace sees them. `wanted` is auto, taint or own."""

    def __init__(self, api: Api, wanted: str) -> None:
        self._api, self._wanted = api, wanted
        self._rights: tuple[bool, bool] | None = None

    async def _may(self) -> tuple[bool, bool]:
        """Whether we may see nodes, and change them."""
        if self._rights is None:
            sees = await self._api.may_all(SEE_NODES[:2])
            self._rights = (sees, sees and await self._api.may_all(PATCH_NODES))
        return self._rights

    async def read(self) -> dict[str, Cordon]:
        """Those that hold now, by node; those that have expired are lifted where we may do that."""
        found: dict[str, Cordon] = {}
        sees, changes = await self._may()
        now = time.time()
        if sees:
            nodes, _ = await self._api.list(self._api.core.list_node)
            for node in nodes:
                cordon = read_cordon(node)
                if cordon is not None and not cordon.has_expired(now):
                    found[cordon.node] = cordon
                elif cordon is not None and changes:
                    with contextlib.suppress(RunError):
                        await self._change_node(cordon.node, _keep_valid)
        listed = (await self._read_list())[0]
        return {**{n: c for n, c in listed.items() if not c.has_expired(now)}, **found}

    async def put(self, cordon: Cordon) -> None:
        """Raises RunError where another owner's holds, or nothing is allowed."""

        def change(held: Cordon | None) -> Cordon:
            check_owner(held, cordon.owner)
            return cordon

        check_owner((await self.read()).get(cordon.node), cordon.owner)
        _, changes = await self._may()
        if self._wanted != "own" and changes:
            await self._change_node(cordon.node, change)
            return
        if self._wanted == "taint":
            raise RunError(
                "nodes cannot be tainted: the Kubernetes API does not let us patch nodes", where=cordon.node,
                hint="Leave the option 'cordon' out: then runs of this namespace keep away from it",
            )  # fmt: skip
        await self._change_list(cordon.node, change)
        _log.info(
            "%s is out of use for runs of this namespace alone: tainting it is not allowed", cordon.node
        )

    async def lift(self, node: str, owner: str) -> bool:
        """Undoes that owner's cordon; whether there was one. Raises RunError for another owner's."""
        held = (await self.read()).get(node)
        if held is None:
            return False
        check_owner(held, owner)
        _, changes = await self._may()
        if changes:
            await self._change_node(node, lambda held: None)
        if node in (await self._read_list())[0]:
            await self._change_list(node, lambda held: None)
        return True

    async def _change_node(self, name: str, change: Callable[[Cordon | None], Cordon | None]) -> None:
        """Changes it as one, whoever else changes the node meanwhile. Raises RunError."""
        for _ in range(_TRIES):
            node = await self._api.call(self._api.core.read_node, name)
            held = read_cordon(node)
            patch = make_patch(node, change(_keep_valid(held)))
            try:
                await self._api.call(self._api.core.patch_node, name, patch, _content_type=MERGE)
                return
            except Refused as e:
                if e.status != _CONFLICT:
                    raise
        raise RunError("somebody else changes the node all the time", where=name, hint="Try again")

    # --- the list of a namespace

    async def _read_list(self) -> tuple[dict[str, Cordon], Manifest | None]:
        try:
            found = await self._api.call(
                self._api.core.read_namespaced_config_map, CONFIG_MAP, self._api.namespace
            )
        except Refused as e:
            if e.status in (403, 404):
                return {}, None
            raise
        listed = {}
        for text in (found.get("data") or {}).values():
            with contextlib.suppress(ValueError, TypeError):
                cordon = Cordon(**json.loads(text))
                listed[cordon.node] = cordon
        return listed, found

    async def _change_list(self, node: str, change: Callable[[Cordon | None], Cordon | None]) -> None:
        if not await self._api.may_all(CONFIG_MAPS):
            raise RunError(
                "nothing may be put out of use: the Kubernetes API lets us neither patch nodes nor keep a ConfigMap",
                where=node, hint="Have an administrator apply docs/kubernetes-rbac.yaml",
            )  # fmt: skip
        for _ in range(_TRIES):
            listed, there = await self._read_list()
            held = listed.pop(node, None)
            after = change(_keep_valid(held))
            if after is not None:
                listed[node] = after
            kept = [c for c in listed.values() if not _expired(c)]
            # A node's name may be longer than a key.
            data = {f"cordon-{i}": json.dumps(asdict(c)) for i, c in enumerate(kept)}
            try:
                await self._write_list(data, there)
                return
            except Refused as e:
                if e.status != _CONFLICT:
                    raise
        raise RunError(f"somebody else changes {CONFIG_MAP} all the time", where=node, hint="Try again")

    async def _write_list(self, data: Mapping[str, str], there: Manifest | None) -> None:
        core, namespace = self._api.core, self._api.namespace
        if there is None:
            body = {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": CONFIG_MAP},
                "data": dict(data),
            }
            await self._api.call(core.create_namespaced_config_map, namespace, body)
            return
        # With its version: whoever was faster is not overwritten.
        await self._api.call(
            core.replace_namespaced_config_map, CONFIG_MAP, namespace, {**there, "data": dict(data)}
        )


def check_owner(held: Cordon | None, owner: str) -> None:
    """Raises RunError where the cordon that holds is somebody else's."""
    if held is not None and not _expired(held) and held.owner != owner:
        raise RunError(f"it is cordoned by {held.owner} ({held.reason}), not by {owner}", where=held.node,
                       hint=f"Ask {held.owner}")  # fmt: skip


def read_cordon(node: Object) -> Cordon | None:
    """The cordon that a node's annotation tells, where the taint is there too; None for a node without."""
    text = node["metadata"].get("annotations", {}).get(KEY, "")
    tainted = any(t.get("key") == KEY for t in node.get("spec", {}).get("taints") or ())
    with contextlib.suppress(ValueError, TypeError):
        value: Any = json.loads(text) if text and tainted else None
        if isinstance(value, dict):
            return Cordon(**{**value, "node": str(node["metadata"]["name"])})
    return None


def make_patch(node: Object, cordon: Cordon | None) -> Manifest:
    """What makes a node have this cordon, or none: with its version, for taints are replaced as a whole."""
    meta = node["metadata"]
    taints = [t for t in node.get("spec", {}).get("taints") or () if t.get("key") != KEY]
    text = None
    if cordon is not None:
        taints.append({"key": KEY, "value": "unbroken", "effect": "NoSchedule"})
        text = json.dumps({k: v for k, v in asdict(cordon).items() if k != "node"})
    return {
        "metadata": {"resourceVersion": meta.get("resourceVersion"), "annotations": {KEY: text}},
        "spec": {"taints": taints or None},
    }  # fmt: skip


def _keep_valid(held: Cordon | None) -> Cordon | None:
    return None if held is None or _expired(held) else held


def _expired(cordon: Cordon) -> bool:
    return cordon.has_expired(time.time())
