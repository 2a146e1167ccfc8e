"""Many clusters: one table, largest first, and a small curve of each of the largest against all together."""

from __future__ import annotations

from collections.abc import Sequence

from ...page.charts.scales import amount, seconds
from ...page.charts.spec import Chart, Figure, LineChart, Series
from ...samples.tables import Findings
from ..settings import ReportSettings
from .colors import GREY, color_of
from .parts import grid, points, whole
from .reference import Reference
from .sentences import hours, pct

SHOWN = 60


def clusters(found: Findings, references: Sequence[Reference], settings: ReportSettings) -> Figure | None:
    """The table of clusters and small multiples; None where there are few (Table 2 then compares them)."""
    table, curves = found.get("clusters"), found.get("cluster_run_cdf")
    if not table:
        return None
    rows = list(table.dicts())
    total = sum(r["gpu_h"] or 0 for r in rows)
    half, sofar = 0, 0.0
    for r in rows:
        if sofar >= total / 2:
            break
        sofar += r["gpu_h"] or 0
        half += 1
    first = rows[0]
    say = (
        f"{len(rows)} clusters with {sum(r['jobs'] for r in rows):,} jobs and {hours(total)}; the {half} largest hold half of the "
        f"GPU time, {first['cluster']} alone {pct(first['gpu_time_pct'])}."
    )
    everybody = Series("all", points(curves, "x_s", "cdf_pct", cluster=None), GREY, "4 3")
    spans = [x for x, _ in everybody.points]
    panels: list[Chart] = []
    for c in [c for c in curves.distinct("cluster") if c is not None]:
        row = next(r for r in rows if r["cluster"] == c)
        own = Series(str(c), points(curves, "x_s", "cdf_pct", cluster=c), color_of(""))
        panels.append(
            LineChart(f"{c}: {amount(row['gpu_h'], 0)} GPU hours", "duration", "share of GPU jobs, %", (own, everybody), "log",
                      (max(1.0, min(spans)), max(spans)), (0, 100), "seconds", legend=False)
        )  # fmt: skip
    columns = (
        ("cluster", "Cluster", None), ("jobs", "Jobs", whole), ("gpu_h", "GPU hours", whole), ("gpu_time_pct", "of all", pct),
        ("median_run_s", "Median duration", seconds), ("mean_queue_s", "Mean queue", seconds), ("failed_pct", "Failed", pct), ("users", "Users", whole),
    )  # fmt: skip
    return Figure(
        "clusters", "Clusters", "Clusters, largest first", say, tuple(panels), (grid(table, columns, SHOWN),),
        ("clusters", "cluster_run_cdf"), "Durations of the largest: blue the cluster, grey and dashed all together." if panels else "",
        table_first=True,
    )  # fmt: skip
