"""What the hardware does: utilisation, power, temperature, energy."""

from __future__ import annotations

import calendar
from collections.abc import Sequence

from ...page.charts.scales import amount
from ...page.charts.spec import Bars, Chart, Figure, Grid, LineChart, Series
from ...page.palette import LIGHT
from ...samples.tables import Findings, Result
from ..settings import ReportSettings
from .colors import color_of
from .parts import grid, one, points, reference_series, weighted_first, whole
from .reference import Reference
from .sentences import pct

SHORT = {
    "gpu_util_pct": "GPU busy",
    "sm_active_pct": "SM active",
    "tensor_active_pct": "tensor active",
    "dram_active_pct": "memory bandwidth",
    "gpu_mem_used_pct": "GPU memory",
    "host_mem_used_pct": "host memory",
    "host_cpu_util_pct": "host CPU",
    "gpu_temp_c": "GPU core",
    "gpu_mem_temp_c": "GPU memory",
    "gpu_power_w": "GPU",
    "node_power_w": "server",
}


def cdf_panel(
    found: Findings,
    references: Sequence[Reference],
    title: str,
    metrics: Sequence[str],
    x: str,
    x_range: tuple[float, float] | None,
    log: bool = False,
) -> LineChart | None:
    """One panel of distribution functions; a colour for each metric, the clusters and references by dashes."""
    table = found.get("utilisation_cdf")
    lines: list[Series] = []
    here = [m for m in metrics if table and m in table.column("metric")]
    for i, m in enumerate(here):
        for c in table.where(metric=m).distinct("cluster"):
            label = SHORT.get(m, m) + (f", {c}" if len(table.distinct("cluster")) > 1 else "")
            lines.append(Series(label, points(table, "x", "cdf_pct", cluster=c, metric=m), color_of("", i)))
        for s in reference_series(
            references, "utilisation_cdf", "x", "cdf_pct", metric=m, color=color_of("", i)
        ):
            lines.append(Series(f"{SHORT.get(m, m)}, {s.label}", s.points, s.color, s.dash))
    if not here:
        return None
    return LineChart(
        title, x, "share of readings, %", tuple(lines), "log" if log else "linear", x_range, (0, 100)
    )


def median(found: Findings, metric: str) -> float | None:
    """The median of a metric in the first cluster that has it."""
    row = next((r for r in found.get("utilisation_quantiles").dicts() if r["metric"] == metric), None)
    return None if row is None else float(row["p50"])


def utilisation(found: Findings, references: Sequence[Reference], settings: ReportSettings) -> Figure | None:
    """Figure 7."""
    percent = (0.0, 100.0)
    made = [
        cdf_panel(
            found,
            references,
            "(a) GPU: SM and tensor activity",
            ("sm_active_pct", "tensor_active_pct"),
            "activity, %",
            percent,
        ),
        cdf_panel(
            found,
            references,
            "(b) Memory",
            ("gpu_mem_used_pct", "host_mem_used_pct"),
            "memory used, %",
            percent,
        ),
        cdf_panel(found, references, "(c) Host CPU", ("host_cpu_util_pct",), "CPU used, %", percent),
        network(found),
    ]
    panels = [p for p in made if p]
    if not panels:
        return None
    polar = found.get("polarisation")
    rows = list(polar.dicts())
    grids: tuple[Grid, ...] = ()
    if rows:
        grids = (
            grid(
                polar,
                (
                    ("cluster", "cluster", None),
                    ("metric", "metric", None),
                    ("idle_pct", f"at most {settings.idle_below_pct:g} %", one),
                    ("between_pct", "between", one),
                    ("full_pct", f"at least {settings.busy_above_pct:g} %", one),
                    ("readings", "readings", whole),
                ),
                caption="Share of readings, in percent.",
            ),
        )
    parts = []
    busy = next((r for r in rows if r["metric"] == "gpu_util_pct"), None)
    if busy:
        parts.append(
            f"GPUs are all or nothing: {pct(busy['idle_pct'])} of the readings are idle and {pct(busy['full_pct'])} full"
        )
    sm, host = median(found, "sm_active_pct"), median(found, "host_mem_used_pct")
    if sm is not None:
        parts.append(f"the median SM activity is {amount(sm)} %")
    if host is not None:
        parts.append(f"half of the hosts' readings use less than {amount(host)} % of their memory")
    return Figure("utilisation", "Figure 7", "Utilisation", "; ".join(parts) + "." if parts else "", tuple(panels), tuple(grids), ("utilisation_cdf", "utilisation_quantiles", "polarisation"))  # fmt: skip


def network(found: Findings) -> LineChart | None:
    """Panel (d): bytes a second of the network, where there are any."""
    table = found.get("utilisation_cdf")
    names = ("ib_tx_bytes_per_s", "ib_rx_bytes_per_s", "nic_tx_bytes_per_s", "nic_rx_bytes_per_s")
    here = [m for m in names if table and m in table.column("metric")]
    lines = []
    for i, m in enumerate(here):
        pts: tuple[tuple[float, float], ...] = ()
        for c in table.where(metric=m).distinct("cluster")[:1]:
            pts = tuple((max(x / 1e9, 0), y) for x, y in points(table, "x", "cdf_pct", cluster=c, metric=m))
        lines.append(Series(m.split("_bytes")[0].replace("_", " "), pts, color_of("", i)))
    if not here:
        return None
    return LineChart("(d) Network", "GB/s", "share of readings, %", tuple(lines), "linear", None, (0, 100))


def power(found: Findings, references: Sequence[Reference], settings: ReportSettings) -> Figure | None:
    """Figure 8."""
    made = [
        cdf_panel(found, references, "(a) GPU power", ("gpu_power_w",), "watts", None),
        cdf_panel(found, references, "(b) Server power", ("node_power_w",), "watts", None),
    ]
    panels = [p for p in made if p]
    if not panels:
        return None
    say = ""
    curve = found.get("utilisation_cdf")
    row = next((r for r in found.get("utilisation_quantiles").dicts() if r["metric"] == "gpu_power_w"), None)
    if row:
        pts = points(curve, "x", "cdf_pct", cluster=row["cluster"], metric="gpu_power_w")
        over = 100 - max((y for x, y in pts if x <= 400), default=0.0)
        low = max((y for x, y in pts if x <= 75), default=0.0)
        say = (
            f"A GPU draws {amount(row['mean_exact'], 0)} W on average; {pct(low)} of the readings are at most 75 W, which is idle, and "
            f"{pct(over)} above 400 W."
        )
    return Figure(
        "power", "Figure 8", "Power", say, tuple(panels), (), ("utilisation_cdf", "utilisation_quantiles")
    )


def modules(found: Findings, references: Sequence[Reference], settings: ReportSettings) -> Figure | None:
    """Figure 9."""
    table = found.get("power_modules")
    if not table:
        return None
    panels: list[Chart] = []
    for c in table.distinct("cluster"):
        rows = list(table.where(cluster=c).dicts())
        panels.append(Bars(str(c), "mean watts", tuple(r["part"] for r in rows), (("watts", LIGHT["blue"], tuple(float(r["mean_w"]) for r in rows)),), horizontal=True, unit="W", digits=0, legend=False))  # fmt: skip
    top = weighted_first(table.dicts(), "share_pct")
    say = f"{top['part']} take {pct(top['share_pct'])} of a server's power." if top else ""
    return Figure(
        "modules", "Figure 9", "Power by part of the server", say, tuple(panels), (), ("power_modules",)
    )


def temperature(found: Findings, references: Sequence[Reference], settings: ReportSettings) -> Figure | None:
    """Temperature, as in the study's appendix."""
    panel = cdf_panel(found, references, "", ("gpu_temp_c", "gpu_mem_temp_c"), "degrees Celsius", None)
    if panel is None:
        return None
    a, b = median(found, "gpu_temp_c"), median(found, "gpu_mem_temp_c")
    parts = []
    if a is not None:
        parts.append(f"the median GPU core is at {amount(a)} °C")
    if b is not None:
        parts.append(f"the median GPU memory at {amount(b)} °C")
    say = " and ".join(parts)
    return Figure("temperature", "Temperature", "GPU temperature (the study's appendix)", say[:1].upper() + say[1:] + ".", (panel,), (), ("utilisation_cdf",))  # fmt: skip


def energy(found: Findings, references: Sequence[Reference], settings: ReportSettings) -> Figure | None:
    """Energy and carbon."""
    table = found.get("energy")
    if not table:
        return None
    cells = grid(
        table,
        (
            ("cluster", "cluster", None),
            ("what", "of", None),
            ("devices", "measured", whole),
            ("mean_w", "mean W", whole),
            ("hours", "hours", one),
            ("kwh", "kWh", whole),
            ("site_kwh", "kWh with PUE", whole),
            ("co2e_kg", "kg CO2e", whole),
        ),
    )
    row = next((r for r in table.dicts() if r["what"] == "servers"), next(table.dicts()))
    say = (
        f"The {row['devices']:,} measured {row['what']} took {amount(row['kwh'], 0)} kWh in {amount(row['hours'])} h, with the declared PUE "
        f"and intensity {amount(row['co2e_kg'], 0)} kg CO2e."
    )
    return Figure("energy", "Energy", "Energy and carbon", say, (), (cells,), ("energy",), table.remark)


def over_time(found: Findings, references: Sequence[Reference], settings: ReportSettings) -> Figure | None:
    """Means over time."""
    table = found.get("hardware_over_time")
    if not table:
        return None
    panels: list[Chart] = []
    for title, metrics, y in (
        ("GPU busy and SM active", ("gpu_util_pct", "sm_active_pct"), "%"),
        ("GPU power", ("gpu_power_w",), "watts"),
        ("Temperature", ("gpu_temp_c", "gpu_mem_temp_c", "inlet_temp_c"), "degrees Celsius"),
    ):
        lines = time_lines(table, metrics)
        if lines:
            panels.append(LineChart(title, "time (UTC)", y, lines, "time", None, None, "time"))
    if not panels:
        return None
    say = "Means over all GPUs of what was sampled."
    busy = points(table, "mean", "mean", metric="gpu_util_pct")
    if busy:
        say = (
            f"On average {amount(sum(b for _, b in busy) / len(busy))} % of the GPUs' time is busy, between "
            f"{amount(min(b for _, b in busy))} % and {amount(max(b for _, b in busy))} %."
        )
    return Figure(
        "over_time", "Over time", "Hardware over time", say, tuple(panels), (), ("hardware_over_time",)
    )


def time_lines(table: Result, metrics: Sequence[str]) -> tuple[Series, ...]:
    """The means of some metrics as lines over time."""
    lines = []
    for i, m in enumerate(metrics):
        for c in table.where(metric=m).distinct("cluster"):
            part = table.where(metric=m, cluster=c)
            pts = tuple(
                (float(calendar.timegm(r["time_utc"].timetuple())), float(r["mean"])) for r in part.dicts()
            )
            lines.append(Series(SHORT.get(m, m), pts, color_of("", i)))
    return tuple(lines)


def heat(found: Findings, references: Sequence[Reference], settings: ReportSettings) -> Figure | None:
    """Failures against temperature and load."""
    table = found.get("failures_by_heat")
    if not table or not sum(table.column("incidents")):
        return None
    panels: list[Chart] = []
    parts = []
    for metric, title, unit in (
        ("gpu_temp_c", "by GPU temperature", "°C"),
        ("gpu_util_pct", "by load (GPU busy)", "%"),
    ):
        rows = list(table.where(metric=metric).dicts())
        if rows:
            names = tuple(f"{r['low']:.0f}–{r['high']:.0f} {unit}" for r in rows)
            panels.append(Bars(f"Incidents {title}", "per 1,000 node-hours", names, (("incidents", LIGHT["red"], tuple(float(r["per_1000_node_hours"]) for r in rows)),), digits=2, legend=False))  # fmt: skip
            first, last = rows[0]["per_1000_node_hours"], rows[-1]["per_1000_node_hours"]
            word = "hottest" if metric == "gpu_temp_c" else "busiest"
            parts.append(
                f"the {word} fifth of the node-hours has {amount(last, 2)} incidents per 1,000 node-hours, the opposite fifth {amount(first, 2)}"
            )
    n = sum(table.where(metric=table.rows[0][0]).column("incidents"))
    say = "; ".join(parts)
    say = (
        say[:1].upper()
        + say[1:]
        + f" ({n} incidents: {'too few to conclude' if n < 30 else 'a relation, not a cause'})."
    )
    return Figure(
        "heat",
        "Heat and load",
        "Failures against temperature and load",
        say,
        tuple(panels),
        (),
        ("failures_by_heat",),
    )
