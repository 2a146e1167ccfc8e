"""`unbroken trace synth`: a made-up trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ...errors import UsageError
from ...units import Duration
from .options import Json


def synth(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder for jobs.parquet, incidents, nodes, samples.")
    ],
    cluster: Annotated[str, typer.Option("--cluster", help="Seren or Kalos.")] = "Seren",
    jobs: Annotated[int, typer.Option("--jobs", min=0, help="How many jobs.")] = 100_000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same trace.")] = 0,
    gpu_only: Annotated[bool, typer.Option("--gpu-only", help="No CPU jobs.")] = False,
    start: Annotated[str, typer.Option(help="First day.")] = "2023-03-01",
    days: Annotated[int, typer.Option(min=1, help="How many days.")] = 184,
    sample_nodes: Annotated[int, typer.Option(min=0, help="Nodes with hardware samples (0: none).")] = 0,
    sample_hours: Annotated[float, typer.Option(min=0, help="Hours of samples.")] = 24.0,
    sample_every: Annotated[str, typer.Option(help="Interval of samples.")] = "60s",
    as_json: Json = False,
) -> None:
    """Draw a synthetic trace from the published marginals; what depends on what is in docs/trace.md."""
    import datetime as dt

    from ...trace.output.destination import folder_for, writing
    from ...trace.synthetic import generate

    every_s = float(Duration(sample_every))
    if every_s < 1:
        raise UsageError(f"--sample-every {sample_every} is less than a second", hint="Give 1s or more")
    try:
        first = dt.datetime.fromisoformat(start)
    except ValueError as e:
        raise UsageError(f"'{start}' is no day", hint="Write it like 2023-03-01") from e
    plan = generate.TracePlan(cluster, jobs, seed, not gpu_only, first.replace(tzinfo=None), days)
    folder_for(output)
    with writing(output):
        rows = {
            "jobs.parquet": generate.write_jobs(plan, output / "jobs.parquet"),
            "incidents.parquet": generate.write_incidents(plan, output / "incidents.parquet"),
            "nodes.parquet": generate.write_nodes(plan, output / "nodes.parquet"),
        }
        if sample_nodes:
            rows["samples.parquet"] = generate.write_samples(
                plan, output / "samples.parquet", nodes=sample_nodes, hours=sample_hours, every_s=every_s
            )
    if as_json:
        print(json.dumps({"folder": str(output), "written": rows}))
        return
    for name, n in rows.items():
        print(f"{output / name}: {n:,} rows")
