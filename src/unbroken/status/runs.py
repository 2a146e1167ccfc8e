"""Many runs: which there are below a folder, and each on one line. Quick for a run of any length: no step is read but the last."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, UnbrokenError
from ..progress import RunDir, read_journal, read_spec, read_terms
from .gather import status_of
from .run_status import newest_step

DEPTH = 4
"""Folders below the one that is asked for."""


@dataclass(frozen=True)
class RunLine:
    """One run as a line of `unbroken ls`. `status`: as in `RunStatus`, or damaged, with `why`."""

    run_dir: str
    run_id: str | None
    status: str
    why: str
    host: str
    """Where its supervisor is or was; "" before the first."""
    nodes: int
    nproc: int
    attempts: int
    incidents: int
    step: int
    """The newest that was received, -1 before the first."""
    started: float | None
    last: float | None
    """When something last came of it: a step or a record of its journal (seconds since the epoch)."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def find_runs(folder: Path, depth: int = DEPTH) -> Iterator[RunDir]:
    """The run directories in a folder, itself included; none inside another. Raises InputError for what is no folder."""
    if not folder.is_dir():
        raise InputError(
            "there is no such folder", where=str(folder), hint="Name one that holds run directories"
        )
    run = RunDir(folder)
    if run.spec.is_file():
        yield run
        return
    if depth == 0:
        return
    with os.scandir(folder) as entries:
        below = sorted(
            e.path for e in entries if not e.name.startswith(".") and e.is_dir(follow_symlinks=False)
        )
    for path in below:
        try:
            yield from find_runs(Path(path), depth - 1)
        except OSError:
            continue  # not ours to read: what lies in it is not listed


def summarize_run(run_dir: RunDir, *, now: float | None = None) -> RunLine:
    """A run on one line. What is damaged is said there, never raised."""
    now = time.time() if now is None else now
    try:
        spec, terms = read_spec(run_dir.spec), read_terms(run_dir)
        records = read_journal(run_dir).records
    except (OSError, UnbrokenError) as e:
        return RunLine(
            str(run_dir.path), None, "damaged", str(e).split("\n")[0], "", 0, 0, 0, 0, -1, None, None
        )
    status, why = status_of(records, terms)
    host = terms[-1].host if terms else ""
    if status == "running" and host != socket.gethostname():
        status, why = "unknown", f"its supervisor is on {host}"
    attempts = run_dir.attempt_numbers()
    step, _ = newest_step(run_dir, attempts)
    known = [
        int(r["step"]) for r in records if r.get("kind") in ("ended", "incident", "status") and "step" in r
    ]
    moments = [float(r["t"]) for r in records[-1:]] + ([step.time] if step else [])
    return RunLine(
        run_dir=str(run_dir.path), run_id=spec.run_id, status=status, why=why, host=host, nodes=spec.nodes,
        nproc=spec.nproc, attempts=len(attempts), incidents=sum(r.get("kind") == "incident" for r in records),
        step=step.step if step else max(known, default=-1), started=terms[0].claimed if terms else None,
        last=max(moments, default=None),
    )  # fmt: skip
