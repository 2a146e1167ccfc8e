"""What a reader is, what it may be told, and the first look at a file by which its format is detected."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ...errors import InputError, MissingExtra
from ...samples.schema import METADATA_KEY
from ...units import Bytes
from ..store import Store, literal, open_duckdb

PEEK = 1 << 18


@dataclass(frozen=True)
class ReadOptions:
    """What the user says about the files.

    `format`: a reader's name instead of detection. `zone`: the zone of times that carry none (IANA name).
    `cluster`: the cluster's name. `mapping`: schema column -> column of the file, for any table.
    `fields`: the column names of a file without a header.
    """

    format: str | None = None
    zone: str = "UTC"
    cluster: str | None = None
    mapping: Mapping[str, str] = field(default_factory=dict)
    fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class Head:
    """The start of a file: its text, and its columns and delimiter if it looks like a table."""

    path: Path
    text: str
    columns: tuple[str, ...] = ()
    delimiter: str = ","
    first_row: tuple[str, ...] = ()
    parquet: tuple[str, ...] = ()
    schema: str = ""
    """What the file's metadata says of our schema, e.g. `jobs 1`."""

    @property
    def lower(self) -> frozenset[str]:
        """The column names in lower case."""
        return frozenset(c.lower() for c in (self.columns or self.parquet))

    @property
    def is_json(self) -> bool:
        """Whether the text starts as JSON does."""
        return self.text.lstrip()[:1] in ("{", "[")


class Reader(Protocol):
    """Reads one format into a store."""

    name: str
    title: str

    def score(self, head: Head) -> int:
        """How sure it is that the file is its own: 0 (not) to 100."""
        ...

    def read(self, store: Store, head: Head, options: ReadOptions) -> None:
        """Adds the file's rows, rejects and notes to the store."""
        ...


def opened(path: Path) -> io.BufferedIOBase:
    """The file's bytes, unpacked if it is .gz or .zst."""
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".zst":
        try:
            import zstandard
        except ImportError as e:
            raise MissingExtra("zstandard", "diagnose", what=f"reading {path.name}") from e
        return zstandard.open(path, "rb")  # type: ignore[no-any-return]
    return open(path, "rb")


def peek(path: Path, fields: tuple[str, ...] = ()) -> Head:
    """The first look at a file. Raises InputError if it cannot be opened or has nothing in it."""
    try:
        with opened(path) as f:
            data = f.read(PEEK)
    except (OSError, EOFError) as e:
        raise InputError(
            f"cannot read the file: {e}", where=str(path), hint="Check the path and its rights"
        ) from e
    if not data:
        raise InputError(
            "the file is empty: not even a header", where=str(path), hint="Export the trace again"
        )
    if data[:4] == b"PAR1":
        columns, schema = parquet_columns(path)
        return Head(path, "", parquet=columns, schema=schema)
    text = data.decode("utf-8-sig", errors="replace")
    if "\x00" in text:
        raise InputError(
            "this is a binary file, not a table of text",
            where=str(path),
            hint="Give CSV, JSON, sacct -P output or Parquet (.gz and .zst are unpacked)",
        )
    if text.lstrip()[:1] in ("{", "["):
        return Head(path, text)
    lines = text.splitlines()
    first = next((line for line in lines if line.strip()), "")
    delimiter = max((",", "|", "\t", ";"), key=first.count)
    columns = split(first, delimiter)
    after = lines[lines.index(first) + 1 :] if first else []
    row = next((line for line in after if line.strip()), "")
    if fields:
        return Head(path, text, fields, delimiter, columns)
    return Head(path, text, columns, delimiter, split(row, delimiter) if row else ())


def split(line: str, delimiter: str) -> tuple[str, ...]:
    """The fields of one line; no quoting for `|`, which sacct does not quote."""
    if delimiter == "|":
        fields = tuple(line.rstrip("\r").split("|"))
    else:
        fields = tuple(next(csv.reader([line], delimiter=delimiter), ()))
    return tuple(f.strip() for f in fields)


def parquet_columns(path: Path) -> tuple[tuple[str, ...], str]:
    """(column names, our schema's name and version if it says so) of a Parquet file. Raises InputError if damaged."""
    import duckdb

    con = open_duckdb(":memory:", memory=Bytes("512MiB"), threads=1, scratch=Path(tempfile.gettempdir()))
    file = literal(str(path))
    try:
        columns = con.execute(f"DESCRIBE SELECT * FROM read_parquet({file})").fetchall()
        said = con.execute(
            f"SELECT decode(value) FROM parquet_kv_metadata({file}) WHERE decode(key) = {literal(METADATA_KEY)}"
        ).fetchall()
    except (duckdb.Error, OSError) as e:
        raise InputError(
            f"the Parquet file is damaged: {str(e).splitlines()[0]}",
            where=str(path),
            hint="Copy or write it again",
        ) from e
    finally:
        con.close()
    return tuple(str(c[0]) for c in columns), str(said[0][0]) if said else ""


def json_items(path: Path) -> list[dict[str, object]]:
    """The objects of a JSON file: a list, a Kubernetes list (`items`), one object, or one object a line.

    Objects are decoded one by one, so that a damaged end loses only itself. Raises InputError on anything else.
    """
    with opened(path) as f:
        text = f.read().decode("utf-8-sig", errors="replace")
    decoder = json.JSONDecoder()
    items: list[dict[str, object]] = []
    start = text.lstrip()[:1]
    try:
        if start == "[":
            value = json.loads(text)
            return [v for v in value if isinstance(v, dict)]
        at, n = 0, len(text)
        while at < n:
            while at < n and text[at].isspace():
                at += 1
            if at >= n:
                break
            value, at = decoder.raw_decode(text, at)
            if isinstance(value, dict) and isinstance(value.get("items"), list):
                items += [v for v in value["items"] if isinstance(v, dict)]
            elif isinstance(value, dict):
                items.append(value)
    except json.JSONDecodeError as e:
        line = text.count("\n", 0, e.pos) + 1
        raise InputError(
            f"the JSON is damaged at line {line}: {e.msg}",
            where=str(path),
            hint="Export it again; a file that was cut off cannot be read as JSON",
        ) from e
    return items
