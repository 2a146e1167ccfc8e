"""Many clusters (virtual clusters, often dozens): each on its own in one table, the largest and the rest elsewhere.

A report compares clusters by colour and in sentences, which a reader can follow for a handful. `fold` keeps the
largest by GPU time as they are and lets the rest count as one; the table `clusters` and the curves of
`cluster_run_cdf` are made before, of each.
"""

from __future__ import annotations

from dataclasses import replace

from ...samples.tables import Findings, Note, Result
from ..store import Store, literal, name

MANY = 6
"""More clusters than this are folded: as many colours can be told apart."""
KEPT = 4
CURVES = 12
POINTS = (1, 2, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70, 75, 80, 85, 90, 95, 98, 99, 100)


def count(store: Store) -> int:
    """How many clusters the jobs are of."""
    return int(store.one("SELECT count(DISTINCT cluster) FROM jobs")[0]) if store.has("jobs") else 0


def each(store: Store) -> list[Result]:
    """One row a cluster, largest GPU time first; and the durations' curve of the largest and of all."""
    table = store.result(
        "clusters",
        "Clusters, largest first",
        """SELECT cluster, count(*) AS jobs, count(*) FILTER (gpu_num > 0) AS gpu_jobs,
            sum(gpu_num * duration_s) / 3600 AS gpu_h,
            100.0 * sum(gpu_num * duration_s) / nullif(sum(sum(gpu_num * duration_s)) OVER (), 0) AS gpu_time_pct,
            quantile_disc(duration_s, 0.5) FILTER (gpu_num > 0) AS median_run_s,
            avg(queue_s) FILTER (gpu_num > 0) AS mean_queue_s,
            100.0 * count(*) FILTER (gpu_num > 0 AND state = 'FAILED')
                / nullif(count(*) FILTER (gpu_num > 0 AND state IN ('COMPLETED', 'CANCELLED', 'FAILED')), 0) AS failed_pct,
            count(DISTINCT "user") AS users
        FROM jobs GROUP BY cluster ORDER BY gpu_h DESC NULLS LAST, jobs DESC, cluster""",
    )
    shares = ", ".join(f"{p / 100}" for p in POINTS)
    names = ", ".join(literal(str(c)) for c in table.column("cluster")[:CURVES])
    curve = f"SELECT {{}} AS cluster, quantile_disc(duration_s, [{shares}]) AS q FROM jobs WHERE gpu_num > 0 AND duration_s > 0"
    rows = store.query(
        f"{curve.format('cluster')} AND cluster IN ({names or 'NULL'}) GROUP BY cluster UNION ALL {curve.format('NULL')}"
    )
    order = {str(c): i for i, c in enumerate(table.column("cluster"))}
    points = [
        (cluster, float(x), float(p))
        for cluster, q in sorted(rows, key=lambda r: order.get(str(r[0]), len(order)))
        if q
        for p, x in zip(POINTS, q, strict=True)
    ]
    return [
        table,
        Result("cluster_run_cdf", "Duration of GPU jobs by cluster", ("cluster", "x_s", "cdf_pct"), tuple(points),
               "cluster NULL: all of them together"),
    ]  # fmt: skip


def fold(store: Store, clusters: Result) -> None:
    """Lets all but the largest clusters count as one, in every table of the store."""
    kept = [str(c) for c in clusters.column("cluster") if c is not None][:KEPT]
    rest = len(clusters.rows) - len(kept)
    whole = ", ".join(literal(c) for c in kept)
    shown = f"CASE WHEN cluster IN ({whole}) THEN cluster ELSE {literal(f'{rest} others')} END"
    for table in ("jobs", "nodes", "samples", "incidents"):
        parts = store.parts[table]
        folded = []
        for part in parts:
            view = store.fresh(f"{table}_folded")
            store.con.execute(
                f"CREATE VIEW {view} AS SELECT * REPLACE ({shown} AS cluster) FROM {name(part)}"
            )
            folded.append(view)
        parts[:] = folded
    store.con.execute(f"UPDATE counted SET cluster = {shown}")
    store.con.execute(f"UPDATE moments SET cluster = {shown}")
    store.build_views()
    store.note(
        Note(
            "info",
            f"{len(clusters.rows)} clusters: the {len(kept)} with the most GPU time are shown one by one, the other {rest} together; the table of clusters has each",
        )
    )


def largest_first(found: Findings, clusters: Result) -> None:
    """Orders the rows of every table as the clusters are: by GPU time, those that were folded last."""
    place = {c: i for i, c in enumerate(clusters.column("cluster")[:KEPT])}
    for key, result in list(found.results.items()):
        if "cluster" in result.columns:
            at = result.columns.index("cluster")
            rows = tuple(sorted(result.rows, key=lambda r: place.get(r[at], KEPT)))
            found.results[key] = replace(result, rows=rows)
