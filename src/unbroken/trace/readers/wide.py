"""Wide utilisation tables: a time and one column for each server or GPU, one file for each metric.

Tens of gigabytes of them are read in one pass, without writing the samples down: a histogram with bins of a
thousandth of the value, and the mean of each moment over all columns, are what the statistics need. (To get
the samples themselves, one a row, use `unbroken telemetry`.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from ...errors import InputError
from ..schema import METRICS
from ..store import Store, literal, name
from ..tables import Note
from .base import Head, Options
from .delimited import instant
from .table import cluster_from

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

SHIFT = 13
"""Bits of a float's mantissa that are dropped: bins of 2**-10 of the value."""

BATCH_VALUES = 4_000_000


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
        numbers = sum(bool(re.fullmatch(r"-?[0-9.]+(e[+-]?[0-9]+)?|nan|NaN|NA|", v)) for v in values)
        return 90 if numbers == len(values) else 0

    def read(self, store: Store, head: Head, options: Options) -> None:
        """Adds the file's histogram and its means over time."""
        stem = head.path.name.split(".")[0]
        metric, factor = metric_of(stem)
        table = scan(store, head, options)
        histogram, moments = table
        if not histogram.total:
            raise InputError("the table holds no number", where=str(head.path), todo="Check the file")
        ratio = metric.endswith("_active_pct") and histogram.top <= 1.0001
        if ratio:
            factor *= 100
            store.note(
                Note(
                    "assumption",
                    "values are at most 1: taken as shares, shown in percent",
                    source=head.path.name,
                )
            )
        cluster = options.cluster or cluster_from(
            head.path.resolve().parent / head.path.resolve().parent.name
        )
        store.add_histogram(
            cluster, metric, histogram.rows(factor), [(t, m * factor, n) for t, m, n in moments]
        )
        columns = len(head.columns) - 1
        store.note(
            Note(
                "info",
                f"{histogram.total:,} readings of {columns:,} columns, as {metric}; {histogram.missing:,} empty",
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


class Histogram:
    """Counts by the leading bits of a value as a 32-bit float."""

    def __init__(self) -> None:
        self.counts = np.zeros(1 << (31 - SHIFT), dtype=np.int64)
        self.negative: dict[float, int] = {}
        self.total = 0
        self.missing = 0

    def add(self, values: np.ndarray) -> None:
        """Counts an array of finite 32-bit floats."""
        if not values.size:
            return
        self.total += values.size
        try:
            found = np.bincount(np.right_shift(values.view(np.int32), SHIFT))
        except ValueError:  # a negative float is a negative integer
            low = values[values < 0]
            for v, n in zip(*np.unique(np.round(low, 1), return_counts=True), strict=True):
                self.negative[float(v)] = self.negative.get(float(v), 0) + int(n)
            # minus zero is no negative number, but its sign bit is set
            rest = np.abs(values[values >= 0])
            found = np.bincount(np.right_shift(rest.view(np.int32), SHIFT))
        self.counts[: found.size] += found

    @property
    def top(self) -> float:
        """The largest value, to the bin."""
        at = np.flatnonzero(self.counts)
        return float(np.left_shift(at[-1:].astype(np.int32), SHIFT).view(np.float32)[0]) if at.size else 0.0

    def rows(self, factor: float) -> list[tuple[float, int]]:
        """(value, count) of the bins that occur: the middle of a bin, its edge where the edge is a whole number."""
        at = np.flatnonzero(self.counts)
        low = np.left_shift(at.astype(np.int32), SHIFT).view(np.float32).astype(np.float64)
        high = np.left_shift((at + 1).astype(np.int32), SHIFT).view(np.float32).astype(np.float64)
        middle = np.where(low == np.round(low), low, (low + high) / 2)
        rows = [(float(v) * factor, int(n)) for v, n in zip(middle, self.counts[at], strict=True)]
        return rows + [(v * factor, n) for v, n in self.negative.items()]


def scan(store: Store, head: Head, options: Options) -> tuple[Histogram, list[tuple[object, float, int]]]:
    """One pass: the histogram of all values, and (time, mean, count) of each row, hourly where there are many."""
    unique = [f"c{i}" for i in range(len(head.columns))]
    types = ", ".join(f"{literal(c)}: '{'VARCHAR' if i == 0 else 'FLOAT'}'" for i, c in enumerate(unique))
    source = (
        f"read_csv({literal(str(head.path))}, auto_detect=false, header=true, delim={literal(head.delimiter)}, quote='', escape='', "
        f"columns={{{types}}}, nullstr=['', 'nan', 'NaN', 'NA', 'null'], ignore_errors=true, store_rejects=false, parallel=true)"
    )
    values = ", ".join(name(c) for c in unique[1:])
    store.con.execute(f"SET TimeZone = {literal(options.zone)}")
    histogram = Histogram()
    hours: dict[int, list[float]] = {}
    try:
        rows = max(2048, BATCH_VALUES // len(unique))
        bad_times = 0
        for batch in store.con.sql(
            f"SELECT epoch_us({instant('c0')}) AS t, {values} FROM {source}"
        ).to_arrow_reader(rows):
            block = np.empty((len(unique) - 1, batch.num_rows), dtype=np.float32)
            for i, column in enumerate(batch.columns[1:]):
                block[i] = column.to_numpy(zero_copy_only=False)
            sums = block.sum(axis=0)
            if np.isfinite(sums).all():
                counts = np.full(batch.num_rows, len(unique) - 1)
                histogram.add(block.reshape(-1))
            else:
                good = np.isfinite(block)
                counts = good.sum(axis=0)
                sums = np.where(good, block, np.float32(0)).sum(axis=0, dtype=np.float64)
                histogram.missing += int(block.size - counts.sum())
                histogram.add(block[good])
            bad_times += batch.column(0).null_count
            t = batch.column(0).to_numpy(zero_copy_only=False)
            ok = ~np.isnan(t.astype(np.float64)) & (counts > 0)
            hour = (t[ok] // 3_600_000_000).astype(np.int64)
            keys, inverse = np.unique(hour, return_inverse=True)
            for k, s, n in zip(
                keys,
                np.bincount(inverse, sums[ok]),
                np.bincount(inverse, counts[ok].astype(float)),
                strict=True,
            ):
                slot = hours.setdefault(int(k), [0.0, 0.0])
                slot[0] += float(s)
                slot[1] += float(n)
    finally:
        store.con.execute("SET TimeZone = 'UTC'")
    if bad_times:
        store.note(
            Note(
                "missing",
                "rows without a time: counted in the distribution, left out over time",
                bad_times,
                source=head.path.name,
            )
        )
    moments: list[tuple[object, float, int]] = [
        (k * 3600, s / n, int(n)) for k, (s, n) in sorted(hours.items()) if n
    ]
    return histogram, moments
