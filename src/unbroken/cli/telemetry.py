"""`unbroken telemetry`: record a node, show it to Prometheus, read other recordings, join them with jobs."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UnbrokenError, UsageError
from ..units import Bytes, Duration

if TYPE_CHECKING:
    from ..telemetry.reading import Sampler

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
    from ..telemetry.record import record as record_
    from ..telemetry.spool import Spool

    interval = _interval(every)
    name = node or socket.gethostname()
    stop = _stop_on_signal()
    samplers = _samplers(as_json)
    spool = Spool(
        out,
        node=name,
        cluster=cluster,
        max_bytes=Bytes(file_size),
        max_age_s=Duration(file_age),
        keep_bytes=Bytes(keep) if keep else None,
    )
    sinks: list[Any] = [spool.write]
    end = _serve(serve, name, cluster, sinks)
    done = record_(samplers, sinks, every_s=interval, stop=stop, for_s=Duration(for_) if for_ else None)
    for s in samplers:
        s.close()
    if end:
        end()
    spool.close()
    result = {
        "folder": str(out),
        "ticks": done.ticks,
        "missed": done.missed,
        "dropped": spool.dropped_ticks,
        "readings": done.readings,
        "cpu_share_pct": round(done.cpu_share_pct, 4),
    }
    if as_json:
        print(json.dumps(result))
    else:
        print(
            f"{done.readings} readings in {done.ticks} ticks ({done.missed} missed, {spool.dropped_ticks} not written) "
            f"in {out}, at {done.cpu_share_pct:.3f} % of a core"
        )


@app.command()
def export(
    address: Annotated[str, typer.Argument(help="HOST:PORT to listen on.")] = ":9400",
    every: Every = "1s",
    node: Node = None,
    cluster: Cluster = None,
) -> None:
    """Show GPUs and host to Prometheus until Ctrl-C, keeping nothing."""
    from ..telemetry.record import record as record_

    sinks: list[Any] = []
    stop = _stop_on_signal()
    end = _serve(address, node or socket.gethostname(), cluster, sinks)
    samplers = _samplers(False)
    record_(samplers, sinks, every_s=_interval(every), stop=stop)
    for s in samplers:
        s.close()
    if end:
        end()


def _interval(text: str) -> float:
    interval = float(Duration(text))
    if not 0.01 <= interval <= 3600:
        raise UsageError(f"--every {text} is not between 10ms and 1h")
    return interval


def _samplers(quiet: bool) -> list[Sampler]:
    """All that can be read here, having said what and what not."""
    from ..telemetry.gpu import GpuSampler, load_nvml
    from ..telemetry.host import HostSampler

    samplers: list[Sampler] = [HostSampler()]
    notes = []
    try:
        gpus = GpuSampler(load_nvml())
        samplers.append(gpus)
        names = gpus.names()
        notes.append(f"{len(names)} GPUs: {', '.join(sorted(set(names)))}")
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
    from ..telemetry.exporter import LastTick, serve

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
