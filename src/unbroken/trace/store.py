"""The tables of a trace in DuckDB, out of core: what the readers fill and the statistics query.

In memory while the inputs are small; in a scratch file with a memory limit otherwise. Views of Parquet files
that are already in our schema are queried where they lie.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..errors import MissingExtra
from ..machine import usable_memory
from ..samples.schema import TABLES
from ..samples.tables import Note, Rejected, Result
from ..units import Bytes

if TYPE_CHECKING:
    import duckdb

ON_DISK_ABOVE = Bytes("512MiB")
"""Inputs larger than this are staged in a scratch file instead of in memory."""


def open_duckdb(path: str, *, memory: Bytes, threads: int, scratch: Path) -> duckdb.DuckDBPyConnection:
    """A DuckDB connection with a memory limit, which spills into `scratch` and stays off the network."""
    try:
        import duckdb
    except ImportError as e:
        raise MissingExtra("DuckDB", "trace", what="`unbroken trace`") from e
    con = duckdb.connect(
        path,
        config={
            "threads": threads,
            "memory_limit": f"{int(memory) // 2**20}MiB",
            "temp_directory": str(scratch),
            "preserve_insertion_order": False,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        },
    )
    con.execute("SET TimeZone = 'UTC'")
    return con


def literal(text: str) -> str:
    """Text as an SQL string."""
    return "'" + text.replace("'", "''") + "'"


def name(text: str) -> str:
    """Text as an SQL name."""
    return '"' + text.replace('"', '""') + '"'


class Store:
    """One trace: tables `jobs`, `nodes`, `samples`, `incidents`, what was rejected, and notes."""

    def __init__(
        self,
        *,
        memory: Bytes | None = None,
        threads: int | None = None,
        input_bytes: int = 0,
        scratch: Path | None = None,
    ) -> None:
        """Opens an empty store. `memory` is what DuckDB may hold (default: half of the machine's)."""
        self.threads = threads or len(os.sched_getaffinity(0))
        self.memory = memory or default_memory()
        self.scratch = Path(tempfile.mkdtemp(prefix="unbroken-trace-", dir=scratch))
        try:
            on_disk = input_bytes > ON_DISK_ABOVE
            path = str(self.scratch / "trace.duckdb") if on_disk else ":memory:"
            self.con = open_duckdb(path, memory=self.memory, threads=self.threads, scratch=self.scratch)
        except BaseException:
            shutil.rmtree(self.scratch, ignore_errors=True)
            raise
        self.notes: list[Note] = []
        self.parts: dict[str, list[str]] = {t: [] for t in TABLES}
        self._serial = 0
        self.con.execute("CREATE TABLE rejected (source VARCHAR, reason VARCHAR, text VARCHAR)")
        # readings that were counted while they were read, instead of being kept: see readers/wide.py
        self.con.execute("CREATE TABLE counted (cluster VARCHAR, metric VARCHAR, v DOUBLE, n BIGINT)")
        self.con.execute(
            "CREATE TABLE moments (cluster VARCHAR, metric VARCHAR, time_utc TIMESTAMP, mean DOUBLE, n BIGINT)"
        )
        self.counted = False
        self.build_views()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection and removes the scratch files."""
        self.con.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def fresh(self, stem: str) -> str:
        """A name that no table of the store has."""
        self._serial += 1
        return f"{stem}_{self._serial}"

    def note(self, note: Note) -> None:
        """Remembers a note, once."""
        if note not in self.notes:
            self.notes.append(note)

    def add_part(self, table: str, part: str) -> None:
        """Makes a staged table or view part of the table `jobs`, `nodes`, `samples` or `incidents`."""
        self.parts[table].append(part)
        self.build_views()

    def build_views(self) -> None:
        """(Re)creates the four tables as unions of their parts, empty where there is none."""
        for table in TABLES.values():
            parts = self.parts[table.name]
            cols = ", ".join(name(c) for c in table.names)
            if parts:
                body = " UNION ALL ".join(f"SELECT {cols} FROM {p}" for p in parts)
            else:
                nulls = ", ".join(f"CAST(NULL AS {c.type}) AS {name(c.name)}" for c in table.columns)
                body = f"SELECT {nulls} WHERE false"
            self.con.execute(f"CREATE OR REPLACE VIEW {table.name} AS {body}")

    def has(self, table: str) -> bool:
        """Whether the table has any part; samples also where readings were only counted."""
        return bool(self.parts[table]) or (table == "samples" and self.counted)

    def add_histogram(
        self,
        cluster: str,
        metric: str,
        rows: Sequence[tuple[float, int]],
        moments: Sequence[tuple[Any, float, int]],
    ) -> None:
        """Adds counted readings: (value, count), and (seconds since 1970, mean, count)."""
        import pyarrow as pa

        self.con.register(
            "rows_arrow", pa.table({"v": [float(r[0]) for r in rows], "n": [int(r[1]) for r in rows]})
        )
        self.con.execute(
            f"INSERT INTO counted SELECT {literal(cluster)}, {literal(metric)}, v, n FROM rows_arrow"
        )
        self.con.unregister("rows_arrow")
        if moments:
            table = pa.table(
                {
                    "t": [float(m[0]) for m in moments],
                    "m": [m[1] for m in moments],
                    "n": [m[2] for m in moments],
                }
            )
            self.con.register("rows_arrow", table)
            self.con.execute(
                f"INSERT INTO moments SELECT {literal(cluster)}, {literal(metric)}, make_timestamp(CAST(t * 1e6 AS BIGINT)), m, n "
                "FROM rows_arrow"
            )
            self.con.unregister("rows_arrow")
        self.counted = True

    def query(self, sql: str, params: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        rows: list[tuple[Any, ...]] = (
            self.con.execute(sql, params) if params else self.con.execute(sql)
        ).fetchall()
        return rows

    def one(self, sql: str) -> tuple[Any, ...]:
        """The first row of a query that has one."""
        row: tuple[Any, ...] | None = self.con.execute(sql).fetchone()
        assert row is not None
        return row

    def result(self, name: str, title: str, sql: str, remark: str = "") -> Result:
        """A query as a Result, its columns named as the query names them."""
        cur = self.con.execute(sql)
        columns = tuple(d[0] for d in cur.description or ())
        return Result(name, title, columns, tuple(cur.fetchall()), remark)

    def reject(self, rows: Sequence[Rejected]) -> None:
        """Keeps rows aside that could not be read."""
        if rows:
            self.con.executemany(
                "INSERT INTO rejected VALUES (?, ?, ?)", [(r.source, r.reason, r.text) for r in rows]
            )

    def rejected(self, limit: int = 1000) -> list[Rejected]:
        """The first rows that were rejected."""
        rows = self.query(f"SELECT source, reason, text FROM rejected ORDER BY source, reason LIMIT {limit}")
        return [Rejected(*r) for r in rows]

    def rejected_count(self) -> int:
        """How many rows were rejected."""
        return int(self.one("SELECT count(*) FROM rejected")[0])


def default_memory() -> Bytes:
    """Half of the machine's memory, at least 512 MiB; the cgroup's limit counts where it is lower."""
    return Bytes(max(usable_memory() // 2, 512 * 2**20))
