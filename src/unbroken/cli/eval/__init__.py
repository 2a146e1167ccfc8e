"""`unbroken eval`: plan, run, watch, compare, join, status, tasks, stage, cache, samples, table; a file for each group."""

from __future__ import annotations

import typer

from .compare import compare
from .data import cache, stage, tasks
from .joining import join, status
from .plan import plan
from .run import run
from .show import samples, table
from .watch import watch

app = typer.Typer(
    help="Evaluate a checkpoint on many datasets in a fraction of the GPU time.",
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)
for command in (run, plan, watch, compare, join, status, tasks, stage, cache, samples, table):
    app.command()(command)
