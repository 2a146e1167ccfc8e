"""`unbroken train`: one rank of the reference trainer; its options are those of `unbroken.train.config`."""

from __future__ import annotations

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def train(ctx: typer.Context) -> None:
    """Train a small Llama-style model, alone or as a rank of torchrun or `unbroken run`."""
    from ..train.command import main

    raise typer.Exit(main(ctx.args))
