"""Parquet files in our own schema, queried where they lie; and Parquet files of anything else, by mapping."""

from __future__ import annotations

from pathlib import Path

from ...errors import ContractError, InputError
from ...samples.schema import JOBS, SAMPLES, STATES, TABLES, VERSION, Table
from ...samples.tables import Note
from ..store import Store, literal, name
from .base import Head, ReadOptions
from .delimited import collect_rejects, instant, read_delimited
from .staging import Draft, account, finished_sql, stage
from .table import KEYS, check_mapping, cluster_from, guess, type_sql


class ParquetReader:
    """Reads Parquet: jobs, nodes, samples and incidents in our schema, or any table of jobs."""

    name = "parquet"
    title = "Parquet: this project's own tables, or any table of jobs"

    def score(self, head: Head) -> int:
        """Sure of Parquet."""
        return 100 if head.parquet else 0

    def read(self, store: Store, head: Head, options: ReadOptions) -> None:
        """Adds a view of the file; jobs are checked once, and copied only where something has to be fixed."""
        table = own_table(head)
        source = f"read_parquet({literal(str(head.path))})"
        if table is None:
            read_external(store, head, options, source)
        elif table is JOBS:
            read_jobs(store, head, options, source)
        else:
            cols = ", ".join(column_or_null(table, c, head.parquet) for c in table.names)
            view = store.fresh(f"{table.name}_part")
            store.con.execute(f"CREATE VIEW {view} AS SELECT {cols} FROM {source}")
            store.add_part(table.name, view)


class SamplesTextReader:
    """Reads samples in our schema as text: spools and packed files of `unbroken telemetry` on machines without Parquet."""

    name = "samples"
    title = "samples as text: *.spool.csv and *.csv.gz of `unbroken telemetry`"

    def score(self, head: Head) -> int:
        """Sure where the columns are the schema's."""
        return 96 if {"time_utc", "metric", "value"} <= head.lower else 0

    def read(self, store: Store, head: Head, options: ReadOptions) -> None:
        """Adds the rows; a torn last line is rejected."""
        text = read_delimited(store, head, head.columns, header=True)
        part = store.fresh("samples_part")
        columns = []
        for c in SAMPLES.columns:
            found = text.find(c.name)
            if found is None:
                columns.append(f"CAST(NULL AS {c.type}) AS {name(c.name)}")
            elif c.type == "TIMESTAMP":
                columns.append(f"{instant(found)} AS {name(c.name)}")
            else:
                columns.append(f"try_cast({found} AS {c.type}) AS {name(c.name)}")
        store.con.execute(f"CREATE TABLE {part} AS SELECT {', '.join(columns)} FROM {text.source}")
        bad = int(
            store.one(
                f"SELECT count(*) FROM {part} WHERE time_utc IS NULL OR metric IS NULL OR value IS NULL"
            )[0]
        )
        if bad:
            store.con.execute(f"DELETE FROM {part} WHERE time_utc IS NULL OR metric IS NULL OR value IS NULL")
            store.note(
                Note("set aside", "readings without a time, metric or value", bad, source=head.path.name)
            )
        collect_rejects(store, text, head.path.name)
        store.add_part("samples", part)


def own_table(head: Head) -> Table | None:
    """Which table of the schema the file holds; raises ContractError if it is of a newer version."""
    said = head.schema
    if said:
        kind, _, version = said.partition(" ")
        if not version.isdigit() or int(version) > VERSION or kind not in TABLES:
            raise ContractError(
                f"the file is in schema '{said}', this version knows up to {VERSION}",
                where=str(head.path),
                hint="Update unbroken",
            )
        return TABLES[kind]
    have = set(head.parquet)
    for table in TABLES.values():
        required = {c.name for c in table.columns if c.required}
        if required <= have and len(set(table.names) & have) >= min(4, len(table.names)):
            return table if table is not JOBS or have & {"submit_utc", "start_utc", "end_utc"} else None
    return None


def column_or_null(table: Table, column: str, have: tuple[str, ...]) -> str:
    """The column cast to the schema's type, or NULL of that type."""
    kind = table.column(column).type
    return f"CAST({name(column) if column in have else 'NULL'} AS {kind}) AS {name(column)}"


def read_jobs(store: Store, head: Head, options: ReadOptions, source: str) -> None:
    """A view of jobs in our schema. The checks run over it; where they find nothing the file is used as it is."""
    have = head.parquet
    columns = {c: f"CAST({name(c)} AS {JOBS.column(c).type})" for c in JOBS.names if c in have}
    if options.cluster:
        columns["cluster"] = literal(options.cluster)
    elif "cluster" not in have:
        columns["cluster"] = literal(cluster_from(head.path))
    for c in ("queue_s", "duration_s", "state"):
        columns.pop(c, None)
    draft = Draft(
        source,
        columns,
        name("state") if "state" in have else None,
        name("queue_s") if "queue_s" in have else None,
        name("duration_s") if "duration_s" in have else None,
        text="concat_ws('|', job_id, state, submit_utc, start_utc, end_utc)",
        state_extra={"UNKNOWN": "UNKNOWN"},
    )
    checked = finished_sql(draft, head.path.name)
    light = finished_sql(
        Draft(
            **{
                **draft.__dict__,
                "columns": {k: v for k, v in columns.items() if k not in ("nodes", "user", "name")},
            }
        ),
        head.path.name,
    )
    account(
        store,
        f"({light})",
        head.path.name,
        "UTC",
        with_text=finished_sql(draft, head.path.name, with_text=True),
    )
    view = store.fresh("jobs_part")
    if set(JOBS.names) <= set(have) and not options.cluster and clean(store, head, source):
        cols = ", ".join(name(c) for c in JOBS.names)
        store.con.execute(f"CREATE VIEW {view} AS SELECT {cols} FROM {source}")
    else:
        cols = ", ".join(name(c) for c in JOBS.names)
        store.con.execute(f"CREATE VIEW {view} AS SELECT {cols} FROM ({checked}) WHERE _reject IS NULL")
    store.add_part("jobs", view)


def clean(store: Store, head: Head, source: str) -> bool:
    """Whether the file can be used as it is: nothing was rejected or fixed, and nothing is left to be computed."""
    fixed = ("set aside", "repaired", "missing", "assumption")
    if any(n.source == head.path.name and n.kind in fixed for n in store.notes):
        return False
    states = ", ".join(literal(s) for s in STATES)
    left = store.one(
        "SELECT count(*) FROM (SELECT * FROM "
        + source
        + ") WHERE (duration_s IS NULL AND start_utc IS NOT NULL AND end_utc "
        "IS NOT NULL) OR (queue_s IS NULL AND submit_utc IS NOT NULL AND start_utc IS NOT NULL) OR (start_utc IS NULL AND "
        f"(queue_s IS NOT NULL OR duration_s IS NOT NULL)) OR state IS NULL OR state NOT IN ({states}) OR job_id IS NULL OR "
        "state_raw IS NULL OR (state IN ('RUNNING', 'PENDING') AND end_utc IS NOT NULL)"
    )[0]
    return not left


def read_external(store: Store, head: Head, options: ReadOptions, source: str) -> None:
    """Any other Parquet table of jobs, by mapping or by usual names."""
    as_head = Head(head.path, "", head.parquet)
    mapping = {**guess(head.parquet), **check_mapping(options.mapping, as_head)}
    if not set(mapping) & {"submit", "start", "end", "duration"}:
        raise InputError(
            "the Parquet file is neither in our schema nor has a time or a duration that is known by its name",
            where=str(head.path),
            hint="Name the columns: --map submit=COLUMN,start=COLUMN,end=COLUMN,gpus=COLUMN,state=COLUMN. It has: "
            + ", ".join(head.parquet[:30]),
        )
    types = {str(r[0]): str(r[1]) for r in store.query(f"DESCRIBE SELECT * FROM {source}")}
    columns: dict[str, str] = {"cluster": literal(options.cluster or cluster_from(head.path))}
    state = queue = duration = None
    for key, column in mapping.items():
        schema, kind = KEYS[key]
        c = name(column)
        match kind:
            case "state":
                state = f"CAST({c} AS VARCHAR)"
            case "queue":
                queue = f"try_cast({c} AS DOUBLE)"
            case "duration":
                duration = f"try_cast({c} AS DOUBLE)"
            case "type":
                columns[schema] = type_sql(f"CAST({c} AS VARCHAR)")
            case "time":
                # a timestamp is taken as it is; numbers and text as in a text file
                direct = types[column].startswith("TIMESTAMP") or types[column] == "DATE"
                columns[schema] = (
                    f"make_timestamp(epoch_us(CAST({c} AS TIMESTAMPTZ)))"
                    if direct
                    else instant(f"CAST({c} AS VARCHAR)")
                )
            case "list":
                columns[schema] = (
                    c
                    if types[column] == "VARCHAR[]"
                    else f"string_split_regex(CAST({c} AS VARCHAR), '[,; ]+')"
                )
            case _:
                columns[schema] = f"try_cast({c} AS {JOBS.column(schema).type})"
    store.note(
        Note(
            "assumption",
            "columns taken as: " + ", ".join(f"{k} = {v}" for k, v in mapping.items()),
            source=head.path.name,
        )
    )
    stage(store, Draft(source, columns, state, queue, duration), Path(head.path).name, options.zone)
