"""Who uses the cluster and who waits."""

from __future__ import annotations

from collections.abc import Sequence

from ...page.charts.scales import amount, seconds
from ...page.charts.spec import Bars, Chart, Figure, LineChart, Series
from ...page.palette import LIGHT
from ...samples.tables import Findings
from ..settings import ReportSettings
from .colors import color_of
from .parts import grid, one, points, weighted_first, whole
from .reference import Reference
from .sentences import pct
from .workloads import day_seconds


def fairness(found: Findings, references: Sequence[Reference], settings: ReportSettings) -> Figure | None:
    """Queue time by size."""
    table = found.get("fairness")
    if not table:
        return None
    panels: list[Chart] = []
    for c in table.distinct("cluster"):
        rows = list(table.where(cluster=c).dicts())
        panels.append(
            Bars(
                f"{c}: queue time by size",
                "seconds",
                tuple(f"{r['size']:g}" for r in rows),
                (
                    ("mean", LIGHT["blue"], tuple(float(r["mean_s"]) if r["mean_s"] else None for r in rows)),
                    (
                        "nine in ten wait at most",
                        LIGHT["sky"],
                        tuple(float(r["p90_s"]) if r["p90_s"] else None for r in rows),
                    ),
                ),
                log=True,
                unit="s",
            )
        )
    many = [r for r in table.dicts() if r["jobs"] >= 20] or list(table.dicts())
    most, least = max(many, key=lambda r: r["mean_s"]), min(many, key=lambda r: r["mean_s"])
    say = (
        f"Jobs of {most['size']:g} GPUs wait longest ({seconds(most['mean_s'])} on average), jobs of {least['size']:g} GPUs least "
        f"({seconds(least['mean_s'])})."
    )
    if most["size"] == least["size"]:
        say = f"Jobs of {most['size']:g} GPUs wait {seconds(most['mean_s'])} on average."
    elif most["size"] < least["size"]:
        say += " Asking for less does not mean waiting less here."
    return Figure(
        "fairness",
        "Queueing",
        "Is queueing fair to sizes",
        say,
        tuple(panels),
        (),
        ("fairness",),
        table.remark,
    )


def users(found: Findings, references: Sequence[Reference], settings: ReportSettings) -> Figure | None:
    """Users and how concentrated the use is."""
    table, few = found.get("by_user"), found.get("user_concentration")
    if not table or not sum(table.column("gpu_h")):
        return None
    lines: list[Series] = []
    for i, c in enumerate(few.distinct("cluster")):
        lines.append(
            Series(
                f"{c}: GPU time",
                ((0.0, 0.0), *points(few, "users_pct", "gpu_time_pct", cluster=c)),
                color_of("", i),
            )
        )
        lines.append(
            Series(
                f"{c}: jobs",
                ((0.0, 0.0), *points(few, "users_pct", "jobs_pct", cluster=c)),
                color_of("", i),
                "6 4",
            )
        )
    panels: list[Chart] = [
        LineChart(
            "Share of the first users",
            "users, % (by GPU time)",
            "share, %",
            tuple(lines),
            "linear",
            (0, 100),
            (0, 100),
        )
    ]
    top = list(table.dicts())[:10]
    panels.append(
        Bars(
            "The ten largest users",
            "GPU hours",
            tuple(str(r["user"]) for r in top),
            (("GPU hours", LIGHT["blue"], tuple(float(r["gpu_h"]) for r in top)),),
            horizontal=True,
            digits=0,
            legend=False,
        )
    )
    first = few.where(cluster=few.rows[0][0])
    five = [r for r in first.dicts() if r["users_pct"] <= 5]
    best = five[-1] if five else next(first.dicts())
    say = f"Of {best['users']:,} users the first {max(best['users_pct'], 1)} % take {pct(best['gpu_time_pct'])} of the GPU time."
    cells = grid(
        table,
        (
            ("cluster", "cluster", None),
            ("user", "user", None),
            ("gpu_jobs", "GPU jobs", whole),
            ("gpu_h", "GPU hours", whole),
            ("gpu_time_pct", "GPU time, %", one),
            ("failed_pct", "jobs failed, %", one),
            ("cancelled_pct", "GPU time cancelled, %", one),
            ("mean_queue_s", "mean queue", seconds),
        ),
        20,
    )
    return Figure(
        "users", "Users", "Users by GPU time", say, tuple(panels), (cells,), ("by_user", "user_concentration")
    )


def teams(found: Findings, references: Sequence[Reference], settings: ReportSettings) -> Figure | None:
    """Teams and accounts per week."""
    table, weeks = found.get("by_team"), found.get("accounts")
    if not table or not sum(table.column("gpu_h")):
        return None
    panels: list[Chart] = []
    for c in table.distinct("cluster"):
        part, own = table.where(cluster=c), weeks.where(cluster=c)
        first = part.column("team")[:6]
        days = sorted(set(own.column("week")))
        lines = []
        for i, team in enumerate(first):
            hours = {r["week"]: float(r["gpu_h"]) for r in own.where(team=team).dicts()}
            lines.append(
                Series(str(team), tuple((day_seconds(d), hours.get(d, 0.0)) for d in days), color_of("", i))
            )
        panels.append(
            LineChart(f"{c}: GPU hours a week", "week", "GPU hours", tuple(lines), "time", None, None, "time")
        )
    top = weighted_first(table.dicts(), "gpu_h")
    say = (
        f"{top['team']} takes most GPU time ({pct(top['gpu_time_pct'])}, {amount(top['gpu_h'], 0)} GPU hours, "
        f"{amount(100 * (top['cancelled_gpu_h'] or 0) / top['gpu_h'])} % of it in cancelled jobs)."
        if top and top["gpu_h"]
        else ""
    )
    cells = grid(
        table,
        (
            ("cluster", "cluster", None),
            ("team", "team", None),
            ("jobs", "jobs", whole),
            ("gpu_h", "GPU hours", whole),
            ("gpu_time_pct", "GPU time, %", one),
            ("failed_gpu_h", "failed, GPU h", whole),
            ("cancelled_gpu_h", "cancelled, GPU h", whole),
        ),
        20,
    )
    return Figure("teams", "Accounts", "Teams, and their weeks", say, tuple(panels), (cells,), ("by_team", "accounts"),
                  "GPU hours of every team and week are in the JSON (`accounts`).")  # fmt: skip
