"""Delimited text as a DuckDB source: every column as text, malformed lines rejected; SQL for values in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...samples.tables import Note
from ..store import Store, literal, name
from .base import Head

NOTHING = (
    "",
    " ",
    "None",
    "none",
    "NULL",
    "null",
    "NaN",
    "nan",
    "NaT",
    "N/A",
    "NA",
    "-",
    "<none>",
    "Unknown",
    "unknown",
)
"""Texts that stand for nothing in scheduler exports."""


@dataclass(frozen=True)
class Delimited:
    """A FROM clause over a text file, its columns, and the names of the tables that collect bad lines."""

    source: str
    columns: tuple[str, ...]
    rejects: str
    scans: str

    def find(self, *names: str) -> str | None:
        """The SQL name of the first of these columns that the file has, in any case."""
        lower = {c.lower(): c for c in reversed(self.columns)}
        for n in names:
            if n.lower() in lower:
                return name(lower[n.lower()])
        return None

    def whole(self) -> str:
        """An expression for the row's own text."""
        cols = ", ".join(f"coalesce({name(c)}, '')" for c in self.columns)
        return f"concat_ws('|', {cols})"


def read_delimited(
    store: Store, head: Head, columns: Sequence[str], *, header: bool, quote: str = '"'
) -> Delimited:
    """The file as a source whose columns are all text, with lines of the wrong shape collected aside."""
    seen: dict[str, int] = {}
    unique = []
    for i, c in enumerate(columns):
        base = c or f"column{i}"
        key = base.lower()
        seen[key] = seen.get(key, 0) + 1
        unique.append(base if seen[key] == 1 else f"{base}_{seen[key]}")
    rejects, scans = store.fresh("csv_rejects"), store.fresh("csv_scans")
    types = ", ".join(f"{literal(c)}: 'VARCHAR'" for c in unique)
    nothing = ", ".join(map(literal, NOTHING))
    source = (
        f"read_csv({literal(str(head.path))}, auto_detect=false, header={str(header).lower()}, "
        f"delim={literal(head.delimiter)}, quote={literal(quote)}, escape={literal(quote)}, "
        f"columns={{{types}}}, nullstr=[{nothing}], ignore_errors=true, store_rejects=true, "
        f"rejects_table={literal(rejects)}, rejects_scan={literal(scans)})"
    )
    return Delimited(source, tuple(unique), rejects, scans)


def collect_rejects(store: Store, table: Delimited, source: str) -> None:
    """Moves the lines that the scan could not split into the store's rejected rows, with a note."""
    exists = store.one(f"SELECT count(*) FROM duckdb_tables() WHERE table_name = {literal(table.rejects)}")[0]
    if not exists:
        return
    n = int(store.one(f"SELECT count(*) FROM {table.rejects}")[0])
    if n:
        lines = store.query(
            f"SELECT line, any_value(lower(replace(CAST(error_type AS VARCHAR), '_', ' '))), any_value(csv_line) "
            f"FROM {table.rejects} GROUP BY line ORDER BY line LIMIT 3"
        )
        store.con.execute(
            f"INSERT INTO rejected SELECT {literal(source)}, 'line ' || line || ': ' || "
            f"lower(replace(CAST(any_value(error_type) AS VARCHAR), '_', ' ')), any_value(csv_line) "
            f"FROM {table.rejects} GROUP BY line"
        )
        examples = tuple(f"line {r[0]}: {r[1]}: {str(r[2])[:120]}" for r in lines)
        n = int(store.one(f"SELECT count(DISTINCT line) FROM {table.rejects}")[0])
        store.note(Note("set aside", "lines that do not have the header's shape", n, 0, source, examples))
    store.con.execute(f"DROP TABLE IF EXISTS {table.rejects}")
    store.con.execute(f"DROP TABLE IF EXISTS {table.scans}")


def missing(column: str) -> str:
    """Whether a text is empty or one of the words for nothing (the scan has made NULL of them)."""
    return f"({column} IS NULL)"


def instant(column: str) -> str:
    """A timestamp in UTC from text: ISO 8601 with or without a zone, or seconds to nanoseconds since 1970.

    Times without a zone are in the session's zone. (A cast to TIMESTAMP would ignore a zone that is there.)
    """
    number = f"try_cast({column} AS DOUBLE)"
    text = f"make_timestamp(epoch_us(try_cast({column} AS TIMESTAMPTZ)))"
    epoch = (
        f"make_timestamp(CAST(CASE WHEN abs({number}) < 1e11 THEN {number} * 1e6 WHEN abs({number}) < 1e14 THEN "
        f"{number} * 1e3 WHEN abs({number}) < 1e17 THEN {number} ELSE {number} / 1e3 END AS BIGINT))"
    )
    # the same instant written with the name of a zone that DuckDB does not know
    short = (
        f"make_timestamp(epoch_us(try_cast(regexp_replace(regexp_replace({column}, ' P[DS]T$', ' America/Los_Angeles'), "
        f"' (UTC|GMT)$', '+00') AS TIMESTAMPTZ)))"
    )
    return f"coalesce({text}, CASE WHEN {column} ~ '^[0-9.eE+]+$' THEN {epoch} WHEN {column} ~ ' [A-Z]{{3}}$' THEN {short} END)"


def number(column: str) -> str:
    """A number from text; NULL where there is none."""
    return f"try_cast({column} AS DOUBLE)"


def text(column: str) -> str:
    """Text without blanks around it."""
    return f"nullif(trim({column}), '')"


def zoneless(column: str) -> str:
    """Whether a time is written without a zone: nothing after the time of day that looks like one, and no number."""
    tail = f"substr({column}, 12)"
    return (
        f"({column} IS NOT NULL AND contains({column}, ':') AND NOT contains({tail}, '+') AND NOT contains({tail}, '-') "
        f"AND NOT ends_with({column}, 'Z') AND NOT ends_with({column}, 'T') AND NOT ends_with({column}, 'C'))"
    )
