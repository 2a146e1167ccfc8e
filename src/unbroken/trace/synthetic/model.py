"""The model of a cluster's workload, as data: what `synth` draws from and `report --compare acme` shows beside."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ...errors import UsageError
from .marginal import Marginal

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""GPU counts of the model; a class stands for what lies above the one before."""


@dataclass(frozen=True)
class Workload:
    """One workload type of a cluster.

    `job_share`, `gpu_time_share`: of all GPU jobs. `sizes`: probability of each of SIZES. `rho`: correlation of
    the ranks of size and duration (a Gaussian copula), by which the GPU-time share is met.
    """

    type: str
    job_share: float
    gpu_time_share: float
    sizes: tuple[float, ...]
    duration_s: Marginal
    queue_s: Marginal
    rho: float


@dataclass(frozen=True)
class StateModel:
    """P(state | GPU time): logistic in z = (ln(GPU seconds + 1) - centre) / scale; first cancelled or not, then
    failed or completed. Shares by jobs and by GPU time are both met."""

    cancel: tuple[float, float]
    fail: tuple[float, float]
    centre: float
    scale: float


@dataclass(frozen=True)
class ClusterModel:
    """A cluster: its size, its jobs, how they end. `published`: the released aggregates that it was fitted to."""

    name: str
    nodes: int
    gpus_per_node: int
    gpu_jobs: int
    cpu_jobs: int
    workloads: tuple[Workload, ...]
    cpu_duration_s: Marginal
    states: StateModel
    cpu_states: Mapping[str, float]
    published: Mapping[str, float]


@dataclass(frozen=True)
class PublishedStudy:
    """Everything that ships about the published study: cluster models, utilisation, overall curves."""

    clusters: Mapping[str, ClusterModel]
    durations: Mapping[str, Marginal]
    utilisation: Mapping[str, Mapping[str, Marginal]]
    size_jobs: Mapping[str, tuple[tuple[float, float], ...]]
    size_time: Mapping[str, tuple[tuple[float, float], ...]]


@dataclass(frozen=True)
class FailureRow:
    """One row of the published failure table (Table 3): how many, their mean GPUs, mean minutes to failure, and
    their share of the failed GPU time in percent."""

    category: str
    reason: str
    count: int
    mean_gpus: float
    mean_minutes: float
    gpu_time_pct: float


@functools.cache
def load_toml(name: str) -> Mapping[str, Any]:
    """A data file of `trace/published`."""
    return tomllib.loads(resources.files("unbroken.trace.published").joinpath(name).read_text("utf-8"))


@functools.cache
def failures() -> tuple[FailureRow, ...]:
    """The published failure table, in its order."""
    return tuple(
        FailureRow(str(r[0]), str(r[1]), int(r[2]), float(r[3]), float(r[4]), float(r[5]))
        for r in load_toml("failures.toml")["rows"]
    )


@functools.cache
def published() -> PublishedStudy:
    """The fitted study, from `published/acme.toml`."""
    data = load_toml("acme.toml")
    return PublishedStudy(
        {name: cluster_from(name, c) for name, c in data["cluster"].items()},
        {k: Marginal.from_toml(v) for k, v in data["duration_s"].items()},
        {c: {m: Marginal.from_toml(v) for m, v in ms.items()} for c, ms in data["utilisation"].items()},
        {k: pairs(v) for k, v in data["size_jobs"].items()},
        {k: pairs(v) for k, v in data["size_gpu_time"].items()},
    )


def pairs(rows: Any) -> tuple[tuple[float, float], ...]:
    """[[a, b], ...] as tuples."""
    return tuple((float(a), float(b)) for a, b in rows)


def cluster_from(name: str, data: Mapping[str, Any]) -> ClusterModel:
    """One cluster from its TOML table."""
    return ClusterModel(
        name,
        int(data["nodes"]),
        int(data["gpus_per_node"]),
        int(data["gpu_jobs"]),
        int(data["cpu_jobs"]),
        tuple(
            Workload(
                kind,
                float(w["job_share"]),
                float(w["gpu_time_share"]),
                tuple(float(p) for p in w["sizes"]),
                Marginal.from_toml(w["duration_s"]),
                Marginal.from_toml(w["queue_s"]),
                float(w["rho"]),
            )
            for kind, w in data["workload"].items()
        ),
        Marginal.from_toml(data["cpu_duration_s"]),
        StateModel(
            (float(data["states"]["cancel"][0]), float(data["states"]["cancel"][1])),
            (float(data["states"]["fail"][0]), float(data["states"]["fail"][1])),
            float(data["states"]["centre"]),
            float(data["states"]["scale"]),
        ),
        {str(k): float(v) for k, v in data["cpu_states"].items()},
        {str(k): float(v) for k, v in data["published"].items()},
    )


def cluster_model(name: str) -> ClusterModel:
    """The model of a published cluster, by name in any case; raises UsageError for another."""
    for n, c in published().clusters.items():
        if n.lower() == name.lower():
            return c
    raise UsageError(
        f"there is no model of a cluster '{name}'", hint=f"Choose one of: {', '.join(published().clusters)}"
    )
