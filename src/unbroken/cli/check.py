"""`unbroken check`: whether this node is fit to train, for a Slurm prolog or an init container."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import Exit, InputError, MissingExtra, UsageError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def check(
    interface: Annotated[
        list[str] | None,
        typer.Option(help="A network interface, or a port such as mlx5_0/1, that has to be up."),
    ] = None,
    folder: Annotated[list[Path] | None, typer.Option(help="A folder that has to take bytes.")] = None,
    within: Annotated[float, typer.Option(min=0.1, help="Seconds for everything.")] = 5.0,
    json_out: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check quickly whether this node is fit to train: GPUs, kernel log, network, shared memory, folders. Needs no torch.

    Exit code 0: nothing bad was found, which is not the same as healthy: what could not be read is told as not checked. 26: something
    is bad. As root it refuses a PYTHONPATH, by which others could put code of theirs in its place.
    """
    if os.geteuid() == 0 and os.environ.get("PYTHONPATH"):
        raise UsageError(
            "root does not check with a PYTHONPATH: whoever can write there could run anything",
            hint="Unset PYTHONPATH, or start it as `python -I -m unbroken check`",
        )
    from ..detect.node import CheckedNode, State, check_node

    nvml, why = _open_nvml()
    found = check_node(CheckedNode(nvml, why, interface or (), folder or ()), within)
    bad = any(c.state is State.BAD for c in found)
    if json_out:
        print(json.dumps({"fit": not bad, "checks": [asdict(c) for c in found]}))
    else:
        width = max(len(f"{c.name} {c.device}") for c in found)
        for c in found:
            print(f"{c.state:<11}  {f'{c.name} {c.device}'.strip():<{width}}  {c.text}")
    if bad:
        raise typer.Exit(Exit.CHECK_FOUND_FAULT)


def _open_nvml() -> tuple[Any | None, str]:
    from ..telemetry.samplers.gpu import load_nvml

    try:
        return load_nvml(), ""
    except (MissingExtra, InputError) as e:
        return None, e.message
