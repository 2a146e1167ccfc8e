"""Failures by reason, time to failure, what cancelled jobs wasted, MTTF and ETTR by size."""

from __future__ import annotations

from collections.abc import Iterator

from ...samples.tables import Note, Result
from ..settings import ReportSettings
from ..store import Store
from .cubes import quantiles_sql


def results(store: Store, settings: ReportSettings) -> Iterator[Result]:
    """All of this file."""
    if store.has("incidents"):
        yield failures_from_incidents(store)
        yield incidents_over_time(store)
    if store.has("jobs"):
        yield failures_from_exits(store)
        yield cancelled(store, settings)
        yield by_size(store, settings)


def failures_from_incidents(store: Store) -> Result:
    """The failure table (Table 3): number, mean GPUs, mean and median minutes to failure, share of GPU time."""
    quart = quantiles_sql(
        "(SELECT coalesce(category, '') AS category, coalesce(reason, 'Unknown') AS reason, to_failure_s / 60 AS v, "
        "count(*) AS n FROM incidents WHERE to_failure_s IS NOT NULL GROUP BY ALL)",
        "v",
        "n",
        "category, reason",
        (0.5,),
    )
    return store.result(
        "failures",
        "Failures by reason",
        f"""SELECT i.category, i.reason, count(*)::BIGINT AS count, avg(gpu_num) AS mean_gpus,
            avg(to_failure_s) / 60 AS mean_min_to_failure, any_value(q."p50") AS median_min_to_failure,
            sum(gpu_num * to_failure_s) / 3600 AS gpu_h,
            100.0 * sum(gpu_num * to_failure_s) / nullif(sum(sum(gpu_num * to_failure_s)) OVER (), 0) AS gpu_time_pct,
            100.0 * count(*) / sum(count(*)) OVER () AS count_pct, avg(lost_s) / 60 AS mean_min_lost
        FROM (SELECT * REPLACE (coalesce(category, '') AS category, coalesce(reason, 'Unknown') AS reason) FROM incidents) i
            LEFT JOIN ({quart}) q USING (category, reason)
        GROUP BY i.category, i.reason
        ORDER BY array_position(['Infrastructure', 'Framework', 'Script'], i.category) NULLS LAST, gpu_h DESC NULLS LAST,
            count DESC, i.reason""",
        "From incidents.",
    )


def incidents_over_time(store: Store) -> Result:
    """Incidents of each week by category."""
    return store.result(
        "incidents_weekly",
        "Incidents a week",
        """SELECT CAST(time_bucket(INTERVAL 7 DAY, time_utc, TIMESTAMP '2000-01-03') AS DATE) AS week,
            coalesce(category, 'Unknown') AS category, count(*)::BIGINT AS count
        FROM incidents WHERE time_utc IS NOT NULL GROUP BY ALL ORDER BY 1, 2""",
    )


EXIT_WORDS = """CASE
    WHEN reason IS NOT NULL THEN reason
    WHEN upper(state_raw) LIKE 'TIMEOUT%' OR upper(state_raw) = 'TO' THEN 'time limit'
    WHEN upper(state_raw) LIKE 'NODE%FAIL%' OR upper(state_raw) = 'NF' THEN 'node failure'
    WHEN upper(state_raw) LIKE 'OUT_OF_ME%' OR upper(state_raw) LIKE 'OOM%' THEN 'out of memory'
    WHEN upper(state_raw) LIKE 'PREEMPT%' THEN 'preempted'
    WHEN upper(state_raw) LIKE 'EVICT%' THEN 'evicted'
    WHEN upper(state_raw) LIKE 'BOOT_FAIL%' THEN 'node did not boot'
    WHEN exit_signal = 9 OR exit_code = 137 THEN 'killed (signal 9)'
    WHEN exit_signal = 15 OR exit_code = 143 THEN 'terminated (signal 15)'
    WHEN exit_signal = 11 OR exit_code = 139 THEN 'segmentation fault (signal 11)'
    WHEN exit_signal = 6 OR exit_code = 134 THEN 'aborted (signal 6)'
    WHEN exit_signal = 7 OR exit_code = 135 THEN 'bus error (signal 7)'
    WHEN exit_signal = 2 OR exit_code = 130 THEN 'interrupted (signal 2)'
    WHEN exit_code = 127 THEN 'command not found (exit 127)'
    WHEN exit_code = 126 THEN 'command cannot run (exit 126)'
    WHEN exit_signal > 0 THEN 'signal ' || exit_signal
    WHEN exit_code > 0 THEN 'exit code ' || exit_code
    ELSE 'not said' END"""


def failures_from_exits(store: Store) -> Result:
    """Failed GPU jobs by what their state, exit code or signal says."""
    return store.result(
        "failures_by_exit",
        "Failed jobs by exit",
        f"""SELECT cluster, {EXIT_WORDS} AS reason, sum(n)::BIGINT AS count, sum(gpus) / sum(n) AS mean_gpus,
            sum(run_s) / nullif(sum(n), 0) / 60 AS mean_min_to_failure, sum(gpu_s) / 3600 AS gpu_h,
            100.0 * sum(gpu_s) / nullif(sum(sum(gpu_s)) OVER (PARTITION BY cluster), 0) AS gpu_time_pct
        FROM c_exit GROUP BY 1, 2 ORDER BY cluster, count DESC, reason LIMIT 200""",
        "From exit states: they say how a job ended, not why.",
    )


def cancelled(store: Store, settings: ReportSettings) -> Result:
    """GPU time of cancelled jobs: after they had stalled (idle tail), and before; by type.

    The end of work is `stop_utc` where the trace has it, else the last sample with GPUs busy on the job's nodes.
    """
    base = "SELECT cluster, kind, job_id, nodes, start_utc, end_utc, gpu_num, gpu_s, stop_utc FROM work WHERE state = 'CANCELLED' AND gpu_num > 0"
    last_work = "NULL::TIMESTAMP"
    source = f"({base})"
    if store.has("samples"):
        known = store.one(
            "SELECT count(*) FROM work WHERE state = 'CANCELLED' AND gpu_num > 0 AND nodes IS NOT NULL AND stop_utc IS NULL"
        )[0]
        if known:
            source = f"""(SELECT b.*, l.last_work FROM ({base}) b LEFT JOIN (
                SELECT j.cluster, j.job_id, j.start_utc, coalesce(max(s.time_utc) FILTER (s.value > {settings.idle_below_pct}),
                    j.start_utc) AS last_work
                FROM (SELECT cluster, job_id, start_utc, end_utc, unnest(nodes) AS node FROM ({base}) WHERE nodes IS NOT NULL) j
                JOIN samples s ON s.node = j.node AND s.metric = 'gpu_util_pct' AND s.time_utc BETWEEN j.start_utc AND j.end_utc
                GROUP BY 1, 2, 3) l USING (cluster, job_id, start_utc))"""
            last_work = "last_work"
    tail = f"gpu_num * greatest(date_diff('second', coalesce(stop_utc, {last_work}), end_utc), 0)"
    stalled = f"date_diff('second', coalesce(stop_utc, {last_work}), end_utc) > {settings.stall_s}"
    result = store.result(
        "cancelled",
        "What cancelled jobs spent",
        f"""SELECT cluster, kind AS type, count(*)::BIGINT AS jobs, sum(gpu_s) / 3600 AS gpu_h,
            count(*) FILTER ({stalled})::BIGINT AS stalled_jobs,
            coalesce(sum({tail}) FILTER ({stalled}), 0) / 3600 AS idle_tail_gpu_h,
            (sum(gpu_s) - coalesce(sum({tail}) FILTER ({stalled}), 0)) / 3600 AS worked_gpu_h,
            count(coalesce(stop_utc, {last_work}))::BIGINT AS known
        FROM {source} GROUP BY ALL ORDER BY cluster, gpu_h DESC""",
    )
    known_jobs = sum(result.column("known")) if result else 0
    if result and not known_jobs:
        store.note(
            Note(
                "missing",
                "neither stop times nor samples on the jobs' nodes: what cancelled jobs spent cannot be split into idle "
                "tail and work",
                sum(result.column("jobs")),
            )
        )
    return result


def by_size(store: Store, settings: ReportSettings) -> Result:
    """By size class: failures, MTTF (run time per failure), and the ETTR that follows from the declared intervals.

    ETTR = 1 / (1 + (interval / 2 + restart) / MTTF): half an interval is done again, then the restart. Where there are
    incidents those of the infrastructure count, else all failed jobs, which include users' mistakes.
    """
    lost = settings.checkpoint_interval_s / 2 + settings.restart_s
    counted = "any_value(i.infra)" if store.has("incidents") else "sum(n) FILTER (state = 'FAILED')"
    incidents = "SELECT NULL::DOUBLE AS size, NULL::BIGINT AS infra WHERE false"
    if store.has("incidents"):
        incidents = """SELECT pow(2, ceil(log2(greatest(gpu_num, 1)) - 1e-9)) AS size, count(*) AS infra FROM incidents
            WHERE category = 'Infrastructure' AND gpu_num IS NOT NULL GROUP BY 1"""
    return store.result(
        "mttf_by_size",
        "Mean time to failure by size",
        f"""SELECT m.size, sum(n)::BIGINT AS jobs, sum(run_s) / 3600 AS run_h,
            sum(n) FILTER (state = 'FAILED')::BIGINT AS failed, any_value(i.infra)::BIGINT AS infrastructure,
            sum(run_s) / nullif(sum(n) FILTER (state = 'FAILED'), 0) / 3600 AS mttf_h,
            sum(run_s) / nullif(any_value(i.infra), 0) / 3600 AS mttf_infrastructure_h,
            1 / (1 + {lost} / nullif(sum(run_s) / nullif({counted}, 0), 0))
                AS ettr_expected,
            sum(gpu_s) FILTER (state = 'COMPLETED') / nullif(sum(gpu_s), 0) AS completed_gpu_time
        FROM c_main m LEFT JOIN ({incidents}) i USING (size)
        WHERE m.size > 0 GROUP BY m.size ORDER BY m.size""",
        f"ETTR expected with a checkpoint every {settings.checkpoint_interval_s / 60:g} min and "
        f"{settings.restart_s / 60:g} min to restart, against infrastructure failures where incidents tell them, else "
        "against all failed jobs.",
    )
