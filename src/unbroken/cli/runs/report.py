"""`unbroken report`: the record of a run as one self-contained page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="DIR", help="The run directory.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write the page. Default: DIR/report.html")
    ] = None,
    json_out: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Write a run's report.html: loss curve with incidents, timeline, what happened, ETTR, checkpoints, logs.

    Works at any moment, also while the run goes on and where parts of its folder are damaged. The page needs no
    network. Exit codes: 0 written, 3 the folder is no run directory, 34 the page cannot be written.
    """
    from ...progress import RunDir
    from ...status import gather, report_json, write_report

    folder = RunDir(run_dir)
    told = gather(folder)
    path = write_report(folder, to=output, report=told)
    if json_out:
        print(json.dumps(report_json(told, path)))
    else:
        print(path)
