"""`unbroken telemetry`: record a node, show it to Prometheus, read other recordings, join them with jobs."""

from __future__ import annotations

import difflib
import json
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError, UnbrokenError, UsageError
from ..units import Bytes, Duration, plural

if TYPE_CHECKING:
    from ..telemetry.readers import Converted
    from ..telemetry.samplers.reading import Sampler

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Record what the hardware of a node does, without any daemon.",
)

Every = Annotated[str, typer.Option("--every", help="Interval between ticks.")]
Node = Annotated[str | None, typer.Option("--node", help="Name of this node. [default: the host's name]")]
Cluster = Annotated[str | None, typer.Option("--cluster", help="Name of the cluster.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Serve = Annotated[
    str | None, typer.Option("--serve", help="Also show the last tick to Prometheus on HOST:PORT.")
]


@app.command()
def record(
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the readings.")],
    every: Every = "1s",
    for_: Annotated[str | None, typer.Option("--for", help="Stop after this long.")] = None,
    node: Node = None,
    cluster: Cluster = None,
    serve: Serve = None,
    file_size: Annotated[str, typer.Option(help="A file is packed at this size of its spool.")] = "64MiB",
    file_age: Annotated[str, typer.Option(help="A file is packed at this age.")] = "1h",
    keep: Annotated[str | None, typer.Option(help="Oldest files go when all are larger, e.g. 10GB.")] = None,
    as_json: Json = False,
) -> None:
    """Record GPUs and host until Ctrl-C, into bounded files of the trace schema's samples."""
    from ..telemetry.recording.record import record as record_
    from ..telemetry.recording.spool import Spool
    from ..telemetry.samplers.gpu import GpuSampler

    interval = _interval(every)
    name = node or socket.gethostname()
    stop = _stop_on_signal()
    samplers = _samplers(as_json, interval)
    sinks: list[Any] = []
    end = _serve(serve, name, cluster, sinks)
    spool = Spool(
        out,
        node=name,
        cluster=cluster,
        max_bytes=Bytes(file_size),
        max_age_s=Duration(file_age),
        keep_bytes=Bytes(keep) if keep else None,
    )
    sinks.append(spool.write)
    done = record_(samplers, sinks, every_s=interval, stop=stop, for_s=Duration(for_) if for_ else None)
    for s in samplers:
        s.close()
    if end:
        end()
    spool.close()
    gpus = [s for s in samplers if isinstance(s, GpuSampler)]
    held_back = 100.0 * sum(g.held_back for g in gpus) / max(1, sum(g.turns for g in gpus))
    result = {
        "folder": str(out),
        "ticks": done.ticks,
        "missed": done.missed,
        "dropped": spool.dropped_ticks,
        "readings": done.readings,
        "cpu_share_pct": round(done.cpu_share_pct, 4),
        "gpu_turns_held_back_pct": round(held_back, 2),
    }
    if as_json:
        print(json.dumps(result))
    else:
        print(
            f"{done.readings} readings in {done.ticks} ticks ({done.missed} missed, {spool.dropped_ticks} not written) "
            f"in {out}, at {done.cpu_share_pct:.3f} % of a core"
        )
        if held_back >= 0.5:
            print(
                f"each GPU was read at {100 - held_back:.0f} % of the ticks: the driver takes long, and GPUs take turns"
            )


@app.command()
def export(
    address: Annotated[str, typer.Argument(help="HOST:PORT to listen on.")] = ":9400",
    every: Every = "1s",
    node: Node = None,
    cluster: Cluster = None,
) -> None:
    """Show GPUs and host to Prometheus until Ctrl-C, keeping nothing."""
    from ..telemetry.recording.record import record as record_

    sinks: list[Any] = []
    stop = _stop_on_signal()
    end = _serve(address, node or socket.gethostname(), cluster, sinks)
    interval = _interval(every)
    samplers = _samplers(False, interval)
    record_(samplers, sinks, every_s=interval, stop=stop)
    for s in samplers:
        s.close()
    if end:
        end()


@app.command()
def convert(
    files: Annotated[list[Path], typer.Argument(help="Files of one or several formats.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the Parquet files.")],
    format: Annotated[
        str | None, typer.Option(help="prometheus, scrape, ipmi or acme. [default: detected]")
    ] = None,
    metric: Annotated[str | None, typer.Option(help="The metric, where the file names none.")] = None,
    cluster: Cluster = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Memory of a GPU, e.g. 80GiB.")] = None,
    memory: Annotated[str, typer.Option(help="Memory that the reading may take.")] = "1GiB",
    as_json: Json = False,
) -> None:
    """Read recordings of Prometheus, dcgm-exporter, IPMI or the Acme release into the trace schema's samples."""
    from ..telemetry.readers import convert as convert_

    gib = Bytes(gpu_memory) / 2**30 if gpu_memory else None
    done = convert_(
        files, out, cluster=cluster, format=format, metric=metric, gpu_memory_gib=gib, memory=_memory(memory)
    )
    _show_converted(done, as_json)


@app.command()
def fetch(
    url: Annotated[str, typer.Argument(help="Address of a Prometheus server.")],
    query: Annotated[
        list[str], typer.Option("--query", "-q", help="Metric or expression; may be given again.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the Parquet files.")],
    start: Annotated[str, typer.Option(help="ISO 8601 (UTC without an offset) or seconds since 1970.")],
    end: Annotated[str, typer.Option(help="As --start.")] = "now",
    step: Annotated[str, typer.Option(help="Distance of the points.")] = "15s",
    metric: Annotated[
        str | None, typer.Option(help="What the query gives, where it is an expression.")
    ] = None,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Ask a Prometheus server for ranges and keep them as samples."""
    import time

    from ..telemetry.readers import fetch as fetch_
    from ..telemetry.readers.prometheus import parse_time

    now = time.time()
    first, last = parse_time(start, now), parse_time(end, now)
    if last < first:
        raise UsageError("--end lies before --start")
    done = [
        fetch_(url, q, first, last, float(Duration(step)), out, cluster=cluster, metric=metric) for q in query
    ]
    _show_converted(done, as_json)


@app.command()
def join(
    samples: Annotated[list[Path], typer.Argument(help="Folders or files of readings.")],
    jobs: Annotated[Path | None, typer.Option(help="Jobs of the trace schema (Parquet).")] = None,
    spans: Annotated[
        Path | None,
        typer.Option(
            help="CSV or Parquet: label, part, node, gpu, start_utc, end_utc (assignments, phases, plans)."
        ),
    ] = None,
    run: Annotated[
        list[Path] | None, typer.Option(help="Run directory: its attempts, starts and training apart.")
    ] = None,
    evaluation: Annotated[
        list[Path] | None,
        typer.Option("--eval", help="Folder of `unbroken eval`: its assignments and loading."),
    ] = None,
    metric: Annotated[list[str] | None, typer.Option(help="Only this metric; may be given again.")] = None,
    by: Annotated[str, typer.Option(help="label, part, or label,part.")] = "label,part",
    memory: Annotated[str, typer.Option(help="Memory that the join may take.")] = "1GiB",
    as_json: Json = False,
) -> None:
    """Say what each job, phase of an assignment or pretraining plan did with its GPUs."""
    from ..telemetry import join as j

    keys = by.split(",")
    if not (jobs or spans or run or evaluation):
        raise UsageError("nothing to join with", hint="Give --jobs, --spans, --run or --eval")
    if not set(keys) <= {"label", "part"}:
        raise UsageError(f"--by {by} is not label, part, or label,part")
    con = j.connect(_memory(memory))
    j.open_samples(con, samples)
    if jobs:
        j.open_jobs(con, jobs)
    if spans:
        j.open_spans(con, spans)
    for folder in run or ():
        _join_run(con, folder)
    for folder in evaluation or ():
        _join_evaluation(con, folder)
    known = j.metrics_of(con)
    for name in metric or ():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"Did you mean '{near[0]}'?" if near else f"There are: {', '.join(known)}"
            raise UsageError(f"no reading is of a metric '{name}'", hint=hint)
    rows = j.per_span(con, metric or (), keys)
    without, total = j.spans_without_readings(con)
    if not total:
        print("nothing to join with: no job or span has a node, a start and a later end", file=sys.stderr)
    if as_json:
        print(json.dumps({"rows": rows, "spans": total, "spans_without_readings": without}, default=str))
        return
    if rows:
        _table(rows, [*keys, "metric", "readings", "mean", "p05", "p50", "p95", "increase"])
    if without:
        print(f"{without} of {total} spans have no readings", file=sys.stderr)


@app.command()
def summary(
    samples: Annotated[list[Path], typer.Argument(help="Folders or files of readings.")],
    memory: Annotated[str, typer.Option(help="Memory that it may take.")] = "1GiB",
    as_json: Json = False,
) -> None:
    """Show the distribution of every metric that was recorded.

    Wide tables (one column a server, such as SM_ACTIVE.csv) are counted as they are, without being converted.
    """
    from ..telemetry import join as j

    wide = [p for p in samples if p.is_file() and _is_wide(p)]
    rows = [_count_wide(p) for p in wide]
    others = [p for p in samples if p not in wide]
    if others:
        con = j.connect(_memory(memory))
        j.open_samples(con, others)
        rows += j.distribution(con)
    if as_json:
        print(json.dumps({"metrics": rows}))
        return
    _table(rows, ["metric", "readings", "mean", "min", "p05", "p25", "p50", "p75", "p95", "max", "source"])


def _is_wide(path: Path) -> bool:
    from ..telemetry.readers import detect

    return path.suffix == ".csv" and not path.name.endswith(".spool.csv") and detect(path) == "acme"


def _count_wide(path: Path) -> dict[str, Any]:
    from ..samples.wide import count
    from ..telemetry.readers.wide import meaning

    metric, factor = meaning(path)
    c = count(path)
    shares = [0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0]
    names = ["min", "p05", "p25", "p50", "p75", "p95", "max"]
    row: dict[str, Any] = {"metric": metric, "readings": c.count, "mean": c.mean * factor}
    row |= {n: q * factor for n, q in zip(names, c.quantiles(shares), strict=True)}
    return row | {
        "source": path.name, "missing": c.missing, "ragged_rows": c.ragged, "unreadable": c.unreadable,
    }  # fmt: skip


def _join_run(con: Any, folder: Path) -> None:
    from ..progress import RunDir, read_journal
    from ..telemetry.join import add_spans
    from ..telemetry.spans import spans_of_run

    if not (folder / "journal").is_dir():
        raise InputError("this is no run directory: it has no journal", where=str(folder))
    found, host = spans_of_run(read_journal(RunDir(folder)).records, folder.name)
    if add_spans(con, found, host):
        print(f"{folder}: its virtual nodes are taken for {host}, where they ran", file=sys.stderr)


def _join_evaluation(con: Any, folder: Path) -> None:
    from ..journal import lines
    from ..telemetry.join import add_spans
    from ..telemetry.spans import spans_of_evaluation

    path = folder / "journal.jsonl"
    if not path.is_file():
        raise InputError("this is no folder of an evaluation: it has no journal.jsonl", where=str(folder))
    add_spans(con, spans_of_evaluation(lines.records(path)), socket.gethostname())


def _show_converted(done: list[Converted], as_json: bool) -> None:
    if as_json:
        files = [
            {
                "source": str(d.source),
                "format": d.format,
                "folder": str(d.folder),
                "rows": d.rows,
                "notes": [n.as_json() for n in d.notes],
            }
            for d in done
        ]
        print(json.dumps({"files": files}))
        return
    for d in done:
        print(f"{d.source}: {d.rows:,} readings ({d.format}) in {d.folder}")
        for n in d.notes:
            print(f"  {n.label}: {n.text}" + (f": {n.count:,}" if n.count else ""))


def _memory(text: str) -> str:
    return f"{max(1, int(Bytes(text)) // 1024)}KiB"


def _table(rows: list[dict[str, Any]], columns: list[str]) -> None:
    columns = [c for c in columns if any(r.get(c) is not None for r in rows)]
    shown = [[_cell(r.get(c)) for c in columns] for r in rows]
    widths = [max(len(c), *(len(r[i]) for r in shown)) if shown else len(c) for i, c in enumerate(columns)]
    for line in [columns, *shown]:
        print("  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)).rstrip())


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _interval(text: str) -> float:
    interval = float(Duration(text))
    if not 0.01 <= interval <= 3600:
        raise UsageError(f"--every {text} is not between 10ms and 1h")
    return interval


def _samplers(quiet: bool, interval_s: float) -> list[Sampler]:
    """All that can be read here, having said what and what not. Below a second, more CPU time is allowed."""
    from ..telemetry.samplers.gpu import GPU_SHARE, GpuSampler, load_nvml
    from ..telemetry.samplers.host import HostSampler

    samplers: list[Sampler] = [HostSampler()]
    notes = []
    try:
        gpus = GpuSampler(load_nvml(), share=GPU_SHARE / min(1.0, interval_s))
        samplers.append(gpus)
        names = gpus.names()
        notes.append(f"{plural(len(names), 'GPU')}: {', '.join(sorted(set(names)))}")
    except UnbrokenError as e:
        notes.append(f"no GPUs: {e}")
    for s in samplers:
        notes += [f"not read: {metric} ({why})" for metric, why in s.coverage().missing]
    if not quiet:
        for n in notes:
            print(n, file=sys.stderr)
    return samplers


def _serve(address: str | None, node: str, cluster: str | None, sinks: list[Any]) -> Any:
    if not address:
        return None
    from ..telemetry.recording.exporter import LastTick, serve

    last = LastTick(node, cluster)
    sinks.append(last)
    port, end = serve(last, address)
    print(f"serving http://{address.rpartition(':')[0] or '0.0.0.0'}:{port}/metrics", file=sys.stderr)
    return end


def _stop_on_signal() -> threading.Event:
    stop = threading.Event()
    for s in (signal.SIGINT, signal.SIGTERM):
        signal.signal(s, lambda *_: stop.set())
    return stop
