"""When jobs arrive, and how many GPUs are held at each hour."""

from __future__ import annotations

from collections.abc import Iterator

from ...samples.tables import Result
from ..settings import ReportSettings
from ..store import Store


def results(store: Store, settings: ReportSettings) -> Iterator[Result]:
    """All of this file."""
    yield by_hour(store)
    yield heat(store)
    yield daily(store)
    yield burstiness(store)
    yield busy(store)


def by_hour(store: Store) -> Result:
    """Mean submissions in each hour of the day, UTC."""
    return store.result(
        "arrivals_by_hour",
        "Submissions by hour of the day (UTC)",
        """SELECT cluster, hour(hour) AS hour, sum(n)::BIGINT AS jobs, sum(n_gpu)::BIGINT AS gpu_jobs,
            sum(n) / any_value(days) AS jobs_per_hour
        FROM c_submit JOIN (SELECT cluster AS c, greatest(date_diff('day', min(hour), max(hour)) + 1, 1) AS days
            FROM c_submit GROUP BY 1) ON cluster IS NOT DISTINCT FROM c
        GROUP BY ALL ORDER BY 1, 2""",
    )


def heat(store: Store) -> Result:
    """Mean submissions of each hour of the week."""
    return store.result(
        "arrivals_by_weekday",
        "Submissions by hour of the week (UTC)",
        """SELECT cluster, isodow(hour) AS weekday, hour(hour) AS hour, sum(n)::BIGINT AS jobs
        FROM c_submit GROUP BY ALL ORDER BY 1, 2, 3""",
    )


def daily(store: Store) -> Result:
    """Submissions of each day."""
    return store.result(
        "arrivals_daily",
        "Submissions a day",
        """SELECT cluster, CAST(hour AS DATE) AS day, sum(n)::BIGINT AS jobs, sum(n_gpu)::BIGINT AS gpu_jobs
        FROM c_submit GROUP BY ALL ORDER BY 1, 2""",
    )


def burstiness(store: Store) -> Result:
    """How uneven the hours are: variance over mean of the hourly counts (1 for independent arrivals), peak over mean."""
    return store.result(
        "burstiness",
        "Unevenness of arrivals",
        """WITH span AS (SELECT cluster, min(hour) AS a, max(hour) AS b FROM c_submit GROUP BY 1),
            hours AS (SELECT cluster, unnest(generate_series(a, b, INTERVAL 1 HOUR)) AS hour FROM span),
            c AS (SELECT h.cluster, coalesce(s.n, 0) AS n FROM hours h LEFT JOIN c_submit s
                ON h.cluster IS NOT DISTINCT FROM s.cluster AND h.hour = s.hour)
        SELECT cluster, count(*)::BIGINT AS hours, avg(n) AS mean_per_hour, max(n)::BIGINT AS peak_per_hour,
            max(n) / nullif(avg(n), 0) AS peak_over_mean, var_pop(n) / nullif(avg(n), 0) AS index_of_dispersion
        FROM c GROUP BY cluster ORDER BY 1""",
    )


def busy(store: Store) -> Result:
    """GPUs held, mean of each hour (of each day above 100 days): exact, from the starts and ends within each hour."""
    hourly = """
        WITH e AS (
            SELECT cluster, h, sum(g) AS g, sum(gs) AS gs FROM (
                SELECT cluster, h, g, gs FROM c_start UNION ALL SELECT cluster, h, -g, -gs FROM c_end) GROUP BY ALL),
        span AS (SELECT cluster, min(h) AS a, max(h) AS b FROM e GROUP BY 1),
        hours AS (SELECT cluster, unnest(range(a::BIGINT, b::BIGINT + 1)) AS h FROM span)
        SELECT hours.cluster, hours.h,
            coalesce(sum(e.g) OVER (PARTITION BY hours.cluster ORDER BY hours.h ROWS BETWEEN UNBOUNDED PRECEDING AND
                1 PRECEDING), 0) + coalesce(e.g, 0) - coalesce(e.gs, 0) / 3600.0 AS gpus
        FROM hours LEFT JOIN e ON hours.cluster IS NOT DISTINCT FROM e.cluster AND hours.h = e.h"""
    span = store.one(f"SELECT max(h) - min(h) FROM ({hourly})")[0] or 0
    step = 24 if span > 2400 else 1
    return store.result(
        "busy",
        "GPUs held over time",
        f"""SELECT cluster, make_timestamp((h - h % {step}) * 3600000000) AS time_utc,
            avg(gpus) AS gpus FROM ({hourly}) GROUP BY ALL ORDER BY 1, 2""",
        "Mean of each day." if step == 24 else "Mean of each hour.",
    )
