"""Counts and shares: the summary (Table 2), by final state, type and size."""

from __future__ import annotations

from collections.abc import Iterator

from ...samples.tables import Result
from ..settings import ReportSettings
from ..store import Store
from .cubes import quantiles_sql

FINAL = "state IN ('COMPLETED', 'CANCELLED', 'FAILED')"


def results(store: Store, settings: ReportSettings) -> Iterator[Result]:
    """All of this file."""
    yield summary(store)
    yield by_state(store)
    yield by_type(store)
    yield by_type_and_state(store)
    yield by_size(store)


def summary(store: Store) -> Result:
    """One row a cluster: jobs, GPU jobs, mean and median of duration, queue and GPUs, shares, span (Table 2)."""
    medians = {
        what: f'SELECT cluster, "p50" FROM ({quantiles_sql(source, value, "n", "cluster", (0.5,))})'
        for what, source, value in (
            ("run", "(SELECT cluster, s, sum(n) AS n FROM c_run WHERE kind <> 'CPU' GROUP BY ALL)", "s"),
            ("wait", "(SELECT cluster, s, sum(n) AS n FROM c_wait WHERE kind <> 'CPU' GROUP BY ALL)", "s"),
            ("gpus", "(SELECT cluster, gpu_num, sum(n) AS n FROM c_gpus GROUP BY ALL)", "gpu_num"),
        )
    }
    gpu = "size > 0"
    return store.result(
        "summary",
        "The trace in numbers",
        f"""SELECT m.cluster, sum(n)::BIGINT AS jobs, sum(n) FILTER ({gpu})::BIGINT AS gpu_jobs,
            sum(n) FILTER (size = 0)::BIGINT AS cpu_jobs, min(first_utc) AS first_utc, max(last_utc) AS last_utc,
            date_diff('second', min(first_utc), max(last_utc)) / 86400.0 AS days,
            sum(gpu_s) / 3600 AS gpu_h,
            sum(run_s) FILTER ({gpu}) / nullif(sum(n_run) FILTER ({gpu}), 0) AS mean_run_s, any_value(r.p50) AS median_run_s,
            max(max_run_s) FILTER ({gpu}) AS max_run_s,
            sum(wait_s) FILTER ({gpu}) / nullif(sum(n_wait) FILTER ({gpu}), 0) AS mean_queue_s,
            any_value(w.p50) AS median_queue_s,
            sum(gpus) FILTER ({gpu}) / nullif(sum(n) FILTER ({gpu}), 0) AS mean_gpus, any_value(g.p50) AS median_gpus,
            max(max_gpus) AS max_gpus
        FROM c_main m LEFT JOIN ({medians["run"]}) r USING (cluster) LEFT JOIN ({medians["wait"]}) w USING (cluster)
            LEFT JOIN ({medians["gpus"]}) g USING (cluster)
        GROUP BY m.cluster ORDER BY jobs DESC, m.cluster""",
    )


def by_state(store: Store) -> Result:
    """Shares of GPU jobs and of their GPU time by final state (Figure 17)."""
    return store.result(
        "by_state",
        "Final states",
        f"""SELECT cluster, state, sum(n)::BIGINT AS jobs, sum(gpu_s) / 3600 AS gpu_h,
            100.0 * sum(n) / sum(sum(n)) OVER (PARTITION BY cluster) AS jobs_pct,
            100.0 * sum(gpu_s) / nullif(sum(sum(gpu_s)) OVER (PARTITION BY cluster), 0) AS gpu_time_pct
        FROM c_main WHERE size > 0 AND {FINAL} GROUP BY cluster, state
        ORDER BY cluster, array_position(['COMPLETED', 'CANCELLED', 'FAILED'], state)""",
        "GPU jobs that have ended; TIMEOUT, NODE_FAIL and their like count as failed.",
    )


def by_type(store: Store) -> Result:
    """Shares of GPU jobs and of their GPU time by workload type (Figure 4)."""
    return store.result(
        "by_type",
        "Workload types",
        """SELECT cluster, kind AS type, sum(n)::BIGINT AS jobs, sum(gpu_s) / 3600 AS gpu_h,
            100.0 * sum(n) / sum(sum(n)) OVER (PARTITION BY cluster) AS jobs_pct,
            100.0 * sum(gpu_s) / nullif(sum(sum(gpu_s)) OVER (PARTITION BY cluster), 0) AS gpu_time_pct,
            sum(gpus) / sum(n) AS mean_gpus
        FROM c_main WHERE size > 0 GROUP BY cluster, kind ORDER BY cluster, jobs DESC, type""",
    )


def by_type_and_state(store: Store) -> Result:
    """Final states within each workload type, by jobs and by GPU time."""
    return store.result(
        "by_type_and_state",
        "Final states of each type",
        f"""SELECT cluster, kind AS type, state, sum(n)::BIGINT AS jobs,
            100.0 * sum(n) / sum(sum(n)) OVER (PARTITION BY cluster, kind) AS jobs_pct,
            100.0 * sum(gpu_s) / nullif(sum(sum(gpu_s)) OVER (PARTITION BY cluster, kind), 0) AS gpu_time_pct
        FROM c_main WHERE size > 0 AND {FINAL} GROUP BY cluster, kind, state
        ORDER BY cluster, type, array_position(['COMPLETED', 'CANCELLED', 'FAILED'], state)""",
    )


def by_size(store: Store) -> Result:
    """Jobs and GPU time by the number of GPUs, in classes of powers of two, with running totals (Figure 3)."""
    return store.result(
        "by_size",
        "Sizes of jobs",
        """SELECT *, sum(jobs_pct) OVER (PARTITION BY cluster ORDER BY size) AS jobs_cdf_pct,
            sum(gpu_time_pct) OVER (PARTITION BY cluster ORDER BY size) AS gpu_time_cdf_pct
        FROM (SELECT cluster, size, sum(n)::BIGINT AS jobs, sum(gpu_s) / 3600 AS gpu_h,
            100.0 * sum(n) / sum(sum(n)) OVER (PARTITION BY cluster) AS jobs_pct,
            100.0 * sum(gpu_s) / nullif(sum(sum(gpu_s)) OVER (PARTITION BY cluster), 0) AS gpu_time_pct,
            100.0 * sum(n) FILTER (state = 'FAILED') / nullif(sum(n), 0) AS failed_pct
        FROM c_main WHERE size > 0 GROUP BY cluster, size) ORDER BY cluster, size""",
        "A class holds the jobs with at most that many GPUs and more than the class before.",
    )
