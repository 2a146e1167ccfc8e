"""Fits the model to the published curves: `python -m unbroken.trace.synthetic.calibrate FOLDER > acme.toml`.

FOLDER holds the derived files of the release (cluster_summary.csv, published_cdfs_from_figures.csv,
published_shares.json, published_boxplot_gpu_num.csv, util_pkl_cdfs.csv). What ships is this command's output.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InputError
from .marginal import Array, Marginal, fit, normal_cdf
from .model import SIZES

CLUSTERS = {"Seren": (286, 8), "Kalos": (302, 8)}
UTILISATION = {
    "Seren": {
        "gpu_util_pct": "util_gpu_seren.gpu_util_pct",
        "gpu_mem_used_pct": "util_gpu_seren.gpu_mem_pct",
        "sm_active_pct": "util_gpu_seren.sm_active_pct",
        "tensor_active_pct": "util_gpu_seren.series5_plotted_as_TC_activity",
        "host_cpu_util_pct": "util_cpu_mem_seren.cpu_util_pct",
        "host_mem_used_pct": "util_cpu_mem_seren.cpu_mem_pct",
        "gpu_power_w": "gpu_power_seren.gpu_power_W",
        "gpu_temp_c": "gpu_temp_seren.gpu_temp_C",
        "gpu_mem_temp_c": "gpu_temp_seren.gpu_mem_temp_C",
        "ib_tx_pct_of_peak": "ib_seren.ib_send_raw",
        "ib_rx_pct_of_peak": "ib_seren.ib_recv_raw",
        "node_power_w": "server_power.gpu_node_power_W",
        "cpu_node_power_w": "server_power.cpu_node_power_W",
    },
    "Kalos": {
        "gpu_util_pct": "util_gpu_kalos_full.gpu_util_pct",
        "gpu_mem_used_pct": "util_gpu_kalos_full.gpu_mem_pct",
        "sm_active_pct": "util_gpu_kalos_full.sm_active_pct",
        "tensor_active_pct": "util_gpu_kalos_full.series5_plotted_as_TC_activity",
        "host_cpu_util_pct": "util_cpu_mem_kalos.cpu_util_pct",
        "host_mem_used_pct": "util_cpu_mem_kalos.cpu_mem_pct",
        "gpu_power_w": "gpu_power_kalos.gpu_power_W",
        "gpu_temp_c": "gpu_temp_kalos.gpu_temp_C",
        "gpu_mem_temp_c": "gpu_temp_kalos.gpu_mem_temp_C",
    },
    "Philly": {"gpu_util_pct": "util_gpu_philly.gpu_util_pct"},
}
"""Metric of the schema -> column of the derived file. Network counters are raw: scaled to their largest reading, as
the study did."""


class Curves:
    """The derived files of the release."""

    def __init__(self, folder: Path) -> None:
        try:
            self.points = read_csv(folder / "published_cdfs_from_figures.csv")
            self.summary = {r["id"]: r for r in read_csv(folder / "cluster_summary.csv")}
            self.boxes = read_csv(folder / "published_boxplot_gpu_num.csv")
            self.shares = json.loads((folder / "published_shares.json").read_text())
            self.utilisation = read_csv(folder / "util_pkl_cdfs.csv")
        except (OSError, KeyError, ValueError) as e:
            raise InputError(
                f"the folder does not hold the derived files of the release: {e}",
                where=str(folder),
                hint="Give the folder with cluster_summary.csv and published_cdfs_from_figures.csv",
            ) from e

    def curve(
        self, cluster: str, kind: str, metric: str, weight: str = "jobs"
    ) -> tuple[list[float], list[float]]:
        """x and share (0..1) of a published curve; empty where there is none."""
        rows = [
            r
            for r in self.points
            if r["cluster"] == cluster
            and r["type"] == kind
            and r["metric"] == metric
            and r["weight"] == weight
        ]
        return [float(r["x"]) for r in rows], [float(r["cdf_pct"]) / 100 for r in rows]

    def used(self, column: str) -> tuple[list[float], list[float]]:
        """x and share of a utilisation series, one point a value."""
        last: dict[float, float] = {}
        for r in self.utilisation:
            if r[column] not in ("", None):
                last[float(r[column])] = float(r["cdf_pct"]) / 100
        return list(last), list(last.values())


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with open(path, newline="") as f:
        return list(csv.DictReader(f))


def size_table(curves: Curves, cluster: str, weight: str) -> Array:
    """Share of each size class, from the curve over GPUs."""
    x, p = curves.curve(cluster, "ALL_GPU", "gpu_num", weight)
    steps = np.array(
        [
            max((b for a, b in zip(x, p, strict=True) if a <= s + (1 if s >= 512 else 0)), default=0.0)
            for s in SIZES
        ]
    )
    steps[-1] = 1.0
    return np.diff(np.concatenate([[0.0], np.maximum.accumulate(steps)]))


def fit_sizes(curves: Curves, cluster: str, types: Sequence[str], shares: Array) -> Array:
    """Probabilities (types x sizes) that meet the type shares and the overall curve, near the published boxes.

    Iterative proportional fitting, from a table that the quartiles of each box suggest.
    """
    columns = size_table(curves, cluster, "jobs")
    logs = np.log2(np.array(SIZES, float))
    seed = np.zeros((len(types), len(SIZES)))
    for i, kind in enumerate(types):
        box = next(b for b in curves.boxes if b["cluster"] == cluster and b["type"] == kind)
        q1, q2, q3 = (math.log2(max(float(box[k]), 1)) for k in ("q1", "median", "q3"))
        low, high = (
            math.log2(max(float(box["whisker_low"]), 1)),
            math.log2(max(float(box["whisker_high"]), 1)),
        )
        # a quarter of the mass in each of the box's four intervals, thin beyond the whiskers
        edges = [low, q1, q2, q3, high]
        for a, b in pairwise(edges):
            inside = (logs >= math.floor(a)) & (logs <= math.ceil(b))
            seed[i] += 0.25 * inside / max(inside.sum(), 1)
        seed[i] += 0.004 * np.exp(-np.abs(logs - q2) / 2)
    for _ in range(400):
        seed *= (shares / seed.sum(1))[:, None]
        seed *= columns / np.maximum(seed.sum(0), 1e-12)
    seed *= (shares / seed.sum(1))[:, None]
    table: Array = seed / seed.sum(1, keepdims=True)
    return table


def draw_sizes(sizes: Sequence[float], rho: float, z: Array, e: Array) -> tuple[Array, Array]:
    """(GPUs, uniform ranks of the duration): sizes from normal scores z, duration ranks correlated with rho."""
    edges = np.cumsum(np.asarray(sizes))[:-1]
    u = normal_cdf(z)
    gpus = np.asarray(SIZES, float)[np.searchsorted(edges, u, side="right")]
    return gpus, normal_cdf(rho * z + math.sqrt(max(1 - rho * rho, 0.0)) * e)


def bisect(f: Callable[[float], float], low: float, high: float, rounds: int = 40) -> float:
    """Where an increasing f crosses zero."""
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) < 0 else (low, middle)
    return (low + high) / 2


def calibrate_cluster(curves: Curves, cluster: str) -> dict[str, Any]:
    """The TOML table of a cluster."""
    nodes, per_node = CLUSTERS[cluster]
    summary = {k: float(v) for k, v in curves.summary[cluster].items() if k != "id" and v}
    shares = curves.shares[cluster]
    types = list(shares["job_count_pct"])
    counts = np.array([shares["job_count_pct"][t] for t in types], float)
    counts /= counts.sum()
    time_shares = {t: shares["gpu_time_pct"][t] / sum(shares["gpu_time_pct"].values()) for t in types}
    total_time = sum(summary[k] for k in ("complete_gpu_time", "cancel_gpu_time", "fail_gpu_time"))
    per_job = total_time / summary["gpu_job_num"]
    sizes = fit_sizes(curves, cluster, types, counts)
    rng = np.random.default_rng(1)
    workloads: dict[str, Any] = {}
    all_time, weight = [], []
    for i, kind in enumerate(types):
        x, p = curves.curve(cluster, kind, "duration")
        duration = fit(x, p, log=True, parts=8, low=1.0, high=max(x))
        q, qp = curves.curve(cluster, kind, "queue")
        queue = fit(q, qp, log=True, parts=8, atoms=(1.0,) if qp[0] > 0.02 else (), low=1.0, high=262144.0)
        z, e = rng.standard_normal(200_000), rng.standard_normal(200_000)
        target = time_shares[kind] * per_job / counts[i]

        def miss(
            rho: float, i: int = i, d: Marginal = duration, z: Array = z, e: Array = e, t: float = target
        ) -> float:
            gpus, u = draw_sizes(sizes[i], rho, z, e)
            return float((gpus * d.quantile(u)).mean() - t)

        rho = bisect(miss, -0.9, 0.9, 24)
        gpus, u = draw_sizes(sizes[i], rho, z, e)
        all_time.append(gpus * duration.quantile(u))
        weight.append(np.full(z.size, counts[i] / z.size))
        workloads[kind] = {
            "job_share": round(float(counts[i]), 5),
            "gpu_time_share": round(float(time_shares[kind]), 5),
            "sizes": [round(float(v), 6) for v in sizes[i]],
            "rho": round(rho, 4),
            "duration_s": duration.as_toml(),
            "queue_s": queue.as_toml(),
        }
    states = fit_states(np.concatenate(all_time), np.concatenate(weight), summary)
    cx, cp = curves.curve(cluster, "ALL_CPU", "duration")
    keep = ("avg_run_time_gpu", "avg_que_time_gpu", "avg_gpu_num", "med_run_time_gpu", "med_que_time_gpu", "med_gpu_num",
            "complete_rate_gpu", "cancel_rate_gpu", "fail_rate_gpu", "complete_rate_gpu_time", "cancel_rate_gpu_time",
            "fail_rate_gpu_time", "max_gpu")  # fmt: skip
    return {
        "nodes": nodes,
        "gpus_per_node": per_node,
        "gpu_jobs": int(summary["gpu_job_num"]),
        "cpu_jobs": int(summary["cpu_job_num"]),
        "workload": workloads,
        "cpu_duration_s": fit(cx, cp, log=True, parts=8, low=1.0, high=max(cx)).as_toml(),
        "states": states,
        "cpu_states": {
            "COMPLETED": summary["complete_rate_cpu"],
            "CANCELLED": summary["cancel_rate_cpu"],
            "FAILED": summary["fail_rate_cpu"],
        },
        "published": {k: summary[k] for k in keep if k in summary},
    }


def fit_states(gpu_time: Array, weight: Array, summary: Mapping[str, float]) -> dict[str, Any]:
    """The two logistic curves by which shares of jobs and of GPU time are both met."""
    logs = np.log(gpu_time + 1)
    centre, scale = float(logs.mean()), float(logs.std())
    z = (logs - centre) / scale
    time = gpu_time * weight / (gpu_time * weight).sum()

    def curve(base: Array, base_time: Array, jobs: float, share: float) -> tuple[float, float]:
        def level(b: float) -> float:
            return bisect(lambda a: float((base / (1 + np.exp(-a - b * z))).sum() - jobs), -25, 25)

        b = bisect(lambda b: float((base_time / (1 + np.exp(-level(b) - b * z))).sum() - share), -6, 6, 26)
        return level(b), b

    cancel = curve(weight, time, summary["cancel_rate_gpu"], summary["cancel_rate_gpu_time"])
    stay = 1 - 1 / (1 + np.exp(-cancel[0] - cancel[1] * z))
    fail = curve(weight * stay, time * stay, summary["fail_rate_gpu"], summary["fail_rate_gpu_time"])
    return {
        "cancel": [round(v, 4) for v in cancel],
        "fail": [round(v, 4) for v in fail],
        "centre": round(centre, 4),
        "scale": round(scale, 4),
    }


def fit_used(curves: Curves, metric: str, column: str) -> Marginal:
    """The marginal of a utilisation series."""
    x, p = curves.used(column)
    if metric.endswith("_of_peak"):
        peak = max(x)
        x = [v / peak * 100 for v in x]
    atoms = []
    if p[x.index(min(x))] > 0.02:
        atoms.append(min(x))
    if len(p) > 2 and p[-1] - p[-2] > 0.02:
        atoms.append(max(x))
    return fit(x, p, log=False, parts=9, atoms=atoms, low=min(x), high=max(x))


def calibrate(folder: Path) -> dict[str, Any]:
    """Everything that `published/acme.toml` holds."""
    curves = Curves(folder)
    names = list(dict.fromkeys(r["cluster"] for r in curves.points))

    def overall(weight: str) -> dict[str, Any]:
        return {
            c: [
                [s, round(float(v) * 100, 1)]
                for s, v in zip(SIZES, np.cumsum(size_table(curves, c, weight)), strict=True)
            ]
            for c in names
        }

    durations = {}
    for c in names:
        x, p = curves.curve(c, "ALL_GPU", "duration")
        durations[c] = fit(x, p, log=True, parts=8, low=1.0, high=max(x)).as_toml()
    return {
        "duration_s": durations,
        "size_jobs": overall("jobs"),
        "size_gpu_time": overall("gpu_time"),
        "utilisation": {
            c: {m: fit_used(curves, m, column).as_toml() for m, column in ms.items()}
            for c, ms in UTILISATION.items()
        },
        "cluster": {c: calibrate_cluster(curves, c) for c in CLUSTERS},
    }


HEADER = """\
# Written by `python -m unbroken.trace.synthetic.calibrate FOLDER`; do not edit.
# Parameters fitted to the published figures and aggregates of "Characterization of Large Language Model Development in
# the Datacenter" (NSDI'24, InternLM/AcmeTrace, CC-BY-4.0): mixtures of normals (of the logarithm where log = true), each
# with its largest distance to the published curve in percentage points (error_pct). Shares by size class are rounded.
"""


def toml(value: Any, path: tuple[str, ...] = ()) -> str:
    """Nested dictionaries as TOML; only what this file needs."""
    plain = {k: v for k, v in value.items() if not isinstance(v, dict)}
    lines = []
    if plain:
        if path:
            lines.append(f"[{'.'.join(path)}]")
        lines += [f"{k} = {json.dumps(v)}" for k, v in plain.items()]
        lines.append("")
    for k, v in value.items():
        if isinstance(v, dict):
            lines.append(toml(v, (*path, k)))
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m unbroken.trace.synthetic.calibrate FOLDER > acme.toml")
    print(HEADER + toml(calibrate(Path(sys.argv[1]))))
