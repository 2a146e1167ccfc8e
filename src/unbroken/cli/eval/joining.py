"""`unbroken eval join` and `status`: into a running evaluation, and where it stands."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import typer

from ...errors import InputError, UsageError
from . import options


def join(
    out: Path = typer.Argument(help="The evaluation's folder, or its cluster.json"),
    gpus: str = typer.Option(
        "", "--gpus", help="Indices of the GPUs that this worker may see, with commas; empty: CPU"
    ),
    name: str = typer.Option("", "--name", help="Default: host and process id"),
    wait: float = typer.Option(60.0, "--wait", help="Seconds to wait for the coordinator"),
) -> None:
    """Add a worker to a running evaluation, for as long as it likes; it may be killed at any time."""
    from ...evaluate.engines.worker.process import join as join_run

    cluster = out / "cluster.json" if out.is_dir() or out.suffix != ".json" else out
    try:
        indices = [int(g) for g in gpus.split(",") if g.strip()]
    except ValueError as e:
        raise UsageError(f"--gpus {gpus}: not a list of numbers") from e
    code = join_run(cluster, name or f"{os.uname().nodename}-{os.getpid()}", indices, within_s=wait)
    sys.stdout.flush()
    os._exit(code)  # threads of libraries must not hold the GPU


def status(out: Path = typer.Argument(help="The evaluation's folder"), as_json: bool = options.JSON) -> None:
    """Show where an evaluation stands, and whether it runs now."""
    from ...evaluate.result.folder import EvalDir
    from ...evaluate.run.screen import as_json as in_json
    from ...evaluate.run.screen import read_title, seen, status_text

    folder = EvalDir(out)
    try:
        p, live = seen(folder)
    except (FileNotFoundError, NotADirectoryError) as e:
        raise InputError(
            "no evaluation was seen running here",
            where=str(out),
            hint="Give the --out of `unbroken eval run`",
        ) from e
    title = read_title(folder)
    print(json.dumps(in_json(p, live, title)) if as_json else status_text(p, live, title))
