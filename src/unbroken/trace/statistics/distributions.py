"""Distributions of duration, queue time and GPU demand by type, and whether queueing is fair to sizes."""

from __future__ import annotations

from collections.abc import Iterator

from ...samples.tables import Result
from ..settings import ReportSettings
from ..store import Store
from .cubes import quantiles_sql

SHARES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)


def results(store: Store, settings: ReportSettings) -> Iterator[Result]:
    """All of this file."""
    yield quantiles(store, "run_quantiles", "Job duration", "c_run", "")
    yield curve(store, "run_cdf", "Distribution of job duration", "c_run", "n")
    yield quantiles(store, "queue_quantiles", "Queue time", "c_wait", "")
    yield curve(store, "queue_cdf", "Distribution of queue time", "c_wait", "n")
    yield curve(store, "failure_cdf", "Distribution of the time to failure", "c_run", "n_failed")
    yield quantiles(store, "failure_quantiles", "Time to failure", "c_run", "", weight="n_failed")
    yield demand(store)
    yield sizes_curve(store)
    yield fairness(store)


def group(source: str, weight: str) -> str:
    """The source by cluster and type, with `GPU jobs` for all types that hold GPUs together."""
    return (
        f"(SELECT cluster, kind, s, sum({weight}) AS n FROM {source} GROUP BY ALL HAVING sum({weight}) > 0 UNION ALL "
        f"SELECT cluster, 'GPU jobs', s, sum({weight}) FROM {source} WHERE kind <> 'CPU' GROUP BY ALL HAVING sum({weight}) > 0)"
    )


def quantiles(store: Store, name: str, title: str, source: str, remark: str, weight: str = "n") -> Result:
    """Mean and quantiles in seconds, by type."""
    sql = quantiles_sql(group(source, weight), "s", "n", "cluster, kind", SHARES)
    return store.result(
        name, title, f"SELECT * RENAME (kind AS type) FROM ({sql}) ORDER BY cluster, n DESC, type", remark
    )


def curve(store: Store, name: str, title: str, source: str, weight: str) -> Result:
    """Points of the distribution function at 1, 1.4, 2, 2.8, 4 ... seconds (Figures 2a, 6)."""
    return store.result(
        name,
        title,
        f"""WITH g AS (SELECT cluster, kind, greatest(ceil(2 * log2(greatest(s, 1)) - 1e-9), 0) AS k, sum(n) AS n
                FROM {group(source, weight)} GROUP BY ALL),
            t AS (SELECT cluster, kind, max(k)::BIGINT AS top, sum(n) AS total FROM g GROUP BY ALL),
            f AS (SELECT cluster, kind, total, unnest(range(0, top + 1)) AS k FROM t)
        SELECT f.cluster, f.kind AS type, pow(2, f.k / 2.0) AS x_s,
            100.0 * sum(coalesce(g.n, 0)) OVER (PARTITION BY f.cluster, f.kind ORDER BY f.k) / f.total AS cdf_pct,
            f.total::BIGINT AS n
        FROM f LEFT JOIN g ON f.cluster IS NOT DISTINCT FROM g.cluster AND f.kind = g.kind AND f.k = g.k
        ORDER BY 1, 2, 3""",
    )


def demand(store: Store) -> Result:
    """Quartiles and whiskers (1.5 interquartile ranges, as drawn in the study) of GPUs by type (Figure 5)."""
    sql = quantiles_sql("c_gpus", "gpu_num", "n", "cluster, kind", (0.05, 0.25, 0.5, 0.75, 0.95))
    return store.result(
        "demand",
        "GPUs asked for",
        f"""SELECT q.cluster, q.kind AS type, q.n::BIGINT AS n, q.mean AS mean, q."p25" AS q1, q."p50" AS median,
            q."p75" AS q3,
            min(c.gpu_num) FILTER (c.gpu_num >= q."p25" - 1.5 * (q."p75" - q."p25")) AS whisker_low,
            max(c.gpu_num) FILTER (c.gpu_num <= q."p75" + 1.5 * (q."p75" - q."p25")) AS whisker_high,
            min(c.gpu_num) AS min, max(c.gpu_num) AS max
        FROM ({sql}) q JOIN c_gpus c ON q.cluster IS NOT DISTINCT FROM c.cluster AND q.kind = c.kind
        GROUP BY ALL ORDER BY 1, n DESC, type""",
    )


def sizes_curve(store: Store) -> Result:
    """Shares of jobs and of GPU time up to each number of GPUs that occurs (Figure 3)."""
    return store.result(
        "size_cdf",
        "Distribution of the number of GPUs",
        """SELECT cluster, gpu_num AS gpus,
            100.0 * sum(sum(n)) OVER (PARTITION BY cluster ORDER BY gpu_num) / sum(sum(n)) OVER (PARTITION BY cluster)
                AS jobs_pct,
            100.0 * sum(sum(gpu_s)) OVER (PARTITION BY cluster ORDER BY gpu_num)
                / nullif(sum(sum(gpu_s)) OVER (PARTITION BY cluster), 0) AS gpu_time_pct
        FROM c_gpus GROUP BY cluster, gpu_num ORDER BY 1, 2""",
    )


def fairness(store: Store) -> Result:
    """Queue time by size class, with Jain's index of the class means in the remark: 1 is equal, 1/classes unequal."""
    quart = quantiles_sql(
        "(SELECT cluster, size, s, sum(n) AS n FROM c_wait WHERE size > 0 GROUP BY ALL)",
        "s",
        "n",
        "cluster, size",
        (0.5, 0.9, 0.99),
    )
    result = store.result(
        "fairness",
        "Queue time by size",
        f"""SELECT q.cluster, q.size, q.n::BIGINT AS jobs, q.mean AS mean_s, q."p50" AS median_s, q."p90" AS p90_s,
            q."p99" AS p99_s, m.run_s / nullif(m.n_run, 0) AS mean_run_s,
            (q.mean + m.run_s / nullif(m.n_run, 0)) / nullif(greatest(m.run_s / nullif(m.n_run, 0), 10), 0) AS slowdown
        FROM ({quart}) q JOIN (SELECT cluster, size, sum(run_s) AS run_s, sum(n_run) AS n_run FROM c_main GROUP BY ALL) m
            ON q.cluster IS NOT DISTINCT FROM m.cluster AND q.size = m.size
        ORDER BY 1, 2""",
    )
    parts = []
    for cluster in result.distinct("cluster"):
        means = [r["mean_s"] for r in result.where(cluster=cluster).dicts() if r["mean_s"] is not None]
        if means and sum(m * m for m in means) > 0:
            jain = sum(means) ** 2 / (len(means) * sum(m * m for m in means))
            parts.append(f"{cluster}: {jain:.2f}")
    remark = (
        "Jain's index of the mean queue times of the size classes (1: equal): " + ", ".join(parts)
        if parts
        else ""
    )
    return Result(result.name, result.title, result.columns, result.rows, remark)
