"""The published study as something to compare with: its clusters, in the same tables as a report's own."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ...samples.tables import Findings, Result
from ..figures.reference import Reference
from ..synthetic.marginal import Marginal
from ..synthetic.model import SIZES, ClusterModel, failures, published

GRID = [2 ** (k / 2) for k in range(43)]


def acme(names: tuple[str, ...] = ("Seren", "Kalos")) -> list[Reference]:
    """The published clusters, from the parameters that ship."""
    study = published()
    out = []
    for name in names:
        found = Findings()
        model = study.clusters.get(name)
        for result in cluster_results(name, model):
            found.add(result)
        out.append(Reference(name, found, fitted=True))
    return out


def cluster_results(name: str, model: ClusterModel | None) -> Iterator[Result]:
    """The tables of one published cluster, as far as they are published."""
    study = published()
    runs: list[tuple[object, ...]] = []
    if name in study.durations:
        runs += cdf_rows(name, "GPU jobs", study.durations[name])
    queues: list[tuple[object, ...]] = []
    if model:
        for w in model.workloads:
            runs += cdf_rows(name, w.type, w.duration_s)
            queues += cdf_rows(name, w.type, w.queue_s)
        runs += cdf_rows(name, "CPU", model.cpu_duration_s)
        p = model.published
        yield Result(
            "summary",
            "",
            ("cluster", "gpu_jobs", "cpu_jobs", "mean_run_s", "median_run_s", "mean_queue_s", "median_queue_s", "mean_gpus",
             "median_gpus", "max_gpus"),
            ((name, model.gpu_jobs, model.cpu_jobs, p["avg_run_time_gpu"], p["med_run_time_gpu"], p["avg_que_time_gpu"],
              p["med_que_time_gpu"], p["avg_gpu_num"], p["med_gpu_num"], p["max_gpu"]),),
        )  # fmt: skip
        yield Result(
            "by_state",
            "",
            ("cluster", "state", "jobs_pct", "gpu_time_pct"),
            tuple(
                (name, state, 100 * p[f"{word}_rate_gpu"], 100 * p[f"{word}_rate_gpu_time"])
                for state, word in (("COMPLETED", "complete"), ("CANCELLED", "cancel"), ("FAILED", "fail"))
            ),
        )
        yield Result(
            "by_type",
            "",
            ("cluster", "type", "jobs_pct", "gpu_time_pct"),
            tuple((name, w.type, 100 * w.job_share, 100 * w.gpu_time_share) for w in model.workloads),
        )
        yield Result(
            "demand",
            "",
            ("cluster", "type", "whisker_low", "q1", "median", "q3", "whisker_high"),
            tuple((name, w.type, *box_of(w.sizes)) for w in model.workloads),
        )
    yield Result("run_cdf", "", ("cluster", "type", "x_s", "cdf_pct"), tuple(runs))
    yield Result("queue_cdf", "", ("cluster", "type", "x_s", "cdf_pct"), tuple(queues))
    if name in study.size_jobs:
        times = dict(study.size_time.get(name, ()))
        yield Result(
            "size_cdf",
            "",
            ("cluster", "gpus", "jobs_pct", "gpu_time_pct"),
            tuple((name, s, j, times.get(s, math.nan)) for s, j in study.size_jobs[name]),
        )
    used = study.utilisation.get(name, {})
    rows = []
    for metric, m in used.items():
        low, high = m.low, m.high
        xs = np.linspace(low, high, 101)
        rows += [(name, metric, float(x), float(c) * 100) for x, c in zip(xs, m.cdf(xs), strict=True)]
    yield Result("utilisation_cdf", "", ("cluster", "metric", "x", "cdf_pct"), tuple(rows))
    table = failures()
    if model:
        yield Result(
            "failures",
            "",
            ("category", "reason", "count", "mean_gpus", "mean_min_to_failure", "gpu_time_pct"),
            tuple(
                (f.category, f.reason, f.count, f.mean_gpus, f.mean_minutes, f.gpu_time_pct) for f in table
            ),
        )


def cdf_rows(cluster: str, kind: str, m: Marginal) -> list[tuple[object, ...]]:
    """Points of a marginal, up to where it reaches one."""
    shares = m.cdf(GRID)
    rows: list[tuple[object, ...]] = []
    for x, c in zip(GRID, shares, strict=True):
        rows.append((cluster, kind, x, float(c) * 100))
        if c >= 0.99999:
            break
    return rows


def box_of(sizes: tuple[float, ...]) -> tuple[float, float, float, float, float]:
    """Whiskers, quartiles and median of a distribution over the size classes (whiskers at 1.5 interquartile ranges)."""
    cum = np.cumsum(sizes)
    q1, median, q3 = (float(SIZES[int(np.searchsorted(cum, p - 1e-9))]) for p in (0.25, 0.5, 0.75))
    inside = [
        float(s)
        for s, p in zip(SIZES, sizes, strict=True)
        if q1 - 1.5 * (q3 - q1) <= s <= q3 + 1.5 * (q3 - q1) and p > 1e-3
    ]
    return min(inside, default=q1), q1, median, q3, max(inside, default=q3)
