"""`unbroken doctor`: what this machine can do for a run, and what it lacks."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Finding:
    """One thing that was tried. `good` says whether it is as it should be; `text` what was found, and what to do."""

    name: str
    good: bool
    text: str


@app.command()
def doctor(
    json_out: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check what this machine can do for unbroken: how processes are held, what the kernel tells, stacks, memory.

    Everything is tried, nothing is left behind. Exit code 0 whatever is found.
    """
    found = examine()
    if json_out:
        print(json.dumps({"findings": [asdict(f) for f in found]}))
        return
    width = max(len(f.name) for f in found)
    for f in found:
        print(f"{'ok' if f.good else 'lacks':<6} {f.name:<{width}}  {f.text}")


def examine() -> list[Finding]:
    """What was found, in the order of the screen."""
    from ..detect.stacks.collecting import find_py_spy
    from ..machine import available_memory, usable_cpus
    from ..units import Bytes

    stacks = find_py_spy()
    memory = available_memory()
    return [
        _ownership(),
        _kernel_log(),
        Finding(
            "stacks", stacks is not None, stacks or "py-spy is not installed: a hang shows no Python stacks"
        ),
        Finding("memory", True, f"{Bytes(memory)} free" if memory is not None else "not known"),
        Finding("processors", True, f"{usable_cpus()} usable"),
    ]


def _ownership() -> Finding:
    """How the processes of a run started here would be held."""
    from ..cluster import Kind
    from ..cluster.local_events import LocalCluster

    cluster = LocalCluster(f"doctor{secrets.token_hex(4)}")
    text = cluster.describe_holding()
    if cluster.owner.kind is not Kind.CGROUP:
        text += ". A cgroup is surer: run as root, or in `systemd-run --user --scope -p Delegate=yes`"
    return Finding("processes", cluster.owner.kind is not Kind.MARKS, f"held by {text}")


def _kernel_log() -> Finding:
    from ..recover.node.kernel_log import killed_for_memory

    if killed_for_memory(0) is None:
        return Finding(
            "kernel log", False, "/dev/kmsg cannot be read: a kill for memory cannot be told from another"
        )
    return Finding("kernel log", True, f"{Path('/dev/kmsg')} can be read: kills for memory are known")
