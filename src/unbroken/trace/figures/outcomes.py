"""How it ends: final states, cancelled GPU time, failures, time to failure, MTTF and ETTR."""

from __future__ import annotations

from collections.abc import Sequence

from ...page.charts.scales import amount, seconds
from ...page.charts.spec import Bars, Chart, Figure, LineChart, Series
from ...page.palette import LIGHT
from ...samples.tables import Findings
from ..settings import ReportSettings
from .colors import STATE_COLORS, color_of
from .parts import grid, one, points, two, whole
from .reference import Reference
from .sentences import hours, join_words, pct, together
from .workloads import order_types, sentence_case

STATES = ("COMPLETED", "CANCELLED", "FAILED")


def states(found: Findings, references: Sequence[Reference], settings: ReportSettings) -> Figure | None:
    """Figure 17."""
    table = found.get("by_state")
    if not table:
        return None
    rows = [(str(c), table.where(cluster=c)) for c in table.distinct("cluster")]
    own = len(rows)
    for r in references:
        if other := r.findings.get("by_state"):
            rows.append((f"{r.label} (published)" if r.fitted else r.label, other))
    panels: list[Chart] = []
    for title, value in (("(a) Jobs", "jobs_pct"), ("(b) GPU time", "gpu_time_pct")):
        groups = tuple(
            (
                s.capitalize(),
                STATE_COLORS[s],
                tuple(
                    next((float(x[value] or 0) for x in part.dicts() if x["state"] == s), 0.0)
                    for _, part in rows
                ),
            )
            for s in STATES
        )
        panels.append(
            Bars(
                title, "share, %", tuple(n for n, _ in rows), groups, stacked=True, horizontal=True, unit="%"
            )
        )
    detail = found.get("by_type_and_state")
    for c in detail.distinct("cluster"):
        part = detail.where(cluster=c)
        kinds = order_types(part.distinct("type"))
        groups = tuple(
            (
                s.capitalize(),
                STATE_COLORS[s],
                tuple(
                    next(
                        (
                            float(x["gpu_time_pct"] or 0)
                            for x in part.dicts()
                            if x["type"] == k and x["state"] == s
                        ),
                        0.0,
                    )
                    for k in kinds
                ),
            )
            for s in STATES
        )
        panels.append(
            Bars(
                f"(c) GPU time of each type, {c}",
                "share, %",
                tuple(kinds),
                groups,
                stacked=True,
                horizontal=True,
                unit="%",
            )
        )
    parts = []
    for label, part in rows[:own]:
        share = {r["state"]: r for r in part.dicts()}
        if "CANCELLED" in share and "FAILED" in share:
            parts.append(
                f"in {label} {pct(share['FAILED']['jobs_pct'])} of the GPU jobs fail with {pct(share['FAILED']['gpu_time_pct'])} of "
                f"the GPU time, and the {pct(share['CANCELLED']['jobs_pct'])} that are cancelled hold "
                f"{pct(share['CANCELLED']['gpu_time_pct'])}"
            )
        else:
            parts.append(
                f"in {label} " + join_words([f"{pct(r['jobs_pct'])} {s.lower()}" for s, r in share.items()])
            )
    return Figure(
        "states",
        "Figure 17",
        "Final states",
        sentence_case(together(parts)) + ".",
        tuple(panels),
        (),
        ("by_state", "by_type_and_state"),
        table.remark,
    )


def cancelled(found: Findings, references: Sequence[Reference], settings: ReportSettings) -> Figure | None:
    """Cancelled GPU time: idle tail and worked."""
    table = found.get("cancelled")
    if not table or not sum(table.column("gpu_h")):
        return None
    known = sum(table.column("known"))
    total, tail = sum(table.column("gpu_h")), sum(table.column("idle_tail_gpu_h"))
    panels: list[Chart] = []
    if known:
        for c in table.distinct("cluster"):
            part = table.where(cluster=c)
            rows = {r["type"]: r for r in part.dicts()}
            kinds = order_types(list(rows))
            panels.append(
                Bars(
                    f"{c}: GPU hours of cancelled jobs",
                    "GPU hours",
                    tuple(kinds),
                    (
                        (
                            "at work until stopped by hand",
                            LIGHT["amber"],
                            tuple(float(rows[k]["worked_gpu_h"]) for k in kinds),
                        ),
                        (
                            "idle tail: stalled",
                            LIGHT["bronze"],
                            tuple(float(rows[k]["idle_tail_gpu_h"]) for k in kinds),
                        ),
                    ),
                    stacked=True,
                    horizontal=True,
                    digits=0,
                )
            )
        say = (
            f"Cancelled jobs hold {hours(total)}; {hours(tail)} of them ({pct(100 * tail / total if total else 0)}) passed after the "
            f"job had stalled and before somebody looked, in {sum(table.column('stalled_jobs')):,} jobs."
        )
    else:
        say = f"Cancelled jobs hold {hours(total)}; how much of it was idle cannot be told without stop times or samples."
    cells = grid(
        table,
        (
            ("cluster", "cluster", None),
            ("type", "type", None),
            ("jobs", "jobs", whole),
            ("gpu_h", "GPU hours", whole),
            ("stalled_jobs", "stalled", whole),
            ("idle_tail_gpu_h", "idle tail, GPU h", whole),
            ("known", "end of work known", whole),
        ),
    )
    return Figure(
        "cancelled", "Cancelled", "What cancelled jobs spent", say, tuple(panels), (cells,), ("cancelled",)
    )


def failures(found: Findings, references: Sequence[Reference], settings: ReportSettings) -> Figure | None:
    """Table 3."""
    table = found.get("failures")
    published = next((r.findings.get("failures") for r in references if r.findings.get("failures")), None)
    if not table:
        return failures_by_exit(found)
    columns = [
        ("category", "category", None),
        ("reason", "reason", None),
        ("count", "number", whole),
        ("mean_gpus", "mean GPUs", one),
        ("mean_min_to_failure", "mean min to failure", one),
        ("median_min_to_failure", "median", one),
        ("gpu_time_pct", "GPU time, %", two),
    ]
    cells = grid(table, columns, 60)
    if published:
        lookup = {r["reason"]: r for r in published.dicts()}
        extra = []
        for row, r in zip(cells.rows, table.dicts(), strict=False):
            p = lookup.get(r["reason"])
            extra.append(
                (
                    *row,
                    *(
                        (whole(p["count"]), one(p["mean_min_to_failure"]), two(p["gpu_time_pct"]))
                        if p
                        else ("–", "–", "–")
                    ),
                )
            )
        cells = type(cells)(
            (*cells.header, "number, published", "min, published", "GPU time %, published"),
            tuple(extra),
            (*cells.numeric, True, True, True),
            cells.caption,
        )
    rows = list(table.dicts())
    known = [r for r in rows if r["gpu_time_pct"] is not None]
    panels: list[Chart] = []
    if known:
        top = sorted(known, key=lambda r: -r["gpu_time_pct"])[:12]
        values: list[tuple[str, tuple[float | None, ...]]] = []
        if published:
            shares = {r["reason"]: r["gpu_time_pct"] for r in published.dicts()}
            values = [("published", tuple(shares.get(r["reason"]) for r in top))]
        panels.append(
            Bars(
                "Share of the failed GPU time",
                "%",
                tuple(r["reason"] for r in top),
                (("this trace", LIGHT["red"], tuple(float(r["gpu_time_pct"]) for r in top)),),
                horizontal=True,
                unit="%",
                published=tuple(values),
            )
        )
    infra = [r for r in rows if r["category"] == "Infrastructure"]
    n = sum(r["count"] for r in rows)
    share = sum(r["gpu_time_pct"] or 0 for r in infra)
    first = max(rows, key=lambda r: r["gpu_time_pct"] or 0)
    say = f"{n:,} failures of {len(rows)} reasons"
    if infra and known:
        say += (
            f": infrastructure is {pct(100 * sum(r['count'] for r in infra) / n)} of them and {pct(share)} of the GPU time that failed; "
            f"{first['reason']} costs most ({pct(first['gpu_time_pct'])})"
        )
    return Figure(
        "failures",
        "Table 3",
        "Failures by reason",
        say + ".",
        tuple(panels),
        (cells,),
        ("failures",),
        table.remark,
    )


def failures_by_exit(found: Findings) -> Figure | None:
    """Table 3 from exit states, where there are no incidents."""
    table = found.get("failures_by_exit")
    if not table:
        return None
    cells = grid(
        table,
        (
            ("cluster", "cluster", None),
            ("reason", "how it ended", None),
            ("count", "number", whole),
            ("mean_gpus", "mean GPUs", one),
            ("mean_min_to_failure", "mean min to failure", one),
            ("gpu_h", "GPU hours", whole),
            ("gpu_time_pct", "GPU time, %", two),
        ),
    )
    first = next(table.dicts())
    n = sum(table.column("count"))
    how = "how most ended is not said" if first["reason"] == "not said" else f"most by {first['reason']}"
    say = (
        f"{n:,} GPU job{'s' if n > 1 else ''} failed, {how} ({first['count']:,}, after {amount(first['mean_min_to_failure'])} min on "
        "average). Exit states say how a job ended, not why: give incidents of `unbroken diagnose` for reasons."
    )
    return Figure("failures", "Table 3", "Failures by exit state", say, (), (cells,), ("failures_by_exit",))


def to_failure(found: Findings, references: Sequence[Reference], settings: ReportSettings) -> Figure | None:
    """Time to failure of failed jobs."""
    table = found.get("failure_cdf")
    if not table or "GPU jobs" not in table.column("type"):
        return None
    panels: list[Chart] = []
    for c in table.where(type="GPU jobs").distinct("cluster"):
        part = table.where(cluster=c)
        kinds = [*order_types(part.distinct("type"))]
        lines = tuple(Series(k, points(part, "x_s", "cdf_pct", type=k), color_of(k)) for k in kinds)
        panels.append(
            LineChart(
                f"{c}: time to failure",
                "from start to failure",
                "share of failed jobs, %",
                lines,
                "log",
                None,
                (0, 100),
                "seconds",
                ((3600.0, "1 h"), (86400.0, "1 d")),
            )
        )
    row = next(found.get("failure_quantiles").where(type="GPU jobs").dicts())
    pts = points(table.where(type="GPU jobs"), "x_s", "cdf_pct", cluster=row["cluster"])
    late = 100 - max((y for x, y in pts if x <= 3600), default=0.0)
    many = len(table.where(type="GPU jobs").distinct("cluster")) > 1
    say = (
        f"Half of the failed GPU jobs{' of ' + str(row['cluster']) if many else ''} fail within {seconds(row['p50'])}; "
        f"{pct(late) if late > 0.01 else 'none'} fail{'' if late > 0.01 else 's'} after more than an hour."
    )
    return Figure(
        "to_failure",
        "Time to failure",
        "How long until a job fails",
        say,
        tuple(panels),
        (),
        ("failure_cdf",),
    )


def mttf(found: Findings, references: Sequence[Reference], settings: ReportSettings) -> Figure | None:
    """MTTF and the expected ETTR by size."""
    table = found.get("mttf_by_size")
    if not table:
        return None
    rows = [r for r in table.dicts() if r["mttf_h"]]
    if not rows:
        return None
    lines = [Series("any failure", tuple((float(r["size"]), float(r["mttf_h"])) for r in rows), LIGHT["red"])]
    infra = tuple(
        (float(r["size"]), float(r["mttf_infrastructure_h"]))
        for r in table.dicts()
        if r["mttf_infrastructure_h"]
    )
    if infra:
        lines.append(Series("infrastructure", infra, LIGHT["blue"]))
    panels: list[Chart] = [
        Bars(
            "(a) Hours of run time per failure",
            "hours",
            tuple(f"{r['size']:g}" for r in rows),
            tuple(
                (s.label, s.color, tuple(dict(s.points).get(float(r["size"])) for r in rows)) for s in lines
            ),
            log=True,
            digits=1,
        ),
        Bars(
            "(b) Expected ETTR by size",
            "ETTR, %",
            tuple(f"{r['size']:g}" for r in rows),
            (
                (
                    "ETTR",
                    LIGHT["green"],
                    tuple(
                        None if r["ettr_expected"] is None else 100 * float(r["ettr_expected"]) for r in rows
                    ),
                ),
            ),
            unit="%",
            digits=1,
            legend=False,
        ),
    ]
    big = rows[-1]
    say = (
        f"Jobs of {big['size']:g} GPUs run {amount(big['mttf_h'])} h for each failure"
        + (
            f" ({amount(big['mttf_infrastructure_h'])} h for each of the infrastructure)"
            if big["mttf_infrastructure_h"]
            else ""
        )
        + (
            f", so that {pct(100 * big['ettr_expected'])} of their wall time would be effective."
            if big["ettr_expected"]
            else "."
        )
    )
    return Figure(
        "mttf",
        "MTTF and ETTR",
        "Time between failures, by number of GPUs",
        say,
        tuple(panels),
        (),
        ("mttf_by_size",),
        table.remark,
    )
