"""`unbroken ls`: the runs below a folder, one line each."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def ls(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FOLDER]...",
            help="Where to look. Default: runs, where `unbroken run` puts them, or this folder.",
        ),
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state", help="Only runs in this state: running, completed, stopped, ... May be given again."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List runs: which, where, state, step, attempts, incidents. The newest sign of life first.

    Only reads. Exit codes: 0 listed, also where there is none, 3 a folder is not there.
    """
    from ...status.page import STATUS_TEXT
    from ...status.runs import find_runs, summarize_run
    from ...units import Duration
    from ..checkpoint.listing import columns

    places = folders or [Path("runs") if Path("runs").is_dir() else Path()]
    now = time.time()
    lines = [summarize_run(run, now=now) for folder in places for run in find_runs(folder)]
    lines.sort(key=lambda r: -(r.last or 0.0))
    if state:
        lines = [r for r in lines if r.status in state or STATUS_TEXT.get(r.status) in state]
    if as_json:
        print(json.dumps({"now": now, "runs": [r.as_json() for r in lines]}))
        return
    if not lines:
        print(f"No run{' in that state' if state else ''} lies in {', '.join(map(str, places))}.")
        return
    here = Path.cwd()
    table = [["RUN", "STATE", "STEP", "RANKS", "ATTEMPTS", "INCIDENTS", "LAST SIGN", "HOST", ""]]
    for r in lines:
        path = Path(r.run_dir)
        name = str(path.relative_to(here) if path.is_relative_to(here) else path)
        said = STATUS_TEXT.get(r.status, r.status if r.status != "unknown" else "not known from here")
        why = r.why if r.status in ("stopped", "damaged") else ""
        ago = f"{Duration(max(1, round(now - r.last)))} ago" if r.last else "-"
        ranks = f"{r.nodes} x {r.nproc}" if r.nodes else "-"
        step = f"{r.step:,}" if r.step >= 0 else "-"
        table.append(
            [
                name,
                said,
                step,
                ranks,
                str(r.attempts),
                str(r.incidents),
                ago,
                r.host or "-",
                why if len(why) <= 60 else why[:59] + "…",
            ]
        )
    print(columns(table))
