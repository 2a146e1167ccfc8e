"""Draws synthetic jobs, incidents, nodes and samples from the model, in batches, to Parquet.

What depends on what: the type decides sizes, duration and queue; size and duration of a job of one type are tied by
a Gaussian copula (rho per type, by which the GPU-time share of each type is met); the final state depends on type,
size and duration through the job's GPU time alone (so that cancelled jobs are few and hold most of it); the queue
depends on the type only. Hours, weekdays and users are assumptions of ours (below), not published.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import MissingExtra, UsageError
from ...samples.schema import INCIDENTS, JOBS, NODES, SAMPLES
from .marginal import Array, Marginal, normal_cdf
from .model import SIZES, ClusterModel, cluster_model, failures, published

if TYPE_CHECKING:
    import pyarrow as pa

BATCH = 1 << 18

HOURLY = np.array([5, 4, 3, 2, 2, 2, 2, 3, 5, 8, 10, 10, 7, 7, 9, 10, 10, 9, 7, 7, 8, 8, 7, 6], float)
"""Assumed arrivals by hour of the cluster's day."""
WEEKDAY = np.array([1.05, 1.1, 1.1, 1.1, 1.0, 0.75, 0.7])
"""Assumed arrivals by weekday, Monday first."""
USERS, TEAMS, ZIPF = 400, 12, 1.1
"""Assumed users and teams; users' job counts fall as rank to the minus ZIPF."""
STALLED = 0.3
"""Assumed share of cancelled jobs of an hour and more that had stalled before somebody looked."""
START = dt.datetime(2023, 3, 1)
DAYS = 184


@dataclass(frozen=True)
class TracePlan:
    """What to draw: `jobs` of all kinds in `cluster`, from `seed`; `cpu_jobs`: with the published share of jobs
    without a GPU; `days` from `start`; `zone_hours`: hours that the cluster's day is ahead of UTC."""

    cluster: str = "Seren"
    jobs: int = 100_000
    seed: int = 0
    cpu_jobs: bool = True
    start: dt.datetime = START
    days: int = DAYS
    zone_hours: int = 8

    def __post_init__(self) -> None:
        if self.jobs < 0:
            raise UsageError(f"{self.jobs} jobs", hint="Give a number of jobs that is not negative")
        if self.days < 1:
            raise UsageError(f"{self.days} days", hint="Give at least one day")
        cluster_model(self.cluster)


def arrow() -> Any:
    """pyarrow, or MissingExtra."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as e:
        raise MissingExtra("pyarrow", "trace", what="`unbroken trace synth`") from e
    return pyarrow


def batches(plan: TracePlan) -> Iterator[pa.RecordBatch]:
    """The jobs, `BATCH` at a time; the same plan gives the same rows."""
    model = cluster_model(plan.cluster)
    tables = {w.type: (w.duration_s.quantile_table(), w.queue_s.quantile_table()) for w in model.workloads}
    cpu_table = model.cpu_duration_s.quantile_table()
    users = user_table(plan, model)
    for i, start in enumerate(range(0, plan.jobs, BATCH)):
        rng = np.random.default_rng([plan.seed, i])
        yield draw(plan, model, rng, start, min(BATCH, plan.jobs - start), tables, cpu_table, users)


def user_table(plan: TracePlan, model: ClusterModel) -> tuple[Array, list[str], list[str], Array]:
    """(cumulative weights, names, teams, team of each user)."""
    rng = np.random.default_rng([plan.seed, 1 << 30])
    weights = 1 / np.arange(1, USERS + 1) ** ZIPF
    names = [f"u{n:04d}" for n in rng.permutation(10_000)[:USERS]]
    teams = [f"team-{chr(ord('a') + i)}" for i in range(TEAMS)]
    return np.cumsum(weights / weights.sum()), names, teams, rng.integers(0, TEAMS, USERS).astype(float)


def draw(
    plan: TracePlan,
    model: ClusterModel,
    rng: np.random.Generator,
    first: int,
    n: int,
    tables: dict[str, tuple[tuple[Array, Array], tuple[Array, Array]]],
    cpu_table: tuple[Array, Array],
    users: tuple[Array, list[str], list[str], Array],
) -> pa.RecordBatch:
    """One batch of jobs."""
    pa = arrow()
    share = model.cpu_jobs / (model.cpu_jobs + model.gpu_jobs) if plan.cpu_jobs else 0.0
    counts = np.array([w.job_share for w in model.workloads])
    edges = np.cumsum(np.concatenate([counts / counts.sum() * (1 - share), [share]]))[:-1]
    kind = np.searchsorted(edges, rng.random(n), side="right")
    gpus, duration, queue = np.zeros(n), np.zeros(n), np.zeros(n)
    for k, w in enumerate(model.workloads):
        at = np.flatnonzero(kind == k)
        z, e = rng.standard_normal(at.size), rng.standard_normal(at.size)
        steps = np.cumsum(np.asarray(w.sizes))[:-1]
        gpus[at] = np.asarray(SIZES, float)[np.searchsorted(steps, normal_cdf(z), side="right")]
        u = normal_cdf(w.rho * z + math.sqrt(1 - w.rho**2) * e)
        duration[at] = take(w.duration_s, tables[w.type][0], u)
        queue[at] = take(w.queue_s, tables[w.type][1], rng.random(at.size))
    cpu = np.flatnonzero(kind == len(model.workloads))
    duration[cpu] = take(model.cpu_duration_s, cpu_table, rng.random(cpu.size))
    queue[cpu] = np.floor(rng.exponential(3.0, cpu.size))
    duration, queue = np.maximum(np.round(duration), 1), np.round(queue)
    state = draw_states(model, rng, gpus * duration, cpu)
    submit = arrivals(plan, rng, n)
    us = 1_000_000
    begin = submit + (queue * us).astype(np.int64)
    end = begin + (duration * us).astype(np.int64)
    names = np.array([*(w.type for w in model.workloads), "CPU"])
    words = np.array(["COMPLETED", "CANCELLED", "FAILED"])
    cum, user_names, team_names, team_of = users
    who = np.searchsorted(cum, rng.random(n), side="right").clip(0, USERS - 1)
    nodes = np.maximum(np.ceil(gpus / model.gpus_per_node), 1).astype(np.int32)
    stall = (state == 1) & (duration > 3600) & (gpus > 0) & (rng.random(n) < STALLED)
    stop = end - (rng.beta(1.2, 4.0, n) * duration * us).astype(np.int64)
    stopped = pa.array(stop, mask=~stall).cast(pa.timestamp("us"))
    codes = {"COMPLETED": 0, "CANCELLED": 0, "FAILED": 1}
    dictionary = {
        "job_id": pa.array(
            np.char.add(f"{plan.cluster[0].lower()}", np.arange(first, first + n).astype("U9"))
        ),
        "cluster": pa.repeat(pa.scalar(plan.cluster), n),
        "user": pa.array(np.array(user_names)[who]),
        "team": pa.array(np.array(team_names)[team_of[who].astype(int)]),
        "type": pa.array(names[kind]),
        "state": pa.array(words[state]),
        "state_raw": pa.array(words[state]),
        "submit_utc": pa.array(submit).cast(pa.timestamp("us")),
        "start_utc": pa.array(begin).cast(pa.timestamp("us")),
        "end_utc": pa.array(end).cast(pa.timestamp("us")),
        "queue_s": pa.array(queue),
        "duration_s": pa.array(duration),
        "node_num": pa.array(nodes),
        "gpu_num": pa.array(gpus),
        "cpu_num": pa.array(np.where(gpus > 0, gpus * 16, 4.0)),
        "exit_code": pa.array(np.array([codes[w] for w in words], dtype=np.int32)[state]),
        "stop_utc": stopped,
        "source": pa.repeat(pa.scalar("synthetic"), n),
    }
    schema = JOBS.arrow()
    arrays = [dictionary[f.name] if f.name in dictionary else pa.nulls(n, f.type) for f in schema]
    return pa.record_batch(arrays, schema=schema)


def take(marginal: Marginal, table: tuple[Array, Array], u: Array) -> Array:
    """Quantiles by a table that was made once; exact enough for whole seconds, point masses included."""
    shares, grid = table
    keep = np.concatenate([[True], np.diff(shares) > 0])
    z = np.interp(u, shares[keep], grid[keep])
    x: Array = np.clip(np.exp(z) if marginal.log else z, marginal.low, marginal.high)
    return x


def draw_states(model: ClusterModel, rng: np.random.Generator, gpu_time: Array, cpu: Any) -> Any:
    """0 completed, 1 cancelled, 2 failed."""
    m = model.states
    z = (np.log(gpu_time + 1) - m.centre) / m.scale
    cancelled = rng.random(z.size) < 1 / (1 + np.exp(-m.cancel[0] - m.cancel[1] * z))
    failed = rng.random(z.size) < 1 / (1 + np.exp(-m.fail[0] - m.fail[1] * z))
    state = np.where(cancelled, 1, np.where(failed, 2, 0))
    total = sum(model.cpu_states.values())
    edges = np.cumsum([model.cpu_states[s] / total for s in ("COMPLETED", "CANCELLED", "FAILED")])[:-1]
    state[cpu] = np.searchsorted(edges, rng.random(cpu.size), side="right")
    return state


def arrivals(plan: TracePlan, rng: np.random.Generator, n: int) -> Any:
    """Submit times in microseconds since 1970, UTC, by the assumed day and week of the cluster."""
    local = plan.start
    days = np.arange(plan.days)
    weight = WEEKDAY[(local.weekday() + days) % 7]
    day = rng.choice(plan.days, n, p=weight / weight.sum())
    hour = rng.choice(24, n, p=HOURLY / HOURLY.sum())
    seconds = day * 86400 + hour * 3600 + rng.random(n) * 3600 - plan.zone_hours * 3600
    origin = int(plan.start.replace(tzinfo=dt.UTC).timestamp())
    return ((origin + np.floor(seconds)) * 1_000_000).astype(np.int64)


def write_jobs(plan: TracePlan, path: Path) -> int:
    """Writes jobs.parquet, a batch at a time; returns the number of rows."""
    pq = arrow().parquet
    rows = 0
    with pq.ParquetWriter(path, JOBS.arrow(), compression="zstd", compression_level=1) as out:
        for batch in batches(plan):
            out.write_batch(batch, row_group_size=BATCH)
            rows += batch.num_rows
    return rows


def write_incidents(plan: TracePlan, path: Path) -> int:
    """Writes incidents.parquet: failures by reason as in the study's table, scaled to the number of jobs.

    GPUs are log-normal about the reason's mean (capped at 2048), minutes to failure exponential with its mean; they
    are not tied to jobs of the trace, as the study's own table came from logs, not from the scheduler.
    """
    pa = arrow()
    rng = np.random.default_rng([plan.seed, 1 << 31])
    model = cluster_model(plan.cluster)
    both = sum(c.gpu_jobs for c in published().clusters.values())
    share = model.gpu_jobs / (model.gpu_jobs + model.cpu_jobs) if plan.cpu_jobs else 1.0
    scale = plan.jobs * share / both
    rows: list[dict[str, Any]] = []
    for f in failures():
        for _ in range(int(rng.poisson(f.count * scale))):
            gpus = min(2048.0, max(1.0, round(float(rng.lognormal(math.log(f.mean_gpus) - 0.125, 0.5)))))
            rows.append(
                {
                    "incident_id": f"i{len(rows)}",
                    "cluster": plan.cluster,
                    "node": f"node-{int(rng.integers(0, model.nodes)):03d}",
                    "time_utc": plan.start + dt.timedelta(seconds=float(rng.random() * plan.days * 86400)),
                    "outcome": "failed",
                    "category": f.category,
                    "reason": f.reason,
                    "gpu_num": gpus,
                    "to_failure_s": float(rng.exponential(f.mean_minutes * 60)),
                    "source": "synthetic",
                }
            )
    rows.sort(key=lambda r: r["time_utc"])
    pa.parquet.write_table(pa.Table.from_pylist(rows, schema=INCIDENTS.arrow()), path, compression="zstd")
    return len(rows)


def write_nodes(plan: TracePlan, path: Path) -> int:
    """Writes nodes.parquet."""
    pa = arrow()
    model = cluster_model(plan.cluster)
    rows = [
        {
            "node": f"node-{i:03d}",
            "cluster": plan.cluster,
            "gpu_num": model.gpus_per_node,
            "gpu_model": "A100-SXM4-80GB",
            "cpu_num": 128,
            "mem_gib": 1024.0,
            "first_utc": plan.start,
            "last_utc": plan.start + dt.timedelta(days=plan.days),
        }
        for i in range(model.nodes)
    ]
    pa.parquet.write_table(pa.Table.from_pylist(rows, schema=NODES.arrow()), path, compression="zstd")
    return len(rows)


GPU_METRICS = ("gpu_util_pct", "sm_active_pct", "tensor_active_pct", "gpu_mem_used_pct", "gpu_power_w", "gpu_temp_c",
               "gpu_mem_temp_c")  # fmt: skip
HOST_METRICS = ("host_cpu_util_pct", "host_mem_used_pct", "node_power_w")


def write_samples(plan: TracePlan, path: Path, *, nodes: int, hours: float, every_s: float) -> int:
    """Writes samples.parquet from the published utilisation marginals; returns the number of rows.

    The metrics of a GPU share one rank (copula correlation 0.9) that drifts slowly in time (0.98 from one sample to
    the next): busy GPUs draw more power and are warmer. Between GPUs there is no tie.
    """
    pa = arrow()
    model = cluster_model(plan.cluster)
    marginals = {**published().utilisation["Seren"], **published().utilisation[model.name]}
    steps = max(1, int(hours * 3600 / every_s))
    rng = np.random.default_rng([plan.seed, 1 << 29])
    origin = int(plan.start.replace(tzinfo=dt.UTC).timestamp() * 1e6)
    times = origin + (np.arange(steps) * every_s * 1e6).astype(np.int64)
    names = [f"node-{i:03d}" for i in range(nodes)]
    rows = 0
    with pa.parquet.ParquetWriter(path, SAMPLES.arrow(), compression="zstd") as out:
        base = drift(rng, steps, nodes * model.gpus_per_node)
        host = drift(rng, steps, nodes)
        for metric in (*GPU_METRICS, *HOST_METRICS):
            gpu = metric in GPU_METRICS
            shared = base if gpu else host
            z = 0.9 * shared + math.sqrt(1 - 0.81) * drift(rng, steps, shared.shape[1])
            value = marginals[metric].quantile(normal_cdf(z))
            width = shared.shape[1]
            n = value.size
            index = np.arange(width)
            node_of = index // model.gpus_per_node if gpu else index
            table = pa.table(
                [
                    pa.array(np.repeat(times, width)).cast(pa.timestamp("us")),
                    pa.repeat(pa.scalar(plan.cluster), n),
                    pa.array(np.tile(np.array(names)[node_of], steps)),
                    pa.array(np.tile((index % model.gpus_per_node).astype(np.int16), steps))
                    if gpu
                    else pa.nulls(n, pa.int16()),
                    pa.nulls(n, pa.string()),
                    pa.repeat(pa.scalar(metric), n),
                    pa.array(np.round(value.reshape(-1), 3)),
                ],
                schema=SAMPLES.arrow(),
            )
            out.write_table(table)
            rows += n
    return rows


def drift(rng: np.random.Generator, steps: int, width: int) -> Array:
    """(steps, width) standard normals that keep 0.98 of themselves from one step to the next."""
    out = np.empty((steps, width))
    out[0] = rng.standard_normal(width)
    noise = rng.standard_normal((steps, width)) * math.sqrt(1 - 0.98**2)
    for t in range(1, steps):
        out[t] = 0.98 * out[t - 1] + noise[t]
    return out
