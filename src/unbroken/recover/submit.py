"""A run that its cluster starts itself, as a batch job: submitted from here, supervised there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ..cluster.contract import Request
from ..cluster.options import make_options
from ..cluster.registry import find_cluster
from ..progress import RunDir, RunSpec, read_spec


def submit(
    run_dir: RunDir, spec: RunSpec, arguments: Sequence[str], say: Callable[[str], None]
) -> int | None:
    """Submits this `unbroken run` with its arguments where its cluster asks for that, and follows it; its exit code. None where
    the run is supervised by this process. Raises UsageError, RunError."""
    choice = spec.cluster
    if not choice.name:
        choice = read_spec(run_dir.spec).cluster if run_dir.spec.exists() else choice
    plan = getattr(find_cluster(choice.name), "plan_submission", None) if choice.name else None
    if plan is None:
        return None
    options = make_options(
        find_cluster(choice.name).Options, choice.options, where=f"the cluster '{choice.name}'"
    )
    request = Request(spec.nodes, spec.spares, spec.nproc)
    planned = plan(options, request, arguments, run_dir.path)
    return None if planned is None else asyncio.run(planned.run(say))
