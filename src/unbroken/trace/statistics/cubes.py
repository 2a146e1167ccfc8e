"""One pass over the jobs for each question, into small tables from which all statistics of the jobs are read.

Durations and queue times are kept to the second up to 16,384 s and to one part in 16,384 above, so that quantiles
are exact to that, a hundred million jobs fit in little memory, and a sub-second part is lost.
"""

from __future__ import annotations

from ..store import Store


def seconds_bin(column: str) -> str:
    """The value to the second up to 16,384, to 1/16,384 of itself above."""
    return (
        f"CASE WHEN {column} < 16384 THEN round({column}) "
        f"ELSE round({column} / pow(2, floor(log2({column})) - 13)) * pow(2, floor(log2({column})) - 13) END"
    )


CUBES = {
    "c_main": """
        SELECT cluster, kind, state, size, count(*) AS n, sum(gpu_s) AS gpu_s, sum(duration_s) AS run_s,
            count(duration_s) AS n_run, sum(queue_s) AS wait_s, count(queue_s) AS n_wait, sum(gpu_num) AS gpus,
            max(gpu_num) AS max_gpus, max(duration_s) AS max_run_s, min(submit_utc) AS first_utc,
            max(coalesce(end_utc, start_utc, submit_utc)) AS last_utc, sum(cpu_num * duration_s) AS cpu_s
        FROM work GROUP BY ALL""",
    "c_run": f"""
        SELECT cluster, kind, {seconds_bin("duration_s")} AS s, count(*) AS n, sum(gpu_s) AS gpu_s,
            count(*) FILTER (state = 'FAILED') AS n_failed
        FROM work WHERE duration_s IS NOT NULL GROUP BY ALL""",
    "c_wait": f"""
        SELECT cluster, kind, size, {seconds_bin("queue_s")} AS s, count(*) AS n
        FROM work WHERE queue_s IS NOT NULL GROUP BY ALL""",
    "c_gpus": "SELECT cluster, kind, gpu_num, count(*) AS n, sum(gpu_s) AS gpu_s FROM work WHERE gpu_num > 0 GROUP BY ALL",
    "c_submit": """
        SELECT cluster, time_bucket(INTERVAL 1 HOUR, submit_utc) AS hour, count(*) AS n,
            count(*) FILTER (gpu_num > 0) AS n_gpu
        FROM work WHERE submit_utc IS NOT NULL GROUP BY ALL""",
    "c_start": """
        SELECT cluster, CAST(floor(epoch(start_utc) / 3600) AS BIGINT) AS h, sum(gpu_num) AS g,
            sum(gpu_num * (epoch(start_utc) - 3600 * floor(epoch(start_utc) / 3600))) AS gs
        FROM work WHERE gpu_num > 0 AND start_utc IS NOT NULL AND end_utc IS NOT NULL GROUP BY ALL""",
    "c_end": """
        SELECT cluster, CAST(floor(epoch(end_utc) / 3600) AS BIGINT) AS h, sum(gpu_num) AS g,
            sum(gpu_num * (epoch(end_utc) - 3600 * floor(epoch(end_utc) / 3600))) AS gs
        FROM work WHERE gpu_num > 0 AND start_utc IS NOT NULL AND end_utc IS NOT NULL GROUP BY ALL""",
    "c_user": """
        SELECT cluster, "user", count(*) AS n, sum(gpu_s) AS gpu_s, count(*) FILTER (state = 'FAILED') AS n_failed,
            sum(gpu_s) FILTER (state = 'CANCELLED') AS cancelled_gpu_s, sum(queue_s) AS wait_s, count(queue_s) AS n_wait
        FROM work WHERE "user" IS NOT NULL AND gpu_num > 0 GROUP BY ALL""",
    "c_team": """
        SELECT cluster, team, CAST(time_bucket(INTERVAL 7 DAY, coalesce(start_utc, submit_utc), TIMESTAMP '2000-01-03')
            AS DATE) AS week, count(*) AS n, sum(gpu_s) AS gpu_s, sum(gpu_s) FILTER (state = 'FAILED') AS failed_gpu_s,
            sum(gpu_s) FILTER (state = 'CANCELLED') AS cancelled_gpu_s
        FROM work WHERE team IS NOT NULL AND coalesce(start_utc, submit_utc) IS NOT NULL GROUP BY ALL""",
    "c_exit": """
        SELECT cluster, reason, state_raw, exit_code, exit_signal, count(*) AS n, sum(gpu_num) AS gpus,
            sum(duration_s) AS run_s, sum(gpu_s) AS gpu_s
        FROM work WHERE state = 'FAILED' AND gpu_num > 0 GROUP BY ALL""",
}


def build_cubes(store: Store) -> None:
    """(Re)creates the small tables."""
    for name, sql in CUBES.items():
        store.con.execute(f"CREATE OR REPLACE TABLE {name} AS {sql}")


def quantiles_sql(source: str, value: str, weight: str, groups: str, shares: tuple[float, ...]) -> str:
    """Quantiles of a weighted table: the smallest value that at least the share of the weight does not exceed."""
    picks = ", ".join(f'min({value}) FILTER (_cum >= {p} * _all - 1e-9) AS "p{p * 100:g}"' for p in shares)
    return (
        f"SELECT {groups}, any_value(_all) AS n, sum({value} * {weight}) / any_value(_all) AS mean, {picks}, "
        f"max({value}) AS max FROM (SELECT *, sum({weight}) OVER (PARTITION BY {groups} ORDER BY {value} "
        f"ROWS UNBOUNDED PRECEDING) AS _cum, sum({weight}) OVER (PARTITION BY {groups}) AS _all FROM {source}) "
        f"GROUP BY {groups}"
    )
