"""Chooses how the processes of a run are held on this machine: the surest way that was tried and works."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ...errors import RunError
from ...private import private_folder
from .apart import Apart, Container
from .cgroups import Cgroups
from .descent import Marks, Parents
from .ownership import Kind, Ownership


def choose(run_id: str, scratch: Path, wanted: Kind | None = None) -> tuple[Ownership, str]:
    """The ownership to use, the surest that works here or the one `wanted`, and why it is not a surer one.

    `scratch` is the run's volatile folder on this machine. Raises RunError where `wanted` does not work here.
    """
    whys = []
    if wanted in (None, Kind.CGROUP):
        found, why = Cgroups.find(run_id)
        if found is not None:
            return found, ""
        whys.append(why)
        if wanted is not None:
            raise RunError(
                f"processes cannot be held by a cgroup here: {why}",
                hint="Leave --ownership out: the surest way that works here is taken",
            )
    if wanted in (None, Kind.PARENT):
        why = Parents.missing()
        if not why:
            return Parents(run_id, scratch), "; ".join(whys)
        whys.append(why)
        if wanted is not None:
            raise RunError(f"processes cannot be held by a parent process here: {why}")
    return Marks(run_id, scratch), "; ".join(whys)


def from_text(text: str, run_id: str, scratch: Path) -> Ownership:
    """The ownership that `as_text` described. Raises ValueError."""
    kind, _, place = text.partition(":")
    match Kind(kind):
        case Kind.CGROUP:
            return Cgroups(run_id, Path(place))
        case Kind.PARENT if place:
            return Apart(run_id, scratch, Container.from_text(place))
        case Kind.PARENT:
            return Parents(run_id, scratch)
        case _:
            return Marks(run_id, scratch)


def every(run_id: str, scratch: Path) -> list[Ownership]:
    """Each way in which an earlier supervisor of this run may have held processes here."""
    parents = Parents(run_id, scratch)
    held: list[Ownership] = [parents] if parents.nodes() else []
    return [*(Cgroups(run_id, place) for place in Cgroups.left_by(run_id)), *held]


def hold_itself(
    module: str, arguments: Sequence[str], run_id: str, node: str, scratch: Path, wanted: str
) -> NoReturn:
    """Becomes a node's agent that is held: this process runs the module again, as `Ownership.start_agent` would start it.

    `scratch` is the node's volatile folder, `wanted` the way to hold it or "auto". What comes on standard input is the
    agent's. Raises RunError where that way does not work, OSError.
    """
    root = scratch.parent
    private_folder(root)
    owner, _ = choose(run_id, root, None if wanted == "auto" else Kind(wanted))
    argv = [
        sys.executable,
        "-m",
        module,
        *arguments,
        "--ownership",
        owner.as_text(),
        "--scratch",
        str(scratch),
    ]
    for other in every(run_id, root):
        if other.as_text() != owner.as_text():
            argv += ["--held-before", other.as_text()]
    start = owner.start_agent(node, argv)
    marks = {"UNBROKEN_RUN_ID": run_id, "UNBROKEN_NODE": node, "UNBROKEN_ROLE": "agent"}
    start.enter()
    start.close()
    os.execve(start.argv[0], list(start.argv), {**os.environ, **marks, **start.env})
