"""Clusters by name. A new one is a file, and one entry here or one entry point of an installed package."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from ..errors import RunError, UnknownKey
from .contract import Cluster

ENTRY_POINTS = "unbroken.clusters"
_OURS = {"local": "unbroken.cluster.local_events:LocalCluster"}
_registered: dict[str, Callable[..., Cluster]] = {}


def register(name: str, make: Callable[..., Cluster]) -> None:
    """Adds a cluster; `make(run_id, **options)` returns it. Raises ValueError where the name is taken by another."""
    if name in _OURS or _registered.get(name, make) is not make:
        raise ValueError(f"there is a cluster '{name}' already")
    _registered[name] = make


def names() -> list[str]:
    """All that `make` knows."""
    return sorted({*_OURS, *_registered, *(e.name for e in entry_points(group=ENTRY_POINTS))})


def make_cluster(name: str, run_id: str, **options: Any) -> Cluster:
    """The cluster of that name, for one run. Raises UnknownKey for an unknown name, RunError where it cannot be loaded."""
    if name in _registered:
        return _registered[name](run_id, **options)
    if place := _OURS.get(name):
        module, _, attribute = place.partition(":")
        made: Cluster = getattr(importlib.import_module(module), attribute)(run_id, **options)
        return made
    for entry in entry_points(group=ENTRY_POINTS, name=name):
        try:
            factory = entry.load()
        except (ImportError, AttributeError) as e:
            raise RunError(
                f"the cluster '{name}' cannot be loaded: {e}", where=entry.value,
                hint="Install what it needs, or leave --cluster out",
            ) from e  # fmt: skip
        found: Cluster = factory(run_id, **options)
        return found
    raise UnknownKey(name, names(), what="cluster")
