"""`unbroken checkpoint`: what lies in a checkpoints folder or bucket, whether it holds, and ways in and out."""

from __future__ import annotations

import typer

from .converting import copy, export, import_
from .listing import ls, verify
from .retention import keep, prune
from .size import size

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


@app.callback()
def main() -> None:
    """List, verify, export, import, copy and prune checkpoints."""


app.command("list", hidden=True)(ls)
app.command()(ls)
app.command()(verify)
app.command()(export)
app.command("import")(import_)
for command in (copy, prune, keep, size):
    app.command()(command)
