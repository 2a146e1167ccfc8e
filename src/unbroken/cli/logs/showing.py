"""`unbroken logs RUN`: what the ranks print, also while they print it and over restarts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ...errors import InputError

_EACH = 20
"""Lines of each rank where several are shown."""


def show(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")],
    rank: Annotated[
        list[int] | None,
        typer.Option("--rank", "-r", min=0, help="Only this rank; may be given again. Default: all."),
    ] = None,
    node: Annotated[str | None, typer.Option("--node", help="Only the ranks of this node.")] = None,
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=1, help="The attempt. Default: the newest.")
    ] = None,
    tail: Annotated[
        int | None,
        typer.Option(
            "--tail",
            "-n",
            min=0,
            help=f"Only the last lines of each rank. Default: all of one rank, {_EACH} lines each of several.",
        ),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            "-f",
            help="Go on while they print, over restarts and takeovers, until the run ends or Ctrl-C.",
        ),
    ] = False,
) -> None:
    """Show what the ranks of a run print.

    Exit codes: 0 shown, 3 the folder is no run directory or has no such log.
    """
    from ...progress import RunDir, read_spec
    from ...status.rank_logs import Wanted, follow_logs, rank_logs, read_tail

    if follow and attempt is not None:
        raise InputError(
            "--follow goes on with the newest attempt and takes no --attempt", hint="Leave one out"
        )
    where = RunDir(run_dir)
    if not where.spec.exists():
        read_spec(where.spec)  # raises the InputError that says so
    wanted = Wanted(frozenset(rank or ()), node)
    numbers = where.attempt_numbers()
    if attempt is not None and attempt not in numbers:
        known = ", ".join(map(str, numbers[-8:])) or "none"
        raise InputError(f"this run has no attempt {attempt}", where=str(run_dir), hint=f"It has: {known}")
    number = attempt or (numbers[-1] if numbers else 0)
    logs = rank_logs(where, number, wanted) if number else []
    if not logs and not follow:
        what = "log of " + wanted.text() if numbers else "attempt"
        raise InputError(
            f"there is no {what} yet" if not numbers else f"attempt {number} has no {what}", where=str(run_dir),
            hint=f"`unbroken logs {run_dir}` shows the logs of all ranks; `unbroken status {run_dir}` says where the run stands",
        )  # fmt: skip
    several = len(logs) > 1
    lines = tail if tail is not None else (_EACH if several else None)
    if follow:
        follow_logs(where, wanted, lines, _put, _say)
        return
    for log in logs:
        for line in read_tail(log, lines):
            _put(line, log.rank if several else None)


def _put(line: str, rank: int | None) -> None:
    print(line if rank is None else f"rank {rank} | {line}", flush=True)


def _say(text: str) -> None:
    print(f"--- {text}", file=sys.stderr, flush=True)
