"""Wide tables, one column a server or GPU and one file a metric: the utilisation data that came with Acme.

80 GB in the release: a file is melted by DuckDB from disk to disk within the memory given, sorted as it comes (by
time), into Parquet files of at most 256 MiB.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path

from ...errors import InputError
from ...samples.tables import Note
from .names import ACME, ReadingSource, place

_DATE = re.compile(r"-\d{4}-\d{2}.*$")
_TIME = re.compile(r"\d{4}-\d{2}-\d{2}[ T]\d{2}:\d{2}:\d{2}")


def is_table(path: Path, head: str) -> bool:
    """Whether a file is wide: a first column of times and a metric's name for its own."""
    lines = head.splitlines()
    if len(lines) < 2 or metric_of(path) not in ACME:
        return False
    return lines[0].split(",")[0].strip().strip('"').lower() == "time"


def metric_of(path: Path) -> str:
    """The metric in the name of a file: `SM_ACTIVE-2023-07.csv` is SM_ACTIVE."""
    stem = _DATE.sub("", path.name.split(".")[0]).upper()
    return stem.removeprefix("DCGM_FI_DEV_").removeprefix("DCGM_FI_PROF_")


def meaning(path: Path, metric: str | None = None) -> tuple[str, float]:
    """(our metric, factor into its unit) of a wide file. Raises InputError for a name that says none."""
    name = metric_of(path)
    if metric:
        return metric, 1.0
    if name not in ACME:
        raise InputError(
            f"the file's name says no metric that is known: {name}",
            where=str(path),
            hint="Name it with --metric, e.g. sm_active_pct",
        )
    return ACME[name]


def read(source: ReadingSource, out: Path) -> list[Note]:
    """Melts a wide table into Parquet files in `out`. Raises InputError for another table."""
    import duckdb

    path, name = source.path, metric_of(source.path)
    metric, factor = meaning(path, source.metric)
    header = _header(path)
    notes = [Note("assumption", "times without an offset are taken as UTC", source=path.name)]
    if name.startswith("NODE_IB"):
        notes.append(
            Note(
                "assumption",
                "the unit of NODE_IB_* is not stated; taken as 10^6 bytes a second",
                source=path.name,
            )
        )
    per_gpu = metric.startswith(("gpu_", "sm_", "tensor_", "dram_", "mem_clock", "xid"))
    columns = [f"c{i}" for i in range(len(header))]
    places, repeated = [], 0
    for column, title in zip(columns[1:], header[1:], strict=True):
        node, gpu, device, again = place(title, per_gpu)
        repeated += again
        if not again:
            places.append((column, node, gpu, device))
    if repeated:
        notes.append(
            Note(
                "set aside",
                "columns that repeat another server's (an artefact of the release)",
                repeated,
                len(header) - 1,
                path.name,
            )
        )
    places = _number_gpus(places, per_gpu)
    con = duckdb.connect()
    try:
        con.execute(
            f"SET memory_limit='{source.memory}'; SET preserve_insertion_order=false; SET TimeZone='UTC'"
        )
        con.execute(f"SET temp_directory='{_sql(str(out / '.spill'))}'")
        con.execute("CREATE TABLE places (col VARCHAR, node VARCHAR, gpu SMALLINT, device VARCHAR)")
        con.executemany("INSERT INTO places VALUES (?, ?, ?, ?)", places)
        types = ", ".join(f"'{c}': '{'TIMESTAMPTZ' if i == 0 else 'DOUBLE'}'" for i, c in enumerate(columns))
        table = (
            f"read_csv('{_sql(str(path))}', header=true, auto_detect=false, delim=',', quote='\"', nullstr=['', 'nan', 'NaN', 'null'], "
            f"columns={{{types}}})"
        )
        melted = f"(UNPIVOT {table} ON COLUMNS(* EXCLUDE c0) INTO NAME col VALUE v)"
        rows = f"SELECT c0 AS t, node, gpu, device, v FROM {melted} JOIN places USING (col)"
        if metric == "xid":
            rows = _events(rows)
        values = [(metric, factor)]
        if metric == "gpu_mem_used_gib":
            total = source.gpu_memory_gib or 80.0
            values.append(("gpu_mem_used_pct", 100 * factor / total))
            if not source.gpu_memory_gib:
                notes.append(Note("assumption", "each GPU has 80 GiB of memory (A100-80G)", source=path.name))
        for kind, scale in values:
            con.execute(
                f"COPY (SELECT (t AT TIME ZONE 'UTC')::TIMESTAMP AS time_utc, {_literal(source.cluster)} AS cluster, node, gpu, device, "
                f"'{_sql(kind)}' AS metric, v * {scale!r} AS value FROM ({rows})) TO '{_sql(str(out))}' "
                f"(FORMAT parquet, COMPRESSION zstd, PER_THREAD_OUTPUT true, FILE_SIZE_BYTES '256MB', "
                f"FILENAME_PATTERN '{kind}_{{uuid}}', OVERWRITE_OR_IGNORE true)"
            )
    except duckdb.Error as e:
        line = str(e).splitlines()[0]
        raise InputError(
            f"the table cannot be read: {line}", where=str(path), hint="Is it a wide table of numbers?"
        ) from e
    finally:
        con.close()
    return notes


def _events(rows: str) -> str:
    """DCGM shows a GPU's last XID until the driver is loaded again: an event is where the shown number changes."""
    before = "lag(v) OVER (PARTITION BY node, gpu, device ORDER BY t)"
    return f"SELECT * FROM ({rows}) QUALIFY v <> 0 AND v IS DISTINCT FROM {before}"


def _number_gpus(
    places: list[tuple[str, str, int | None, str | None]], per_gpu: bool
) -> list[tuple[str, str, int | None, str | None]]:
    """Where pandas numbered repeated columns from the second on, the first is GPU 0."""
    if not per_gpu:
        return places
    many = {node for node, n in Counter(node for _, node, _, _ in places).items() if n > 1}
    return [(c, node, 0 if gpu is None and node in many else gpu, d) for c, node, gpu, d in places]


def _header(path: Path) -> list[str]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as f:
            reader = csv.reader(f)
            header, first = next(reader, []), next(reader, [])
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise InputError(f"the table cannot be read: {e}", where=str(path)) from e
    if len(header) < 2 or not first or not _TIME.match(first[0]):
        raise InputError(
            "this is no wide table: a first column of times and one column for each server are expected",
            where=str(path),
        )
    return header


def _sql(text: str) -> str:
    return text.replace("'", "''")


def _literal(text: str | None) -> str:
    return "NULL::VARCHAR" if text is None else f"'{_sql(text)}'"
