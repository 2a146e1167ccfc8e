"""Who uses the cluster: users, teams, accounts per team and week."""

from __future__ import annotations

from collections.abc import Iterator

from ...samples.tables import Result
from ..settings import ReportSettings
from ..store import Store


def results(store: Store, settings: ReportSettings) -> Iterator[Result]:
    """All of this file."""
    yield by_user(store, settings)
    yield concentration(store)
    yield by_team(store, settings)
    yield accounts(store)


def by_user(store: Store, settings: ReportSettings) -> Result:
    """The users that took most GPU time."""
    return store.result(
        "by_user",
        "Users by GPU time",
        f"""SELECT cluster, "user", n::BIGINT AS gpu_jobs, gpu_s / 3600 AS gpu_h,
            100.0 * gpu_s / nullif(sum(gpu_s) OVER (PARTITION BY cluster), 0) AS gpu_time_pct,
            100.0 * n_failed / n AS failed_pct, 100.0 * coalesce(cancelled_gpu_s, 0) / nullif(gpu_s, 0) AS cancelled_pct,
            wait_s / nullif(n_wait, 0) AS mean_queue_s
        FROM c_user QUALIFY row_number() OVER (PARTITION BY cluster ORDER BY gpu_s DESC, "user") <= {settings.top_users}
        ORDER BY cluster, gpu_h DESC""",
    )


def concentration(store: Store) -> Result:
    """Share of GPU time and of jobs that the first x percent of users (by GPU time) have."""
    return store.result(
        "user_concentration",
        "How few users take how much",
        """WITH r AS (SELECT cluster, gpu_s, n, row_number() OVER (PARTITION BY cluster ORDER BY gpu_s DESC) AS rank,
                count(*) OVER (PARTITION BY cluster) AS users, sum(gpu_s) OVER (PARTITION BY cluster) AS all_s,
                sum(n) OVER (PARTITION BY cluster) AS all_n FROM c_user),
            c AS (SELECT *, sum(gpu_s) OVER w / nullif(all_s, 0) AS t, sum(n) OVER w / all_n AS j FROM r
                WINDOW w AS (PARTITION BY cluster ORDER BY rank ROWS UNBOUNDED PRECEDING))
        SELECT cluster, round(100.0 * rank / users)::INTEGER AS users_pct, max(100 * t) AS gpu_time_pct,
            max(100 * j) AS jobs_pct, any_value(users)::BIGINT AS users
        FROM c GROUP BY ALL ORDER BY 1, 2""",
    )


def by_team(store: Store, settings: ReportSettings) -> Result:
    """The teams that took most GPU time."""
    return store.result(
        "by_team",
        "Teams by GPU time",
        f"""SELECT cluster, team, sum(n)::BIGINT AS jobs, sum(gpu_s) / 3600 AS gpu_h,
            100.0 * sum(gpu_s) / nullif(sum(sum(gpu_s)) OVER (PARTITION BY cluster), 0) AS gpu_time_pct,
            sum(failed_gpu_s) / 3600 AS failed_gpu_h, sum(cancelled_gpu_s) / 3600 AS cancelled_gpu_h
        FROM c_team GROUP BY cluster, team
        QUALIFY row_number() OVER (PARTITION BY cluster ORDER BY sum(gpu_s) DESC, team) <= {settings.top_users}
        ORDER BY cluster, gpu_h DESC""",
    )


def accounts(store: Store) -> Result:
    """GPU hours per team and week (weeks from Monday, a job in the week of its start)."""
    return store.result(
        "accounts",
        "GPU hours per team and week",
        """SELECT cluster, week, team, n::BIGINT AS jobs, gpu_s / 3600 AS gpu_h,
            coalesce(failed_gpu_s, 0) / 3600 AS failed_gpu_h, coalesce(cancelled_gpu_s, 0) / 3600 AS cancelled_gpu_h
        FROM c_team ORDER BY cluster, week, gpu_h DESC, team""",
    )
