"""`unbroken logs`: what the ranks of a run print, and logs without their chatter."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from .compressing import compress
from .showing import show


class _RunOrCommand(TyperGroup):
    """A first argument that is none of the commands is a run directory: `unbroken logs RUN` is `unbroken logs show RUN`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = next((a for a in args if not a.startswith("-")), None)
        if first is not None and first not in self.commands:
            args = ["show", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunOrCommand,
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Show what the ranks of a run print (`unbroken logs RUN --rank 3 --follow`), or compress logs.",
)


@app.callback()
def main() -> None:
    """Show what the ranks of a run print, or compress logs: drop the chatter, keep the evidence."""


app.command()(show)
app.command()(compress)
