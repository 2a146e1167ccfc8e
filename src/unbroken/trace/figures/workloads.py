"""What runs: Table 2, Figures 2 to 6, arrivals, GPUs held."""

from __future__ import annotations

import calendar
from collections.abc import Iterator, Sequence

from ...page.charts.scales import amount, seconds
from ...page.charts.spec import Bars, Box, Boxes, Chart, Figure, Grid, Heat, LineChart, Series
from ...samples.tables import Findings, Result
from ..settings import ReportSettings
from .colors import color_of
from .parts import points, reference_series, two, weighted_first, whole
from .reference import Reference
from .sentences import hours, join_words, pct, together

ORDER = ("Pretrain", "Eval", "SFT", "MLLM", "Debug", "Other")
DAYS_MARKED = ((3600.0, "1 h"), (86400.0, "1 d"))


def order_types(types: Sequence[str]) -> list[str]:
    """The study's order, then the rest; CPU and the sum left out."""
    known = [t for t in ORDER if t in types]
    return known + sorted(
        t for t in types if t not in ORDER and t not in ("CPU", "GPU jobs") and t is not None
    )


def summary(found: Findings, references: Sequence[Reference], settings: ReportSettings) -> Figure | None:
    """Table 2."""
    table = found.get("summary")
    if not table:
        return None
    names = [str(c) for c in table.column("cluster")]
    columns = [dict(r) for r in table.dicts()]
    labels = list(names)
    for r in references:
        other = r.findings.get("summary")
        for row in other.dicts() if other else ():
            columns.append(dict(row))
            labels.append(f"{r.label} (published)" if r.fitted else f"{r.label}")
    lines: list[tuple[str, ...]] = []
    for title, key, how in (
        ("Jobs", "jobs", whole),
        ("GPU jobs", "gpu_jobs", whole),
        ("CPU jobs", "cpu_jobs", whole),
        ("Days", "days", two),
        ("GPU hours", "gpu_h", whole),
        ("Mean GPUs of a job", "mean_gpus", two),
        ("Median GPUs", "median_gpus", two),
        ("Most GPUs", "max_gpus", whole),
        ("Mean duration", "mean_run_s", seconds),
        ("Median duration", "median_run_s", seconds),
        ("Mean queue time", "mean_queue_s", seconds),
        ("Median queue time", "median_queue_s", seconds),
    ):
        values = [c.get(key) for c in columns]
        if any(v is not None for v in values):
            lines.append((title, *(how(v) for v in values)))
    first = columns[0]
    if not first["gpu_jobs"]:
        say = f"{first['jobs']:,} jobs, none of which is known to hold a GPU."
    else:
        say = (
            f"{join_words(names)}: {sum(c['jobs'] for c in columns[: len(names)]):,} jobs over "
            f"{seconds(86400 * max((c['days'] or 0) for c in columns[: len(names)]))}; the median GPU job"
            f"{' of ' + names[0] if len(names) > 1 else ''} runs "
            f"{seconds(first['median_run_s'])} on {amount(first['median_gpus'])} GPU"
            f"{'s' if (first['median_gpus'] or 0) > 1 else ''} and the mean one {seconds(first['mean_run_s'])} on "
            f"{amount(first['mean_gpus'])}."
        )
    grid = Grid(("", *labels), tuple(lines), (False, *(True for _ in labels)))
    return Figure("summary", "Table 2", "The trace in numbers", say, (), (grid,), ("summary",))


def durations_and_use(
    found: Findings, references: Sequence[Reference], settings: ReportSettings
) -> Figure | None:
    """Figure 2."""
    curve = found.get("run_cdf")
    if not curve or "GPU jobs" not in curve.column("type"):
        return None
    panels: list[Chart] = []
    series = [
        Series(str(c), points(curve, "x_s", "cdf_pct", cluster=c, type="GPU jobs"), color_of("", i))
        for i, c in enumerate(curve.where(type="GPU jobs").distinct("cluster"))
    ]
    series += reference_series(references, "run_cdf", "x_s", "cdf_pct", type="GPU jobs")
    panels.append(
        LineChart(
            "(a) Duration of GPU jobs",
            "duration",
            "share of jobs, %",
            tuple(series),
            "log",
            None,
            (0, 100),
            "seconds",
            DAYS_MARKED,
        )
    )
    used = found.get("utilisation_cdf")
    if used and "gpu_util_pct" in used.column("metric"):
        lines = [
            Series(str(c), points(used, "x", "cdf_pct", cluster=c, metric="gpu_util_pct"), color_of("", i))
            for i, c in enumerate(used.where(metric="gpu_util_pct").distinct("cluster"))
        ]
        lines += reference_series(references, "utilisation_cdf", "x", "cdf_pct", metric="gpu_util_pct")
        panels.append(
            LineChart(
                "(b) GPU busy",
                "GPU busy, %",
                "share of readings, %",
                tuple(lines),
                "linear",
                (0, 100),
                (0, 100),
            )
        )
    quart = found.get("run_quantiles").where(type="GPU jobs")
    rows = list(quart.dicts())
    parts = []
    for r in rows:
        where = f"in {r['cluster']} " if len(rows) > 1 else ""
        parts.append(
            f"{where}half of the GPU jobs end within {seconds(r['p50'])} and nine in ten within {seconds(r['p90'])}, while the mean "
            f"is {seconds(r['mean'])}"
        )
    say = sentence_case(together(parts)) + "." if parts else ""
    medians = [
        (r.label, next(r.findings.get("summary").dicts())["median_run_s"])
        for r in references
        if r.findings.get("summary") and r.fitted
    ]
    if say and medians:
        say += " Published medians: " + join_words([f"{seconds(m)} in {n}" for n, m in medians]) + "."
    return Figure(
        "duration",
        "Figure 2",
        "Job duration and GPU utilisation",
        say,
        tuple(panels),
        (),
        ("run_cdf", "run_quantiles"),
    )


def sizes(found: Findings, references: Sequence[Reference], settings: ReportSettings) -> Figure | None:
    """Figure 3."""
    curve, classes = found.get("size_cdf"), found.get("by_size")
    if not curve:
        return None
    panels = []
    for title, y, axis in (
        ("(a) Jobs by their number of GPUs", "jobs_pct", "share of jobs, %"),
        ("(b) GPU time by the number of GPUs", "gpu_time_pct", "share of GPU time, %"),
    ):
        series = [
            Series(str(c), points(curve, "gpus", y, cluster=c), color_of("", i), step=True)
            for i, c in enumerate(curve.distinct("cluster"))
        ]
        series += [
            Series(s.label, s.points, s.color, s.dash, step=True)
            for s in reference_series(references, "size_cdf", "gpus", y)
        ]
        panels.append(LineChart(title, "GPUs", axis, tuple(series), "log", None, (0, 100)))
    parts = []
    for c in classes.distinct("cluster"):
        rows = list(classes.where(cluster=c).dicts())
        one = sum(r["jobs_pct"] for r in rows if r["size"] <= 1)
        single = f"{pct(one)} of the jobs hold" if one else "no job holds"
        large = [r for r in rows if r["size"] >= 256]
        if large:
            parts.append(
                f"in {c} {single} one GPU or less, and the {pct(sum(r['jobs_pct'] for r in large))} that hold "
                f"more than 128 take {pct(sum(r['gpu_time_pct'] or 0 for r in large))} of the GPU time"
            )
        else:
            top = weighted_first(rows, "gpu_time_pct")
            low = (top["size"] / 2 if top else 0) + 1
            span = (
                f"{low:.0f} to {top['size']:g}"
                if top and low < top["size"]
                else f"{top['size']:g}"
                if top
                else "unknown"
            )
            parts.append(
                f"in {c} {single} one GPU or less; jobs of {span} GPUs take the largest part of the GPU time, "
                f"{pct(top['gpu_time_pct'] if top else None)}"
            )
    return Figure(
        "sizes",
        "Figure 3",
        "Jobs and GPU time by size",
        sentence_case(together(parts)) + ".",
        tuple(panels),
        (),
        ("size_cdf", "by_size"),
    )


def types(found: Findings, references: Sequence[Reference], settings: ReportSettings) -> Figure | None:
    """Figure 4: stacked bars in place of the study's tree maps, so that clusters can be compared."""
    table = found.get("by_type")
    if not table:
        return None
    rows: list[tuple[str, Result]] = [(str(c), table.where(cluster=c)) for c in table.distinct("cluster")]
    for r in references:
        if other := r.findings.get("by_type"):
            rows.append((f"{r.label} (published)" if r.fitted else r.label, other))
    kinds = order_types(list(dict.fromkeys(t for _, part in rows for t in part.column("type"))))
    if kinds == ["Other"]:
        say = "No job says what it was for, and no name tells it: all count as Other (types of your own: --types)."
        return Figure("types", "Figure 4", "Workload types", say, (), (), ("by_type",))
    panels: list[Chart] = []
    for title, value in (("(a) Jobs", "jobs_pct"), ("(b) GPU time", "gpu_time_pct")):
        groups = tuple(
            (
                k,
                color_of(k),
                tuple(
                    next((float(x[value] or 0) for x in part.dicts() if x["type"] == k), 0.0)
                    for _, part in rows
                ),
            )
            for k in kinds
        )
        panels.append(
            Bars(
                title,
                "share, %",
                tuple(label for label, _ in rows),
                groups,
                stacked=True,
                horizontal=True,
                unit="%",
            )
        )
    parts = []
    for label, part in rows[: len(table.distinct("cluster"))]:
        most, heavy = weighted_first(part.dicts(), "jobs_pct"), weighted_first(part.dicts(), "gpu_time_pct")
        if most and heavy:
            parts.append(
                f"in {label} most jobs are {most['type']} ({pct(most['jobs_pct'])}) and most GPU time goes to {heavy['type']} "
                f"({pct(heavy['gpu_time_pct'])})"
            )
    return Figure(
        "types",
        "Figure 4",
        "Workload types",
        sentence_case(together(parts)) + ".",
        tuple(panels),
        (),
        ("by_type",),
    )


def demand(found: Findings, references: Sequence[Reference], settings: ReportSettings) -> Figure | None:
    """Figure 5."""
    table = found.get("demand")
    if not table:
        return None
    panels: list[Chart] = []
    for c in table.distinct("cluster"):
        part = table.where(cluster=c)
        boxes = []
        for kind in order_types(part.column("type")):
            r = next(x for x in part.dicts() if x["type"] == kind)
            boxes.append(box(kind, r, color_of(kind)))
            for ref in matching(references, str(c)):
                other = ref.findings.get("demand")
                row = next((x for x in other.dicts() if x["type"] == kind), None) if other else None
                if row:
                    boxes.append(
                        box(
                            f"{kind}, {ref.label}{' published' if ref.fitted else ''}",
                            row,
                            color_of(kind),
                            dashed=True,
                        )
                    )
        panels.append(Boxes(str(c), "GPUs", tuple(boxes)))
    top = weighted_first(table.dicts(), "median")
    low = min((r for r in table.dicts() if r["median"] is not None), key=lambda r: r["median"], default=None)
    say = ""
    if top and low:
        say = (
            f"The median {top['type']} job asks for {amount(top['median'])} GPUs (half of them between {amount(top['q1'])} and "
            f"{amount(top['q3'])})"
            + (
                f", the median {low['type']} job for {amount(low['median'])}."
                if low["type"] != top["type"]
                else "."
            )
        )
    return Figure("demand", "Figure 5", "GPUs asked for by type", say, tuple(panels), (), ("demand",),
                  "Boxes are quartiles with the median, whiskers reach 1.5 interquartile ranges as in the study.")  # fmt: skip


def box(label: str, r: dict[str, float], color: str, dashed: bool = False) -> Box:
    """A box from a row."""
    return Box(
        label,
        float(r["whisker_low"]),
        float(r["q1"]),
        float(r["median"]),
        float(r["q3"]),
        float(r["whisker_high"]),
        color,
        dashed,
    )


def matching(references: Sequence[Reference], cluster: str) -> list[Reference]:
    """The reference of the same name, if there is one, else all of them."""
    same = [r for r in references if r.label.lower() == cluster.lower()]
    return same or list(references)


def durations(found: Findings, references: Sequence[Reference], settings: ReportSettings) -> Figure | None:
    """Figure 6: all types in one panel; with a reference one small panel a type."""
    run, queue = found.get("run_cdf"), found.get("queue_cdf")
    if not run:
        return None
    panels: list[Chart] = []
    several = len(run.distinct("cluster")) > 2 and bool(references)
    if several:  # a panel a type and cluster would be sixty
        panels = list(_of_types(run, queue, references))
    for c in () if several else run.distinct("cluster"):
        for what, table, name in (("duration", run, "run_cdf"), ("queue time", queue, "queue_cdf")):
            if not table or c not in table.column("cluster"):
                continue
            part = table.where(cluster=c)
            kinds = order_types(part.distinct("type"))
            marks = DAYS_MARKED if what == "duration" else ()
            y_range = (0.0, 100.0)
            if not references:
                lines = tuple(Series(k, points(part, "x_s", "cdf_pct", type=k), color_of(k)) for k in kinds)
                panels.append(
                    LineChart(
                        f"{c}: {what}",
                        what,
                        "share of jobs, %",
                        lines,
                        "log",
                        None,
                        y_range,
                        "seconds",
                        marks,
                    )
                )
                continue
            for k in kinds:
                lines = (
                    Series(f"{c}", points(part, "x_s", "cdf_pct", type=k), color_of(k)),
                    *reference_series(matching(references, str(c)), name, "x_s", "cdf_pct", type=k),
                )
                panels.append(
                    LineChart(
                        f"{k}: {what}",
                        what,
                        "share of jobs, %",
                        lines,
                        "log",
                        None,
                        y_range,
                        "seconds",
                        marks,
                    )
                )
    waits = [r for r in found.get("queue_quantiles").dicts() if r["type"] not in ("CPU", "GPU jobs")]
    runs = [r for r in found.get("run_quantiles").dicts() if r["type"] not in ("CPU", "GPU jobs")]
    longest, slow = weighted_first(runs, "p50"), weighted_first(waits, "mean")
    say = ""
    if longest:
        say = f"{longest['type']} jobs run longest (median {seconds(longest['p50'])})"
        if slow:
            say += f"; {slow['type']} jobs wait longest (mean {seconds(slow['mean'])}, median {seconds(slow['p50'])})"
        say += "."
    return Figure(
        "durations",
        "Figure 6",
        "Duration and queue time by type",
        say,
        tuple(panels),
        (),
        ("run_cdf", "queue_cdf", "run_quantiles", "queue_quantiles"),
    )


def _of_types(run: Result, queue: Result, references: Sequence[Reference]) -> Iterator[LineChart]:
    """One panel a type, a line for each cluster and each reference."""
    for what, table, name in (("duration", run, "run_cdf"), ("queue time", queue, "queue_cdf")):
        marks = DAYS_MARKED if what == "duration" else ()
        for k in order_types(table.distinct("type")) if table else ():
            own = (
                Series(str(c), points(table, "x_s", "cdf_pct", cluster=c, type=k), color_of("", i))
                for i, c in enumerate(table.distinct("cluster"))
            )  # fmt: skip
            lines = (
                *(s for s in own if s.points),
                *reference_series(references, name, "x_s", "cdf_pct", type=k),
            )
            yield LineChart(
                f"{k}: {what}", what, "share of jobs, %", lines, "log", None, (0.0, 100.0), "seconds", marks
            )


def arrivals(found: Findings, references: Sequence[Reference], settings: ReportSettings) -> Figure | None:
    """Arrivals by hour of the week, and each day."""
    week, day = found.get("arrivals_by_weekday"), found.get("arrivals_daily")
    if not week:
        return None
    panels: list[Chart] = []
    names = [calendar.day_abbr[i] for i in range(7)]
    for c in week.distinct("cluster"):
        cells = {(r["weekday"], r["hour"]): float(r["jobs"]) for r in week.where(cluster=c).dicts()}
        values = tuple(tuple(cells.get((d, h), 0.0) for h in range(24)) for d in range(1, 8))
        panels.append(
            Heat(
                f"{c}: submissions by hour of the week (UTC)",
                tuple(names),
                tuple(f"{h}h" for h in range(24)),
                values,
                "jobs",
            )
        )
    lines = []
    for i, c in enumerate(day.distinct("cluster")):
        pts = tuple((day_seconds(r["day"]), float(r["jobs"])) for r in day.where(cluster=c).dicts())
        lines.append(Series(str(c), pts, color_of("", i), area=len(day.distinct("cluster")) == 1))
    panels.append(
        LineChart("Submissions a day", "day (UTC)", "jobs", tuple(lines), "time", None, None, "time")
    )
    hours_of = found.get("arrivals_by_hour")
    each_hour: dict[int, float] = {}
    for r in hours_of.dicts():
        each_hour[r["hour"]] = each_hour.get(r["hour"], 0.0) + r["jobs_per_hour"]
    most = max(each_hour, key=lambda h: each_hour[h], default=None)
    least = min(each_hour, key=lambda h: each_hour[h], default=None)
    say = ""
    if most is not None and most == least:
        say = f"All jobs come at {most:02d}:00 UTC."
    elif most is not None and least is not None:
        say = (
            f"Most jobs come at {most:02d}:00 UTC ({amount(each_hour[most])} an hour), fewest at {least:02d}:00 "
            f"({amount(each_hour[least])})."
        )
    bursts = next(found.get("burstiness").dicts(), None)
    if bursts and bursts["peak_over_mean"] and bursts["hours"] > 1:
        of = f" of {bursts['cluster']}" if len(found.get("burstiness").rows) > 1 else ""
        say += f" The busiest hour{of} had {amount(bursts['peak_over_mean'])} times the mean."
    return Figure(
        "arrivals",
        "Arrivals",
        "When jobs come",
        say,
        tuple(panels),
        (),
        ("arrivals_by_weekday", "arrivals_by_hour", "arrivals_daily", "burstiness"),
    )


def day_seconds(day: object) -> float:
    """A date as seconds since 1970."""
    return float(calendar.timegm(day.timetuple()))  # type: ignore[attr-defined]


def busy(found: Findings, references: Sequence[Reference], settings: ReportSettings) -> Figure | None:
    """GPUs held."""
    table = found.get("busy")
    if not table:
        return None
    lines = []
    for i, c in enumerate(table.distinct("cluster")):
        pts = tuple((day_seconds(r["time_utc"]), float(r["gpus"])) for r in table.where(cluster=c).dicts())
        lines.append(Series(str(c), pts, color_of("", i), area=len(table.distinct("cluster")) == 1))
    panel = LineChart("", "time (UTC)", "GPUs held", tuple(lines), "time", None, None, "time")
    held: dict[object, float] = {}
    for r in table.dicts():
        held[r["time_utc"]] = held.get(r["time_utc"], 0.0) + (r["gpus"] or 0.0)
    say = ""
    if held:
        total = sum(found.get("summary").column("gpu_h"))
        say = (
            f"Jobs hold {amount(sum(held.values()) / len(held), 0)} GPUs on average and at most {amount(max(held.values()), 0)}, "
            f"{hours(total)} in all."
        )
    return Figure("busy", "GPUs held", "GPUs held over time", say, (panel,), (), ("busy",), table.remark)


def sentence_case(text: str) -> str:
    """The first letter large."""
    return text[:1].upper() + text[1:]
