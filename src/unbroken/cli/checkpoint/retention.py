"""`unbroken checkpoint prune` and `keep`: what may go, and what may not yet."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ...errors import Exit, UsageError
from ...units import Bytes, Duration
from .places import Folder, Json, One, newest, place_of


def prune(
    folder: Folder,
    keep_last: Annotated[int, typer.Option(help="Keep this many of the newest.")] = 3,
    keep_every: Annotated[
        int, typer.Option(help="Also keep every step that is a multiple of this (0: none).")
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: Json = False,
) -> None:
    """Remove what the rule does not keep. Pins are respected, and the last one that verifies never goes.

    Exit code 31 if something was found damaged, or could not be removed.
    """
    from ...checkpoint.catalogue.retention import Retention, apply

    storage, name = place_of(folder)
    if name:
        raise UsageError("this is one checkpoint", hint="Name the folder that it lies in")
    outcome = apply(storage, Retention(keep_last, keep_every), dry_run=dry_run)
    if as_json:
        told = {"place": storage.url, "dry_run": dry_run, "freed_bytes": outcome.freed_bytes}
        print(json.dumps({**told, "kept": dict(outcome.kept), "removed": dict(outcome.removed),
                          "errors": dict(outcome.errors)}))  # fmt: skip
    else:
        for kept, why in outcome.kept.items():
            print(f"keep    {kept}  {why}")
        for gone, why in outcome.removed.items():
            print(f"{'would go' if dry_run else 'removed'} {gone}  {why}")
        for bad, why in outcome.errors.items():
            print(f"PROBLEM {bad or storage.url}  {why}")
        verb = "would be freed" if dry_run else "freed"
        print(f"{len(outcome.removed)} removed, {Bytes(outcome.freed_bytes)} {verb}" if not dry_run else
              f"{len(outcome.removed)} would go, {Bytes(outcome.freed_bytes)} {verb}")  # fmt: skip
    if outcome.errors:
        raise typer.Exit(Exit.VERIFY_FOUND_DAMAGE)


def keep(
    place: One,
    holder: Annotated[str, typer.Option(help="Who needs it: a name without spaces.")],
    lasting: Annotated[
        str, typer.Option("--for", help="For how long, for example 6h.", metavar="TIME")
    ] = "24h",
    release: Annotated[bool, typer.Option("--release", help="Give the pin back instead.")] = False,
    as_json: Json = False,
) -> None:
    """Pin a checkpoint, so that retention leaves it alone (while it is evaluated, say)."""
    from ...checkpoint.catalogue.retention import pin_checkpoint, unpin_checkpoint

    storage, name = newest(place)
    if release:
        unpin_checkpoint(storage, name, holder)
        print(
            json.dumps({"name": name, "holder": holder, "until": None})
            if as_json
            else f"{name}: no longer held by {holder}"
        )
        return
    pin = pin_checkpoint(storage, name, holder, Duration(lasting))
    if as_json:
        print(json.dumps({"name": name, "holder": holder, "until": pin.until}))
    else:
        print(f"{name}: held by {holder} for {Duration(lasting)}")
