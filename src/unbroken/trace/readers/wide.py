"""Wide utilisation tables: a time and one column for each server or GPU, one file for each metric.

Tens of gigabytes of them are counted in one pass (`samples.wide`), without writing the samples down: the
distribution, and means over time from rows spread over the file, are what the statistics need. (To get the samples
themselves, one a row, use `unbroken telemetry convert`.)
"""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from ...errors import InputError
from ...samples.schema import METRICS
from ...samples.tables import Note
from ..store import Store
from .base import Head, ReadOptions
from .table import cluster_from

if TYPE_CHECKING:
    from ...samples.wide import Counts

FILES: Mapping[str, tuple[str, float]] = {
    "GPU_UTIL": ("gpu_util_pct", 1.0),
    "SM_ACTIVE": ("sm_active_pct", 1.0),
    "SM_OCCUPANCY": ("sm_occupancy_pct", 1.0),
    "PIPE_TENSOR_ACTIVE": ("tensor_active_pct", 1.0),
    "DRAM_ACTIVE": ("dram_active_pct", 1.0),
    "MEM_COPY_UTIL": ("dram_active_pct", 1.0),
    "FB_USED": ("gpu_mem_used_gib", 1 / 1024),
    "POWER_USAGE": ("gpu_power_w", 1.0),
    "GPU_TEMP": ("gpu_temp_c", 1.0),
    "MEMORY_TEMP": ("gpu_mem_temp_c", 1.0),
    "MEM_CLOCK": ("mem_clock_mhz", 1.0),
    "SM_CLOCK": ("sm_clock_mhz", 1.0),
    "NODE_CPU_UTILIZATION": ("host_cpu_util_pct", 1.0),
    "NODE_MEMORY_UTILIZATION": ("host_mem_used_pct", 1.0),
    "NODE_IB_SEND": ("ib_tx_bytes_per_s", 1.0),
    "NODE_IB_RECEIVE": ("ib_rx_bytes_per_s", 1.0),
}
"""Names of the released files, their metric in the schema, and the factor to its unit."""

MOMENTS = 1000
"""Rows, evenly spread over the file, from which the means over time are taken."""


class WideReader:
    """Reads a table with a time and one column for each server or GPU."""

    name = "wide"
    title = (
        "wide utilisation tables: Time, one column a server or GPU (released Acme metrics, any of that shape)"
    )

    def score(self, head: Head) -> int:
        """Sure where the first column is a time and all others hold numbers."""
        if len(head.columns) < 3 or head.columns[0].lower() not in ("time", "timestamp", "ts", ""):
            return 0
        values = head.first_row[1:]
        if len(values) != len(head.columns) - 1:
            return 0
        if head.path.name.split(".")[0].upper() not in FILES and counts_over_time(head.columns[1:]):
            return 0
        numbers = sum(bool(re.fullmatch(r"-?[0-9.]+(e[+-]?[0-9]+)?|nan|NaN|NA|", v)) for v in values)
        return 90 if numbers == len(values) else 0

    def read(self, store: Store, head: Head, options: ReadOptions) -> None:
        """Adds the file's histogram and its means over time."""
        from ...samples.wide import count

        stem = head.path.name.split(".")[0]
        metric, factor = metric_of(stem)
        if head.path.suffix in (".gz", ".zst"):
            raise InputError(
                "wide tables are read in pieces, so not packed", where=str(head.path), hint="Unpack it first"
            )
        counts = count(head.path, processes=store.threads)
        if not counts.count:
            raise InputError("the table holds no number", where=str(head.path), hint="Check the file")
        if metric.endswith("_active_pct") and counts.quantiles([1.0])[0] <= 1.0001:
            factor *= 100
            store.note(
                Note(
                    "assumption",
                    "values are at most 1: taken as shares, shown in percent",
                    source=head.path.name,
                )
            )
        folder = head.path.resolve().parent
        cluster = options.cluster or cluster_from(folder / folder.name)
        moments = [(t, m * factor, n) for t, m, n in moments_of(head.path, head, options)]
        store.add_histogram(cluster, metric, [(v * factor, n) for v, n in rows_of(counts)], moments)
        for what, n in (
            ("rows of another width than the header", counts.ragged),
            ("cells that are no numbers", counts.unreadable),
        ):
            if n:
                store.note(Note("set aside", what, n, source=head.path.name))
        store.note(
            Note(
                "info",
                f"{counts.count:,} readings of {len(counts.columns):,} columns, as {metric}; {counts.missing:,} empty; means over "
                f"time from {len(moments):,} rows",
                source=head.path.name,
            )
        )
        if metric not in METRICS:
            store.note(
                Note(
                    "assumption",
                    f"the file's name is no metric that is known: shown as {metric}",
                    source=head.path.name,
                )
            )


_COUNTED = re.compile(
    r"(?i)(?:^|[_ ])(?:num|count|number|total|jobs?|pending|running|queued|waiting|idle|free|used|alloc\w*|avail\w*|capacity|util\w*|rate|ratio|pct|percent|size|load|mean|avg|max|min)(?:$|[_ ])"
)


def counts_over_time(columns: Sequence[str]) -> bool:
    """Whether a table's columns are different quantities (running_job_num, idle_gpu_num), not servers or GPUs."""
    return sum(bool(_COUNTED.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", c))) for c in columns) * 2 >= len(
        columns
    )


def metric_of(stem: str) -> tuple[str, float]:
    """The metric of a file by its name, and the factor to its unit."""
    upper = re.sub(r"^DCGM_FI_(DEV|PROF)_", "", stem.upper())
    if upper in FILES:
        return FILES[upper]
    if upper.startswith("GPU_") and upper.endswith("_POWER"):
        return "node_power_w", 1.0
    if upper.startswith("CPU_") and upper.endswith("_POWER"):
        return "cpu_node_power_w", 1.0
    return stem.lower(), 1.0


def rows_of(counts: Counts) -> list[tuple[float, int]]:
    """(value, count) of a table: at 2,001 even steps of its range and at every thousandth of its readings."""
    import numpy as np

    low, high = counts.quantiles([0.0, 1.0])
    grid = np.unique(
        np.round(
            np.concatenate([np.linspace(low, high, 2001), counts.quantiles(list(np.linspace(0, 1, 1001)))]), 3
        )
    )
    ends = np.round(np.array(counts.share_below(grid.tolist())) * counts.count).astype(np.int64)
    ends[-1] = counts.count
    here = np.diff(np.concatenate([[0], ends]))
    return [(float(v), int(n)) for v, n in zip(grid, here, strict=True) if n > 0]


def moments_of(path: Path, head: Head, options: ReadOptions) -> list[tuple[float, float, int]]:
    """(seconds since 1970, mean over all columns, count) of up to MOMENTS rows that are spread over the file."""
    size = path.stat().st_size
    found: dict[float, tuple[float, float, int]] = {}
    with open(path, "rb") as f:
        start = len(f.readline())
        for k in range(MOMENTS):
            f.seek(start + (size - start) * k // MOMENTS)
            if k:
                f.readline()
            line = f.readline().decode("utf-8", "replace").rstrip("\r\n")
            cells = line.split(head.delimiter)
            when = time_of(cells[0], options.zone)
            if when is None or len(cells) != len(head.columns):
                continue
            values = [v for v in map(number_of, cells[1:]) if v is not None]
            if values:
                found[when] = (when, sum(values) / len(values), len(values))
    return [found[t] for t in sorted(found)]


def number_of(text: str) -> float | None:
    """A finite number, or None."""
    try:
        v = float(text)
    except ValueError:
        return None
    return v if math.isfinite(v) else None


def time_of(text: str, zone: str) -> float | None:
    """Seconds since 1970 of ISO text, in `zone` where it carries none; None where it is no time."""
    try:
        when = dt.datetime.fromisoformat(text.strip().strip('"'))
    except ValueError:
        v = number_of(text)
        return None if v is None else v / (1000 if v > 1e11 else 1)
    return (when if when.tzinfo else when.replace(tzinfo=ZoneInfo(zone))).timestamp()
