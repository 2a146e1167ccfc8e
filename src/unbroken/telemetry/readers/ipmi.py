"""Tables of server power from BMCs: a time, perhaps a server, and a column for each reading."""

from __future__ import annotations

import re
from pathlib import Path

from ...errors import InputError
from ...samples.tables import Note
from .names import IPMI, ReadingSource

_NODE = ("server", "node", "host", "hostname", "ip", "instance", "name")
_TIME = ("time", "timestamp", "date", "datetime")


def is_table(path: Path, head: str) -> bool:
    """Whether a file's header has a time and a known power reading."""
    names = [normal(c) for c in head.split("\n", 1)[0].split(",")]
    return any(n in _TIME for n in names) and any(n in IPMI for n in names)


def normal(column: str) -> str:
    """`Sys Total Power (W)` as `sys_total_power`."""
    text = re.sub(r"\(.*?\)|\[.*?\]", "", column.strip().strip('"').lower())
    return re.sub(r"_(w|watts|c)$", "", re.sub(r"\W+", "_", text).strip("_"))


def read(source: ReadingSource, out: Path) -> list[Note]:
    """Writes the readings of a power table as Parquet in `out`. Raises InputError for a table without any."""
    import duckdb

    path = source.path
    con = duckdb.connect()
    try:
        con.execute(f"SET memory_limit='{source.memory}'; SET TimeZone='UTC'")
        con.execute(
            f"CREATE TABLE t AS SELECT * FROM read_csv('{_sql(str(path))}', header=true, all_varchar=true, null_padding=true)"
        )
        columns = [str(r[0]) for r in con.execute("DESCRIBE t").fetchall()]
        by_name = {normal(c): c for c in columns}
        time = next((by_name[n] for n in _TIME if n in by_name), None)
        node = next((by_name[n] for n in _NODE if n in by_name), None)
        readings = [(c, IPMI[normal(c)]) for c in columns if normal(c) in IPMI]
        if time is None or not readings:
            raise InputError(
                "the table has no column of times or none of power",
                where=str(path),
                hint=f"Columns that are read: {', '.join(sorted(IPMI))}",
            )
        notes = []
        unknown = [c for c in columns if c not in (time, node) and normal(c) not in IPMI]
        if unknown:
            notes.append(
                Note(
                    "set aside",
                    f"columns that are not read: {', '.join(unknown[:8])}",
                    len(unknown),
                    len(columns),
                    path.name,
                )
            )
        if node is None:
            notes.append(Note("missing", "the table does not say which server a row is of", source=path.name))
        stamp = f"(TRY_CAST(t.{_name(time)} AS TIMESTAMPTZ) AT TIME ZONE 'UTC')"
        total, bad = con.execute(f"SELECT count(*), count(*) FILTER ({stamp} IS NULL) FROM t").fetchall()[0]
        if bad:
            notes.append(Note("set aside", "rows without a readable time", bad, total, path.name))
        who = f"t.{_name(node)}" if node else "NULL::VARCHAR"
        cluster = "NULL::VARCHAR" if source.cluster is None else f"'{_sql(source.cluster)}'"
        parts = []
        for column, metric in readings:
            number = f"TRY_CAST(regexp_extract(t.{_name(column)}, '^\\s*(-?[0-9.]+(?:[eE][-+]?[0-9]+)?)', 1) AS DOUBLE)"
            refused = con.execute(
                f"SELECT count(*) FROM t WHERE t.{_name(column)} IS NOT NULL AND {number} IS NULL "
                f"AND lower(trim(t.{_name(column)})) NOT IN ('', 'nan', 'na', 'n/a', 'null')"
            ).fetchall()[0][0]
            if refused:
                notes.append(
                    Note("set aside", f"values of {column} that are no numbers", refused, total, path.name)
                )
            parts.append(
                f"SELECT {stamp} AS time_utc, {cluster} AS cluster, {who} AS node, NULL::SMALLINT AS gpu, NULL::VARCHAR AS device, "
                f"'{metric}' AS metric, {number} AS value FROM t WHERE {stamp} IS NOT NULL AND {number} IS NOT NULL"
            )
        union = " UNION ALL ".join(parts)
        con.execute(
            f"COPY (SELECT * FROM ({union}) ORDER BY metric, node, time_utc) TO '{_sql(str(out / 'ipmi.parquet'))}' "
            "(FORMAT parquet, COMPRESSION zstd)"
        )
        return notes
    except duckdb.Error as e:
        raise InputError(f"the table cannot be read: {str(e).splitlines()[0]}", where=str(path)) from e
    finally:
        con.close()


def _name(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'


def _sql(text: str) -> str:
    return text.replace("'", "''")
