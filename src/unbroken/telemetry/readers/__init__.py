"""Readers of other people's recordings: files in, Parquet files of the trace schema's `samples` out.

prometheus  ranges of a Prometheus server (of dcgm-exporter, node-exporter), and saved scrapes
ipmi        tables of server power
wide        one column a server or GPU, one file a metric: the released Acme tables
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...errors import InputError, StorageError, UsageError
from ...samples.tables import Note
from . import ipmi, prometheus, wide
from .names import ReadingSource

__all__ = ["FORMATS", "Converted", "ReadingSource", "convert", "detect", "fetch"]

Read = Callable[[ReadingSource, Path], list[Note]]

FORMATS: dict[str, tuple[Callable[[Path, str], bool], Read]] = {
    "prometheus": (prometheus.is_range, prometheus.read_range),
    "scrape": (prometheus.is_scrape, prometheus.read_scrape),
    "ipmi": (ipmi.is_table, ipmi.read),
    "acme": (wide.is_table, wide.read),
}
"""Name: (whether a file with this beginning is of the format, the reader)."""


@dataclass(frozen=True)
class Converted:
    """One file that was read."""

    source: Path
    format: str
    folder: Path
    rows: int
    notes: tuple[Note, ...]


def detect(path: Path) -> str:
    """The name of a file's format. Raises InputError."""
    try:
        with open(path, "rb") as f:
            head = f.read(1 << 16).decode("utf-8-sig", errors="replace")
    except OSError as e:
        raise InputError(f"the file cannot be read: {e.strerror}", where=str(path)) from e
    for name, (matches, _) in FORMATS.items():
        if matches(path, head):
            return name
    raise InputError(
        "the file is none that telemetry knows" if head.strip() else "the file is empty",
        where=str(path),
        hint=f"Name its format with --format: {', '.join(FORMATS)}",
    )


def convert(
    paths: Sequence[Path],
    out: Path,
    *,
    cluster: str | None = None,
    format: str | None = None,
    metric: str | None = None,
    gpu_memory_gib: float | None = None,
    memory: str = "1GiB",
) -> list[Converted]:
    """Reads each file into a folder of its own below `out`, whole or not at all; a file done before is done again.

    Raises InputError for a file that cannot be understood, StorageError for a folder that cannot be written.
    """
    if format is not None and format not in FORMATS:
        raise UsageError(f"there is no format '{format}'", hint=f"Formats: {', '.join(FORMATS)}")
    done = []
    for path in paths:
        kind = format or detect(path)
        source = ReadingSource(path, cluster, metric, gpu_memory_gib, memory)
        target = out / path.name.split(".")[0]
        notes, rows = _whole(target, partial(FORMATS[kind][1], source))
        done.append(Converted(path, kind, target, rows, tuple(notes)))
    return done


def fetch(
    url: str,
    query: str,
    start: float,
    end: float,
    step_s: float,
    out: Path,
    *,
    cluster: str | None = None,
    metric: str | None = None,
) -> Converted:
    """Asks a Prometheus server for a range and keeps it in a folder below `out`, whole or not at all.

    Raises InputError for a server that cannot be asked, StorageError for a folder that cannot be written.
    """
    source = ReadingSource(Path(url), cluster, metric)
    target = out / (re.sub(r"\W+", "_", query).strip("_")[:80] or "query")
    answers = prometheus.fetch(url, query, start, end, step_s)

    def read(aside: Path) -> list[Note]:
        return prometheus.write(
            (row for a in answers for row in prometheus.range_rows(a, source)), source, aside
        )

    notes, rows = _whole(target, read)
    return Converted(Path(url), "prometheus", target, rows, tuple(notes))


def _whole(target: Path, read: Callable[[Path], list[Note]]) -> tuple[list[Note], int]:
    """Fills a folder aside and puts it in the target's place; returns the notes and the rows."""
    aside = target.with_name(f".{target.name}.aside")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        notes = read(aside)
        shutil.rmtree(aside / ".spill", ignore_errors=True)
        rows = _rows(aside)
        if target.exists():
            shutil.rmtree(target)
        aside.rename(target)
        return notes, rows
    except OSError as e:
        raise StorageError(f"the readings cannot be written: {e.strerror or e}", where=str(target)) from e
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _rows(folder: Path) -> int:
    import pyarrow.parquet as pq

    return sum(pq.read_metadata(f).num_rows for f in folder.glob("*.parquet"))
