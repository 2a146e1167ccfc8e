"""A store written out: as it is, or by pseudonyms for publication."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...private import read_secret
from ...samples.schema import METADATA_KEY, REJECTED_FILE, TABLES, VERSION
from ..store import Store, literal, name
from .disclosure import KEPT, PSEUDONYMS, REMOVED, expression

WEEK = 7 * 86400
PSEUDONYM_WORDS = "users, teams, job and incident ids, nodes, partitions, devices"


def write_tables(store: Store, folder: Path, *, csv: bool = False) -> dict[str, int]:
    """Writes jobs, nodes, samples and incidents that are there, and set_aside.csv; returns rows by file."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, int] = {}
    for table in TABLES:
        if store.has(table):
            file = f"{table}.csv" if csv else f"{table}.parquet"
            write_one(store, f"SELECT * FROM {table}", folder / file, table, csv)
            rows[file] = int(store.one(f"SELECT count(*) FROM {table}")[0])
    aside = folder / REJECTED_FILE
    aside.unlink(missing_ok=True)
    if store.rejected_count():
        copy(store, f"COPY rejected TO {literal(str(aside))} (HEADER)")
        rows[REJECTED_FILE] = store.rejected_count()
    return rows


def write_one(store: Store, sql: str, path: Path, table: str, csv: bool) -> None:
    """A query as a file that appears whole."""
    aside = path.with_name(f".{path.name}.aside")
    how = (
        "FORMAT csv, HEADER"
        if csv
        else f"FORMAT parquet, COMPRESSION zstd, KV_METADATA {{{literal(METADATA_KEY)}: {literal(f'{table} {VERSION}')}}}"
    )
    try:
        copy(store, f"COPY ({sql}) TO {literal(str(aside))} ({how})")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def copy(store: Store, sql: str) -> None:
    """Runs a COPY; raises OSError, as every other writer does, where the disk refuses."""
    import duckdb

    try:
        store.con.execute(sql)
    except duckdb.IOException as e:
        raise OSError(str(e).splitlines()[0]) from e


def anonymise_tables(
    store: Store, folder: Path, *, keep_names: bool, shift_s: float, key_file: Path | None,
    keep_clusters: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Writes the tables with pseudonyms; returns rows by file and what was done, in words.

    Pseudonyms are keyed hashes (HMAC-SHA256 with a secret key, which is forgotten unless a key file is given), so
    that nobody can try names out. Times may be moved by a whole number of weeks, which keeps hours and weekdays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    key = secret_key(key_file)
    weeks = 0
    if shift_s:
        most = max(1, int(shift_s // WEEK))
        weeks = int.from_bytes(hmac.digest(key, b"shift", "sha256")[:8], "big") % most + 1
    did = [f"{PSEUDONYM_WORDS}{'' if keep_clusters else ', clusters'} are pseudonyms by a secret key"]
    store.con.execute("CREATE OR REPLACE TABLE pseudonym (kind VARCHAR, plain VARCHAR, shown VARCHAR)")
    for kind, letter in PSEUDONYMS.items():
        values: set[str] = set()
        for table, spec in TABLES.items():
            if store.has(table) and kind in spec.names:
                values |= {
                    r[0]
                    for r in store.query(
                        f"SELECT DISTINCT {name(kind)} FROM {table} WHERE {name(kind)} IS NOT NULL"
                    )
                }
        if kind == "node" and store.has("jobs"):
            values |= {
                r[0] for r in store.query("SELECT DISTINCT unnest(nodes) FROM jobs WHERE nodes IS NOT NULL")
            }
        fill(store, kind, letter, values, key)
    rows: dict[str, int] = {}
    for table, spec in TABLES.items():
        if not store.has(table):
            continue
        columns = []
        for c in spec.columns:
            plain = f"t.{name(c.name)}"
            shown = expression(c.name, plain, keep_clusters=keep_clusters) if c.type == "VARCHAR" else None
            if c.name == "nodes":
                columns.append("nodes_shown AS nodes")
            elif c.name == "name" and keep_names:
                columns.append(name(c.name))
            elif c.type == "VARCHAR":
                # A text column that the table of policies forgets is removed, not shown.
                columns.append(f"CAST({shown or 'NULL'} AS VARCHAR) AS {name(c.name)}")
            elif c.type == "TIMESTAMP" and weeks:
                columns.append(f"{name(c.name)} - INTERVAL {weeks * 7} DAY AS {name(c.name)}")
            else:
                columns.append(name(c.name))
            if shown and c.name not in PSEUDONYMS and c.name not in REMOVED:
                lost = store.one(
                    f"SELECT count(*) FROM {table} t WHERE {plain} IS NOT NULL AND {shown} IS NULL"
                )
                if lost[0]:
                    did.append(f"{c.name} of {lost[0]:,} rows of {table} was free text and is removed")
        source = f"{table} t"
        if table == "jobs":
            source = (
                "(SELECT j.*, m.nodes_shown FROM jobs j LEFT JOIN (SELECT nodes AS key, list(shown ORDER BY place) AS "
                "nodes_shown FROM (SELECT nodes, unnest(nodes) AS node, generate_subscripts(nodes, 1) AS place FROM (SELECT "
                "DISTINCT nodes FROM jobs WHERE nodes IS NOT NULL)) d JOIN pseudonym p ON p.kind = 'node' AND p.plain = "
                "d.node GROUP BY nodes) m ON j.nodes = m.key) t"
            )
        file = f"{table}.parquet"
        # By what is shown: the same rows give the same file, and the order tells nothing that the rows do not.
        every = f"SELECT {', '.join(columns)} FROM {source} ORDER BY ALL"
        write_one(store, every, folder / file, table, False)
        rows[file] = int(store.one(f"SELECT count(*) FROM {table}")[0])
    did.append("job names are kept" if keep_names else "job names are removed")
    did.append("file names are removed")
    if keep_clusters:
        did.append("cluster names are kept")
    did.append(KEPT)
    if weeks:
        did.append(
            "all times are moved by a secret number of whole weeks: hours and weekdays are true, dates are not"
        )
    did.append(
        f"the key is kept in {key_file}"
        if key_file
        else "the key is forgotten: nobody can undo or repeat the mapping"
    )
    store.con.execute("DROP TABLE pseudonym")
    return {"written": rows, "did": did}


def fill(store: Store, kind: str, letter: str, values: Iterable[str], key: bytes) -> None:
    """Adds the pseudonyms of some values."""
    import pyarrow as pa

    plain = sorted(values)
    if not plain:
        return
    shown = [letter + hmac.new(key, f"{kind}\0{v}".encode(), hashlib.sha256).hexdigest()[:12] for v in plain]
    table = pa.table(
        {"kind": pa.array([kind] * len(plain)), "plain": pa.array(plain), "shown": pa.array(shown)}
    )
    store.con.register("pseudonym_arrow", table)
    store.con.execute("INSERT INTO pseudonym SELECT * FROM pseudonym_arrow")
    store.con.unregister("pseudonym_arrow")


def secret_key(path: Path | None) -> bytes:
    """A new key, or that of the file, which is created with mode 0600 where it is absent. Raises InputError, UnsafeFile."""
    if path is None:
        return secrets.token_bytes(32)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        key = read_secret(path)
        if len(key) != 32:
            raise InputError(
                "the file is no key of ours (32 bytes)", where=str(path), hint="Give another file name"
            ) from None
        return key
    except OSError as e:
        raise InputError(
            f"cannot create the key file: {e}", where=str(path), hint="Give a place you may write to"
        ) from e
    key = secrets.token_bytes(32)
    with os.fdopen(fd, "wb") as f:
        f.write(key)
    return key
