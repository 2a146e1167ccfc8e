"""`unbroken trace`: characterise a cluster from its scheduler records and hardware metrics; a file for each group."""

from __future__ import annotations

import typer

from .convert import anonymise, convert
from .formats import formats
from .report import report
from .stats import accounts, stats
from .synth import synth

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Characterise a cluster from its scheduler records: every figure of the published study, for your own.",
)
for command in (report, stats, convert, anonymise, accounts, synth, formats):
    app.command()(command)
