"""Utilisation, power, energy, temperature, carbon; and whether heat and load go with failures."""

from __future__ import annotations

from collections.abc import Iterator

from ...samples.tables import Result
from ..settings import ReportSettings
from ..store import Store
from .cubes import quantiles_sql

SHARES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)

BIN = """CASE WHEN metric LIKE '%_pct' THEN round(value, 1) WHEN metric LIKE '%_w' OR metric LIKE '%_c' THEN round(value)
    WHEN abs(value) < 1000 THEN round(value, 1)
    ELSE round(value / pow(10, floor(log10(abs(value))) - 2)) * pow(10, floor(log10(abs(value))) - 2) END"""
"""Percentages to a tenth, watts and degrees whole, large numbers to three digits."""


def results(store: Store, settings: ReportSettings) -> Iterator[Result]:
    """All of this file."""
    store.con.execute(
        f"""CREATE OR REPLACE TABLE c_samples AS SELECT cluster, metric, v, sum(n) AS n, sum(total) AS total FROM (
            SELECT cluster, metric, {BIN} AS v, count(*) AS n, sum(value) AS total
            FROM samples WHERE value IS NOT NULL AND isfinite(value) GROUP BY ALL
            UNION ALL SELECT cluster, metric, {BIN} AS v, sum(n) AS n, sum(value * n) AS total
            FROM (SELECT cluster, metric, v AS value, n FROM counted) GROUP BY ALL) GROUP BY ALL"""
    )
    yield quantiles(store)
    yield curve(store)
    yield bimodality(store, settings)
    yield modules(store)
    yield energy(store, settings)
    yield over_time(store)
    yield against_heat(store)


def quantiles(store: Store) -> Result:
    """Quantiles of every metric."""
    sql = quantiles_sql("c_samples", "v", "n", "cluster, metric", SHARES)
    return store.result(
        "utilisation_quantiles",
        "Readings by metric",
        f"""SELECT q.*, t.mean AS mean_exact FROM ({sql}) q JOIN (SELECT cluster, metric, sum(total) / sum(n) AS mean
            FROM c_samples GROUP BY ALL) t ON q.cluster IS NOT DISTINCT FROM t.cluster AND q.metric = t.metric
        ORDER BY q.cluster, q.metric""",
    )


def curve(store: Store) -> Result:
    """Points of the distribution function of every metric, at most 201 of each (Figures 2b, 7, 8, temperature)."""
    return store.result(
        "utilisation_cdf",
        "Distribution of readings",
        """WITH r AS (SELECT cluster, metric, min(v) AS a, max(v) AS b, sum(n) AS total FROM c_samples GROUP BY ALL),
            k AS (SELECT s.cluster, s.metric, r.a, r.b, r.total,
                CASE WHEN r.b > r.a THEN ceil((s.v - r.a) / (r.b - r.a) * 200 - 1e-9) ELSE 0 END AS k, sum(n) AS n
                FROM c_samples s JOIN r ON s.cluster IS NOT DISTINCT FROM r.cluster AND s.metric = r.metric GROUP BY ALL)
        SELECT cluster, metric, a + (b - a) * k / 200 AS x,
            100.0 * sum(n) OVER (PARTITION BY cluster, metric ORDER BY k) / total AS cdf_pct
        FROM k ORDER BY 1, 2, 3""",
    )


def bimodality(store: Store, settings: ReportSettings) -> Result:
    """Shares of readings that are idle and full: how far utilisation is all or nothing."""
    return store.result(
        "polarisation",
        "Idle, between, full",
        f"""SELECT cluster, metric, 100.0 * sum(n) FILTER (v <= {settings.idle_below_pct}) / sum(n) AS idle_pct,
            100.0 * sum(n) FILTER (v > {settings.idle_below_pct} AND v < {settings.busy_above_pct}) / sum(n) AS between_pct,
            100.0 * sum(n) FILTER (v >= {settings.busy_above_pct}) / sum(n) AS full_pct, sum(n)::BIGINT AS readings
        FROM c_samples WHERE metric IN ('gpu_util_pct', 'sm_active_pct', 'tensor_active_pct', 'host_cpu_util_pct',
            'host_mem_used_pct', 'gpu_mem_used_pct', 'dram_active_pct')
        GROUP BY ALL ORDER BY 1, 2""",
    )


PARTS = {
    "gpus_power_w": "GPUs",
    "cpu_power_w": "CPUs",
    "mem_power_w": "memory",
    "fan_power_w": "fans",
    "psu_loss_w": "power supply loss",
}


def modules(store: Store) -> Result:
    """Mean power of a server's parts and their share of the server's (Figure 9)."""
    cases = " ".join(f"WHEN '{k}' THEN '{v}'" for k, v in PARTS.items())
    names = ", ".join(f"'{k}'" for k in PARTS)
    return store.result(
        "power_modules",
        "Power by part of the server",
        f"""WITH m AS (SELECT cluster, metric, sum(total) / sum(n) AS w FROM c_samples GROUP BY ALL),
            node AS (SELECT cluster, w AS node_w FROM m WHERE metric = 'node_power_w')
        SELECT m.cluster, CASE metric {cases} END AS part, w AS mean_w, 100 * w / node_w AS share_pct
        FROM m JOIN node ON m.cluster IS NOT DISTINCT FROM node.cluster WHERE metric IN ({names})
        UNION ALL
        SELECT node.cluster, 'rest', node_w - sum(w), 100 * (node_w - sum(w)) / node_w FROM m JOIN node
            ON m.cluster IS NOT DISTINCT FROM node.cluster WHERE metric IN ({names}) GROUP BY node.cluster, node_w
        ORDER BY 1, 3 DESC""",
    )


def energy(store: Store, settings: ReportSettings) -> Result:
    """Energy of what was measured, from mean power times time, and the carbon that follows from what was declared."""
    return store.result(
        "energy",
        "Energy and carbon",
        f"""WITH series AS (SELECT cluster, metric, node, gpu, device, avg(value) AS w,
                date_diff('microsecond', min(time_utc), max(time_utc)) / 1e6 * count(*) / nullif(count(*) - 1, 0) AS s
                FROM samples WHERE metric IN ('gpu_power_w', 'node_power_w') GROUP BY ALL),
            e AS (SELECT cluster, metric, count(*) AS devices, sum(w * s) / 3.6e6 AS kwh, avg(w) AS mean_w, max(s) / 3600 AS hours
                FROM series GROUP BY ALL)
        SELECT cluster, CASE metric WHEN 'gpu_power_w' THEN 'GPUs' ELSE 'servers' END AS what, devices::BIGINT AS devices,
            mean_w, hours, kwh, kwh * {settings.pue} AS site_kwh,
            kwh * {settings.pue} * {settings.carbon_kg_per_kwh} AS co2e_kg
        FROM e ORDER BY 1, 2""",
        f"PUE {settings.pue:g}, {settings.carbon_kg_per_kwh:g} kg CO2e per kWh (declared). GPUs are part of the servers.",
    )


def over_time(store: Store) -> Result:
    """Hourly means (daily above 60 days) of busy GPUs, power and temperature."""
    span = store.one(
        "SELECT coalesce(date_diff('hour', min(t), max(t)), 0) FROM (SELECT min(time_utc) AS t FROM samples UNION ALL "
        "SELECT max(time_utc) FROM samples UNION ALL SELECT min(time_utc) FROM moments UNION ALL SELECT max(time_utc) FROM moments)"
    )[0]
    step = "1 DAY" if span > 1440 else "1 HOUR" if span > 6 else "1 MINUTE"
    return store.result(
        "hardware_over_time",
        "Hardware over time",
        f"""SELECT cluster, metric, t AS time_utc, sum(s) / sum(n) AS mean FROM (
            SELECT cluster, metric, time_bucket(INTERVAL {step}, time_utc) AS t, sum(value) AS s, count(value) AS n
            FROM samples GROUP BY ALL
            UNION ALL SELECT cluster, metric, time_bucket(INTERVAL {step}, time_utc), sum(mean * n), sum(n)
            FROM moments GROUP BY ALL)
        WHERE metric IN ('gpu_util_pct', 'sm_active_pct', 'gpu_power_w', 'gpu_temp_c', 'gpu_mem_temp_c', 'node_power_w',
            'inlet_temp_c') AND n > 0
        GROUP BY ALL ORDER BY 1, 2, 3""",
    )


def against_heat(store: Store) -> Result:
    """Incidents per thousand node-hours by the temperature and by the load that the node had in that hour.

    Infrastructure incidents, fifths of the node-hours from cold to hot and from idle to busy.
    """
    if not store.has("incidents"):
        return Result("failures_by_heat", "Failures against temperature and load", (), ())
    return store.result(
        "failures_by_heat",
        "Failures against temperature and load",
        """WITH h AS (SELECT cluster, node, metric, time_bucket(INTERVAL 1 HOUR, time_utc) AS hour, avg(value) AS v
                FROM samples WHERE metric IN ('gpu_temp_c', 'gpu_util_pct') AND node IS NOT NULL GROUP BY ALL),
            f AS (SELECT *, ntile(5) OVER (PARTITION BY metric ORDER BY v) AS fifth FROM h),
            i AS (SELECT node, time_bucket(INTERVAL 1 HOUR, time_utc) AS hour, count(*) AS n FROM incidents
                WHERE node IS NOT NULL AND coalesce(category, 'Infrastructure') = 'Infrastructure' GROUP BY ALL)
        SELECT metric, fifth, min(v) AS low, max(v) AS high, count(*)::BIGINT AS node_hours,
            coalesce(sum(i.n), 0)::BIGINT AS incidents, 1000.0 * coalesce(sum(i.n), 0) / count(*) AS per_1000_node_hours
        FROM f LEFT JOIN i USING (node, hour) GROUP BY metric, fifth ORDER BY 1, 2""",
    )
