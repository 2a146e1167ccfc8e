"""Clusters by name. A new one is a file, and one entry here or one entry point of an installed package."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, cast

from ..errors import RunError, UnknownKey
from .contract import Cluster
from .options import make_options

ENTRY_POINTS = "unbroken.clusters"
_OURS = {
    "hosts": "unbroken.cluster.hosts.cluster:HostsCluster",
    "kubernetes": "unbroken.cluster.kubernetes.cluster:KubernetesCluster",
    "local": "unbroken.cluster.local_events:LocalCluster",
    "slurm": "unbroken.cluster.slurm.cluster:SlurmCluster",
}
_registered: dict[str, ClusterKind] = {}


class ClusterKind(Protocol):
    """What makes clusters of one kind: mostly their class."""

    @property
    def Options(self) -> type[Any]:
        """A frozen dataclass with a default for each field; `options.NoOptions` where there is nothing to ask for."""

    def __call__(self, run_id: str, options: Any, *, log_of: Callable[[str], Path] | None = None) -> Cluster:
        """The cluster as one run sees it; nothing happens by that. `log_of` says where the output of a node's agent goes, in
        the run directory of the supervisor's host; nowhere by default."""


def register(name: str, kind: ClusterKind) -> None:
    """Adds a cluster. Raises ValueError where the name is taken by another."""
    if name in _OURS or _registered.get(name, kind) is not kind:
        raise ValueError(f"there is a cluster '{name}' already")
    _registered[name] = kind


def names() -> list[str]:
    """All that `make_cluster` knows."""
    return sorted({*_OURS, *_registered, *(e.name for e in entry_points(group=ENTRY_POINTS))})


def find_cluster(name: str) -> ClusterKind:
    """What makes clusters of that name. Raises UnknownKey for an unknown name, RunError where it cannot be loaded."""
    if name in _registered:
        return _registered[name]
    if place := _OURS.get(name):
        module, _, attribute = place.partition(":")
        return cast(ClusterKind, getattr(importlib.import_module(module), attribute))
    for entry in entry_points(group=ENTRY_POINTS, name=name):
        try:
            return cast(ClusterKind, entry.load())
        except (ImportError, AttributeError) as e:
            raise RunError(
                f"the cluster '{name}' cannot be loaded: {e}", where=entry.value,
                hint="Install what it needs, or leave --cluster out",
            ) from e  # fmt: skip
    raise UnknownKey(name, names(), what="cluster")


def make_cluster(
    name: str,
    run_id: str,
    options: Mapping[str, Any] | None = None,
    *,
    log_of: Callable[[str], Path] | None = None,
) -> Cluster:
    """The cluster of that name for one run, with options as texts or values. Raises UnknownKey for an unknown name or
    option, UsageError for a value that it does not take, RunError where it cannot be loaded."""
    kind = find_cluster(name)
    chosen = make_options(kind.Options, options or {}, where=f"the cluster '{name}'")
    return kind(run_id, chosen, log_of=log_of)
