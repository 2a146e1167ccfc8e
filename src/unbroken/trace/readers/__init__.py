"""Readers: files of many formats in, the one schema out."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from ...errors import InputError, TraceError, UsageError
from ...samples.schema import REJECTED_FILE
from ...samples.tables import Note
from ...units import Bytes
from ..store import Store
from .acme import AcmeReader, HeliosReader
from .alibaba import PaiReader, PodsReader
from .base import Head, Reader, ReadOptions, peek
from .incidents import FaultReader, IncidentReader
from .kubernetes import KubernetesReader
from .native import ParquetReader, SamplesTextReader
from .philly import PhillyReader
from .slurm import SlurmReader
from .table import TableReader
from .wide import WideReader, counts_over_time

__all__ = ["READERS", "ReadOptions", "detect", "load", "load_into"]

READERS: tuple[Reader, ...] = (
    ParquetReader(),
    SamplesTextReader(),
    AcmeReader(),
    HeliosReader(),
    PhillyReader(),
    PaiReader(),
    PodsReader(),
    SlurmReader(),
    KubernetesReader(),
    IncidentReader(),
    FaultReader(),
    WideReader(),
    TableReader(),
)

SUFFIXES = (".csv", ".txt", ".json", ".jsonl", ".parquet", ".psv", ".tsv", ".gz", ".zst", ".log", ".sacct")
COMPANIONS = ("pai_task_table", "pai_instance_table", "pai_sensor_table")


def detect(path: Path, options: ReadOptions) -> tuple[Reader, Head]:
    """The reader for a file and the first look at it. Raises InputError where none is sure enough."""
    head = peek(path, options.fields)
    if options.format:
        for r in READERS:
            if r.name == options.format:
                return r, head
        names = [r.name for r in READERS]
        near = difflib.get_close_matches(options.format, names, 1)
        raise UsageError(
            f"there is no format '{options.format}'",
            hint=f"Did you mean '{near[0]}'?" if near else f"Formats: {', '.join(names)}",
        )
    if options.mapping and not head.parquet and head.columns:
        return next(r for r in READERS if r.name == "table"), head
    best = max(READERS, key=lambda r: r.score(head))
    if best.score(head) < 10:
        if head.is_json:
            seen = "JSON that is neither Philly's job log, Kubernetes pods or events, nor incidents"
        elif len(head.columns) > 1:
            seen = f"a table with the columns {', '.join(head.columns[:12])}"
        else:
            seen = f"text that starts with {head.text[:60]!r}"
        if head.delimiter == "|" and len(head.columns) > 3:
            raise InputError(
                f"the format is not known: {seen}",
                where=str(path),
                hint="If this is sacct output without a header, name its fields: --fields JobID,State,Submit,Start,End,AllocTRES",
            )
        if (
            head.columns
            and head.columns[0].lower() in ("time", "timestamp", "ts", "date")
            and counts_over_time(head.columns[1:])
        ):
            raise InputError(
                f"these are counts over time ({', '.join(head.columns[1:5])}, ...), neither jobs nor the readings of one metric",
                where=str(path),
                hint="Give the records of the jobs themselves; for utilisation a table with a time and one column a GPU or server, "
                "named after its metric (GPU_UTIL.csv), or --format wide if its columns are GPUs after all",
            )
        raise InputError(
            f"the format is not known: {seen}",
            where=str(path),
            hint="Name the format (--format), or for a table of jobs its columns (--map submit=COLUMN,gpus=COLUMN,...); recordings "
            "of Prometheus, DCGM or IPMI go through `unbroken telemetry convert` first",
        )
    return best, head


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The files of the paths, folders opened. Raises InputError for what does not exist or holds nothing."""
    files: list[Path] = []
    for p in paths:
        if p.is_dir():
            inside = sorted(f for f in p.rglob("*") if f.is_file() and f.name.lower().endswith(SUFFIXES))
            inside = [f for f in inside if not f.name.startswith(COMPANIONS) and f.name != REJECTED_FILE]
            if not inside:
                raise InputError(
                    "no trace in the folder", where=str(p), hint="Give files, or a folder that has some"
                )
            files += inside
        elif p.exists():
            files.append(p)
        else:
            raise InputError("the file does not exist", where=str(p), hint="Check the path")
    return files


def load_into(store: Store, paths: Sequence[Path], options: ReadOptions) -> list[tuple[Path, str]]:
    """Reads files into a store; returns each with the format it was read as. Raises InputError."""
    import duckdb

    read = []
    refused: list[InputError] = []
    named = {p for p in paths if not p.is_dir()}
    for path in files_of(paths):
        try:
            reader, head = detect(path, options)
        except InputError as e:
            if path in named:
                raise
            # A folder may hold a README or an empty log beside the trace: said, and passed over.
            refused.append(e)
            store.note(
                Note("set aside", f"a file of the folder was passed over: {e.message}", source=path.name)
            )
            continue
        store.note(Note("info", f"read as {reader.title}", source=path.name))
        try:
            reader.read(store, head, options)
        except duckdb.OutOfMemoryException as e:
            raise TraceError(
                f"more than {store.memory} of memory is needed",
                where=str(path),
                hint="Give more (--memory), or a scratch folder with more room (--scratch)",
            ) from e
        except (
            duckdb.Error
        ) as e:  # a column that is missing, a value that fits no type, a file that ends early
            first = str(e).splitlines()[0]
            raise InputError(
                f"cannot be read as {reader.name}: {first}",
                where=str(path),
                hint="Check the file, or name its --format",
            ) from e
        read.append((path, reader.name))
    if refused and not read:
        raise refused[0]
    reject_duplicates(store)
    return read


def load(paths: Sequence[Path], options: ReadOptions | None = None, *, memory: Bytes | None = None,
         threads: int | None = None, scratch: Path | None = None) -> Store:  # fmt: skip
    """A store with everything that the files hold."""
    files = files_of(paths)
    size = sum(f.stat().st_size * (1 if f.suffix != ".gz" else 6) for f in files if f.suffix != ".parquet")
    store = Store(memory=memory, threads=threads, input_bytes=size, scratch=scratch)
    try:
        load_into(store, paths, options or ReadOptions())
    except BaseException:
        store.close()
        raise
    return store


def reject_duplicates(store: Store) -> None:
    """Keeps one of each set of equal rows; rows that share an id but differ stay and are counted."""
    if not store.has("jobs"):
        return
    total = int(store.one("SELECT count(*) FROM jobs")[0])
    # by parts, so that the ids of a large trace never lie in memory at once
    slices = max(1, total // 24_000_000)
    key = "hash(cluster, job_id)"
    doubled: list[int] = []
    for i in range(slices):
        part = f"WHERE {key} % {slices} = {i}" if slices > 1 else ""
        doubled += [
            int(r[0])
            for r in store.query(f"SELECT {key} AS h FROM jobs {part} GROUP BY h HAVING count(*) > 1")
        ]
    if not doubled:
        return
    import numpy as np
    import pyarrow as pa

    store.con.register("doubled_arrow", pa.table({"h": pa.array(np.array(doubled, dtype=np.uint64))}))
    keys = store.fresh("doubled")
    store.con.execute(f"CREATE TABLE {keys} AS SELECT h FROM doubled_arrow")
    store.con.unregister("doubled_arrow")
    rows = store.fresh("doubled_rows")
    store.con.execute(
        f"CREATE TABLE {rows} AS SELECT *, row_number() OVER (PARTITION BY cluster, job_id, submit_utc, start_utc, end_utc, "
        f"state ORDER BY source) AS _n, count(*) OVER (PARTITION BY cluster, job_id) AS _same "
        f"FROM jobs WHERE {key} IN (SELECT h FROM {keys})"
    )
    equal = int(store.one(f"SELECT count(*) FROM {rows} WHERE _n > 1")[0])
    differ = int(store.one(f"SELECT count(*) FROM {rows} WHERE _n = 1 AND _same > 1")[0])
    still = int(
        store.one(
            f"SELECT coalesce(sum(c), 0) FROM (SELECT count(*) AS c FROM {rows} WHERE _n = 1 GROUP BY cluster, job_id "
            "HAVING count(*) > 1)"
        )[0]
    )
    if equal:
        examples = tuple(
            str(r[0])
            for r in store.query(f"SELECT DISTINCT job_id FROM {rows} WHERE _n > 1 ORDER BY 1 LIMIT 3")
        )
        store.con.execute(
            f"INSERT INTO rejected SELECT source, 'the same row again', job_id FROM {rows} WHERE _n > 1"
        )
        store.note(
            Note("set aside", "the same row again (equal id, times and state)", equal, total, "", examples)
        )
    if still:
        store.note(
            Note(
                "info",
                "rows that share a job id but differ (requeued attempts?): all are kept",
                still,
                total,
            )
        )
    _ = differ
    if equal:
        cols = ", ".join(f'"{c}"' for c in _job_columns())
        parts = list(store.parts["jobs"])
        view = store.fresh("jobs_part")
        union = " UNION ALL ".join(f"SELECT {cols} FROM {p}" for p in parts)
        store.con.execute(
            f"CREATE VIEW {view} AS SELECT {cols} FROM ({union}) WHERE {key} NOT IN (SELECT h FROM {keys}) "
            f"UNION ALL SELECT {cols} FROM {rows} WHERE _n = 1"
        )
        store.parts["jobs"] = [view]
        store.build_views()


def _job_columns() -> tuple[str, ...]:
    from ...samples.schema import JOBS

    return JOBS.names
