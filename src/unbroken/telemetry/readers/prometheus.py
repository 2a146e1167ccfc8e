"""Ranges of a Prometheus server (the JSON of /api/v1/query_range) and saved scrapes of an exporter's /metrics."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.parse
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...errors import InputError, MissingExtra
from ...link.web import open_url, redirected
from ...samples.schema import SAMPLES
from ...samples.tables import Note
from .names import DCGM, ReadingSource

Row = tuple[float, str | None, int | None, str | None, str, float]
"""Seconds since the epoch, node, GPU, device, metric, value."""
MOST_POINTS = 10_000
"""Points of one series in one answer; Prometheus refuses more than 11,000."""


def is_range(path: Path, head: str) -> bool:
    """Whether a file is the answer to a range query."""
    start = head.lstrip()
    return start.startswith("{") and '"resultType"' in head and '"matrix"' in head


def is_scrape(path: Path, head: str) -> bool:
    """Whether a file is an exporter's page."""
    return head.startswith(("# HELP ", "# TYPE "))


def read_range(source: ReadingSource, out: Path) -> list[Note]:
    """Writes the readings of a range as Parquet in `out`. Raises InputError for another document."""
    try:
        with open(source.path, encoding="utf-8") as f:
            document = json.load(f)
    except (OSError, ValueError) as e:
        raise InputError(f"the range cannot be read: {e}", where=str(source.path)) from e
    return write(range_rows(document, source), source, out)


def range_rows(document: Any, source: ReadingSource, notes: Counter[str] | None = None) -> Iterator[Row]:
    """The readings of an answer to a range query. Raises InputError for an error or another shape."""
    try:
        if document["status"] != "success":
            raise InputError(
                f"Prometheus answered with an error: {document.get('error')}", where=str(source.path)
            )
        if document["data"]["resultType"] != "matrix":
            raise InputError(
                "this is no range (resultType matrix)", where=str(source.path), hint="Ask /api/v1/query_range"
            )
        for series in document["data"]["result"]:
            labels = series["metric"]
            metric, factor = _metric(labels, source)
            node, gpu, device = _place(labels)
            points: Iterable[tuple[float, float]] = ((float(t), float(v)) for t, v in series["values"])
            if metric == "xid":
                points = _events(points)
            for t, v in points:
                yield t, node, gpu, device, metric, v * factor
    except (KeyError, TypeError, ValueError) as e:
        raise InputError(
            f"this is no answer of Prometheus: {type(e).__name__}: {e}", where=str(source.path)
        ) from e


def read_scrape(source: ReadingSource, out: Path) -> list[Note]:
    """Writes the readings of a saved page as Parquet in `out`; those without a time take the file's own."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise MissingExtra("prometheus-client", "telemetry", what="reading a scrape") from None
    changed = source.path.stat().st_mtime
    rows: list[Row] = []
    try:
        for family in text_string_to_metric_families(source.path.read_text()):
            for s in family.samples:
                metric, factor = _metric({"__name__": s.name}, source)
                node, gpu, device = _place(s.labels)
                if not (metric == "xid" and s.value == 0):
                    rows.append((float(s.timestamp or changed), node, gpu, device, metric, s.value * factor))
    except (ValueError, OSError) as e:
        raise InputError(f"the scrape cannot be read: {e}", where=str(source.path)) from e
    notes = write(rows, source, out)
    return [
        *notes,
        Note("assumption", "readings without a time take the time of the file", source=source.path.name),
    ]


def fetch(url: str, query: str, start: float, end: float, step_s: float) -> Iterator[Any]:
    """The answers of a server to a range query, in pieces that it does not refuse; times in seconds since the epoch.

    Raises InputError for a server that cannot be reached or refuses.
    """
    base = url.rstrip("/") + "/api/v1/query_range?"
    at = start
    while at <= end:
        stop = min(end, at + step_s * (MOST_POINTS - 1))
        question = urllib.parse.urlencode(
            {"query": query, "start": f"{at:.3f}", "end": f"{stop:.3f}", "step": f"{step_s:g}"}
        )
        try:
            with open_url(base + question, 120) as answer:
                yield json.load(answer)
        except urllib.error.HTTPError as e:
            elsewhere = redirected(e)
            if elsewhere is not None:
                raise InputError(
                    f"Prometheus redirects to {elsewhere}",
                    where=url,
                    hint="Give that address, if it is yours",
                ) from e
            said = e.read(2000).decode(errors="replace")
            raise InputError(f"Prometheus refused the query: HTTP {e.code}: {said[:300]}", where=url) from e
        except (OSError, ValueError) as e:
            raise InputError(f"Prometheus cannot be asked: {e}", where=url) from e
        at = stop + step_s


def write(rows: Iterable[Row], source: ReadingSource, out: Path) -> list[Note]:
    """Writes readings as one Parquet file, in pieces; returns what was left out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = SAMPLES.arrow()
    batch: list[Row] = []
    left_out = 0
    unknown: Counter[str] = Counter()

    def flush() -> None:
        times, nodes, gpus, devices, metrics, values = zip(*batch, strict=True)
        columns = [
            pa.array([round(t * 1e6) for t in times]).cast(pa.timestamp("us")),
            pa.array([source.cluster] * len(batch), pa.string()),
            pa.array(nodes, pa.string()),
            pa.array(gpus, pa.int16()),
            pa.array(devices, pa.string()),
            pa.array(metrics, pa.string()),
            pa.array(values, pa.float64()),
        ]
        writer.write_table(pa.Table.from_arrays(columns, schema=schema))
        batch.clear()

    with pq.ParquetWriter(out / "readings.parquet", schema, compression="zstd") as writer:
        for row in rows:
            if not math.isfinite(row[5]):
                left_out += 1
                continue
            if "_" in row[4] and row[4].upper() == row[4]:
                unknown[row[4]] += 1
            batch.append(row)
            if len(batch) >= 1 << 17:
                flush()
        if batch:
            flush()
    notes = []
    if left_out:
        notes.append(
            Note("set aside", "readings that are not finite numbers", left_out, source=source.path.name)
        )
    if unknown:
        names = ", ".join(sorted(unknown)[:8])
        notes.append(
            Note(
                "info",
                f"metrics kept under their own name and unit: {names}",
                sum(unknown.values()),
                source=source.path.name,
            )
        )
    return notes


def parse_time(text: str, now: float) -> float:
    """Seconds since the epoch from `now`, a number, or ISO 8601 (UTC where it says no offset). Raises InputError."""
    if text == "now":
        return now
    try:
        return float(text)
    except ValueError:
        pass
    try:
        t = datetime.fromisoformat(text)
    except ValueError:
        raise InputError(
            f"'{text}' is no time", hint="Write 2026-01-31T12:00, seconds since 1970, or now"
        ) from None
    return (t if t.tzinfo else t.replace(tzinfo=UTC)).timestamp()


def _metric(labels: dict[str, str], source: ReadingSource) -> tuple[str, float]:
    name = labels.get("__name__")
    if source.metric:
        return source.metric, 1.0
    if name is None:
        raise InputError(
            "the series have no name (the query was an expression)",
            where=str(source.path),
            hint="Say what it is with --metric",
        )
    return DCGM.get(name, (name.removeprefix("unbroken_"), 1.0))


def _place(labels: dict[str, str]) -> tuple[str | None, int | None, str | None]:
    """(node, GPU, device) from the labels of dcgm-exporter, node-exporter or our own exporter."""
    node = labels.get("Hostname") or labels.get("node") or labels.get("nodename") or labels.get("instance")
    if node and node.count(":") == 1:
        node = node.split(":")[0]
    gpu = labels.get("gpu", "")
    device = labels.get("device") or labels.get("GPU_I_ID")
    if gpu.isdigit():
        return node, int(gpu), labels.get("GPU_I_ID")
    return node, None, device or None


def _events(points: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """DCGM shows a GPU's last XID until the driver is loaded again: an event is where the shown number changes."""
    shown = 0.0
    for t, v in points:
        if v not in (0.0, shown):
            yield t, v
        shown = v
