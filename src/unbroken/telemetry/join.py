"""Readings over spans of time: what a job, a phase of an evaluation assignment or a pretraining plan did with its GPUs.

A *span* is (label, part, node, gpu, start, end): a job on each of its nodes, a trial's loading or generating on one
GPU, a plan's run. Readings fall into the spans of their node (and GPU, where the span names one) that hold their
time, start included and end not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, MissingExtra
from .spans import Span

if TYPE_CHECKING:
    import duckdb

SPAN_COLUMNS = ("label", "part", "node", "gpu", "start_utc", "end_utc")
ENERGY = "gpu_energy_j"


def connect(memory: str = "1GiB") -> duckdb.DuckDBPyConnection:
    """A DuckDB that works within `memory`, in UTC. Raises MissingExtra."""
    try:
        import duckdb
    except ImportError:
        raise MissingExtra("duckdb", "trace", what="joining readings") from None
    con = duckdb.connect()
    con.execute(f"SET memory_limit='{memory}'; SET TimeZone='UTC'")
    return con


def open_samples(con: duckdb.DuckDBPyConnection, paths: Sequence[Path]) -> None:
    """Makes the view `samples` of recorded or converted files and folders. Raises InputError."""
    files: list[str] = []
    for p in paths:
        found = (
            [p] if p.is_file() else sorted(f for f in p.rglob("*") if _is_samples(f)) if p.is_dir() else []
        )
        if not found:
            raise InputError(
                "there are no readings",
                where=str(p),
                hint="Give the folder of `unbroken telemetry record` or `convert`",
            )
        files += [str(f) for f in found]
    parts = []
    for kind, reader in (
        ("parquet", "read_parquet({})"),
        ("csv", "read_csv({}, header=true, types={types})"),
    ):
        mine = [f for f in files if f.endswith(".parquet") == (kind == "parquet")]
        if mine:
            names = "[" + ", ".join(_literal(f) for f in mine) + "]"
            types = "{'time_utc': 'TIMESTAMP', 'cluster': 'VARCHAR', 'node': 'VARCHAR', 'gpu': 'SMALLINT', 'device': 'VARCHAR', 'metric': 'VARCHAR', 'value': 'DOUBLE'}"
            parts.append(
                f"SELECT time_utc, cluster, node, gpu, device, metric, value FROM {reader.format(names, types=types)}"
            )
    _run(con, f"CREATE OR REPLACE VIEW samples AS {' UNION ALL '.join(parts)}", "the readings")


def open_jobs(con: duckdb.DuckDBPyConnection, path: Path) -> None:
    """Adds spans from a `jobs` table of the trace schema, one for each node of a job."""
    _create(con)
    _run(
        con,
        f"""INSERT INTO spans
        SELECT job_id AS label, type AS part, unnest(nodes) AS node, NULL::SMALLINT AS gpu, start_utc, end_utc
        FROM read_parquet({_literal(str(path))}) WHERE start_utc IS NOT NULL AND end_utc > start_utc AND len(nodes) > 0""",
        str(path),
    )


def open_spans(con: duckdb.DuckDBPyConnection, path: Path) -> None:
    """Adds spans from a CSV or Parquet file with the columns label, part, node, gpu, start_utc, end_utc.

    `part` and `gpu` may be left out. Times without an offset are UTC.
    """
    reader = "read_parquet" if path.suffix == ".parquet" else "read_csv"
    try:
        have = {
            str(r[0])
            for r in con.execute(f"DESCRIBE SELECT * FROM {reader}({_literal(str(path))})").fetchall()
        }
    except Exception as e:
        raise InputError(f"the spans cannot be read: {str(e).splitlines()[0]}", where=str(path)) from e
    absent = {"label", "node", "start_utc", "end_utc"} - have
    if absent:
        raise InputError(
            f"the spans have no column {', '.join(sorted(absent))}",
            where=str(path),
            hint=f"Columns: {', '.join(SPAN_COLUMNS)}",
        )
    part = "part::VARCHAR" if "part" in have else "NULL::VARCHAR"
    gpu = "gpu::SMALLINT" if "gpu" in have else "NULL::SMALLINT"
    _create(con)
    _run(
        con,
        f"""INSERT INTO spans SELECT label::VARCHAR AS label, {part} AS part, node::VARCHAR AS node,
        {gpu} AS gpu, (start_utc::TIMESTAMPTZ AT TIME ZONE 'UTC') AS start_utc,
        (end_utc::TIMESTAMPTZ AT TIME ZONE 'UTC') AS end_utc FROM {reader}({_literal(str(path))})""",
        str(path),
    )


def add_spans(con: duckdb.DuckDBPyConnection, spans: Sequence[Span], host: str | None = None) -> bool:
    """Adds spans; True if their virtual nodes were taken for the one `host` that the readings know instead."""
    _create(con)
    known = {str(r[0]) for r in con.execute("SELECT DISTINCT node FROM samples").fetchall()}
    on_host = host is not None and host in known and not any(s.node in known for s in spans)
    rows = [
        (s.label, s.part, host if on_host else s.node, s.gpu, round(s.start * 1e6), round(s.end * 1e6))
        for s in spans
    ]
    if on_host:
        rows = list(dict.fromkeys(rows))
    if rows:
        con.executemany("INSERT INTO spans VALUES (?, ?, ?, ?, make_timestamp(?), make_timestamp(?))", rows)
    return on_host


def per_span(
    con: duckdb.DuckDBPyConnection, metrics: Sequence[str] = (), by: Sequence[str] = ("label", "part")
) -> list[dict[str, Any]]:
    """Mean, quantiles and count of each metric over the spans, grouped by label, part or both.

    Counters (`gpu_energy_j`, `*_total`) give their increase over the span instead, summed over GPUs; an event
    (`xid`) its count. Spans without any reading are left out; `spans_without_readings` counts them.
    """
    keys = ", ".join(f"p.{k}" for k in by)
    plain = ", ".join(by)
    wanted = f"AND s.metric IN ({', '.join(_literal(m) for m in metrics)})" if metrics else ""
    inside = (
        "samples s JOIN spans p ON s.node = p.node AND s.time_utc >= p.start_utc AND s.time_utc < p.end_utc "
        f"AND (p.gpu IS NULL OR s.gpu = p.gpu) {wanted}"
    )
    counter = f"(s.metric = '{ENERGY}' OR suffix(s.metric, '_total'))"
    rows = con.execute(
        f"""WITH gauges AS (
            SELECT {keys}, s.metric, avg(s.value) AS mean, quantile_cont(s.value, [0.05, 0.5, 0.95]) AS q, count(*) AS n,
                   NULL::DOUBLE AS increase
            FROM {inside} AND NOT {counter} AND s.metric <> 'xid' GROUP BY ALL),
        steps AS (
            SELECT {keys}, s.metric, s.value - lag(s.value) OVER (PARTITION BY {keys}, s.metric, s.node, s.gpu, s.device, p.start_utc
                   ORDER BY s.time_utc) AS step
            FROM {inside} AND {counter}),
        counters AS (
            SELECT {plain}, metric, NULL::DOUBLE AS mean, NULL::DOUBLE[] AS q, count(*) AS n,
                   sum(CASE WHEN step >= 0 THEN step ELSE 0 END) AS increase
            FROM steps GROUP BY ALL),
        events AS (
            SELECT {keys}, s.metric, NULL::DOUBLE AS mean, NULL::DOUBLE[] AS q, count(*) AS n, count(*)::DOUBLE AS increase
            FROM {inside} AND s.metric = 'xid' GROUP BY ALL)
        SELECT * FROM (SELECT * FROM gauges UNION ALL SELECT * FROM counters UNION ALL SELECT * FROM events)
        ORDER BY {plain}, metric"""
    ).fetchall()
    out = []
    for row in rows:
        *names, metric, mean, quantiles, n, increase = row
        entry: dict[str, Any] = dict(zip(by, names, strict=True)) | {"metric": metric, "readings": n}
        if quantiles is None:
            entry["increase"] = increase
        else:
            entry |= {"mean": mean, "p05": quantiles[0], "p50": quantiles[1], "p95": quantiles[2]}
        out.append(entry)
    return out


def spans_without_readings(con: duckdb.DuckDBPyConnection) -> tuple[int, int]:
    """(spans that no reading falls into, all spans)."""
    n, total = con.execute(
        """SELECT count(*) FILTER (NOT EXISTS (SELECT 1 FROM samples s WHERE s.node = p.node
           AND s.time_utc >= p.start_utc AND s.time_utc < p.end_utc)), count(*) FROM spans p"""
    ).fetchall()[0]
    return int(n), int(total)


def metrics_of(con: duckdb.DuckDBPyConnection) -> list[str]:
    """The metrics that there are readings of."""
    return [str(r[0]) for r in con.execute("SELECT DISTINCT metric FROM samples ORDER BY metric").fetchall()]


def distribution(con: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
    """Quantiles of every metric over all readings."""
    names = ("metric", "readings", "mean", "min", "p05", "p25", "p50", "p75", "p95", "max")
    rows = con.execute(
        """SELECT metric, count(*), avg(value), min(value), quantile_cont(value, 0.05), quantile_cont(value, 0.25),
           quantile_cont(value, 0.5), quantile_cont(value, 0.75), quantile_cont(value, 0.95), max(value)
           FROM samples GROUP BY metric ORDER BY metric"""
    ).fetchall()
    return [dict(zip(names, r, strict=True)) for r in rows]


def _create(con: duckdb.DuckDBPyConnection) -> None:
    con.execute(
        "CREATE TABLE IF NOT EXISTS spans (label VARCHAR, part VARCHAR, node VARCHAR, gpu SMALLINT, "
        "start_utc TIMESTAMP, end_utc TIMESTAMP)"
    )


def _is_samples(f: Path) -> bool:
    hidden = any(part.startswith(".") for part in f.parts[-2:])
    return not hidden and f.name.endswith((".parquet", ".csv.gz", ".spool.csv"))


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _run(con: duckdb.DuckDBPyConnection, sql: str, where: str) -> None:
    import duckdb

    try:
        con.execute(sql)
    except duckdb.Error as e:
        raise InputError(f"cannot be read: {str(e).splitlines()[0]}", where=where) from e
