"""`unbroken checkpoint ls` and `verify`: what lies there, and whether it holds."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from ...errors import Exit, InputError
from ...units import Bytes, Duration
from .places import Folder, Json, One, place_of


def ls(folder: Folder, as_json: Json = False) -> None:
    """List what lies there: step, age, size, durability level, ranks, pins, and why any does not count. Newest first."""
    from ...checkpoint.catalogue import contents as catalogue
    from ...checkpoint.catalogue.retention import read_pins

    storage, name = place_of(folder)
    found = [f for f in catalogue.listing(storage) if name in (None, f.name)]
    now = time.time()
    held = {f.name: read_pins(storage, f.name, now=now) for f in found}
    if as_json:
        rows = [
            {
                "name": f.name, "step": f.step, "attempt": f.attempt, "status": f.status, "why": f.why,
                "time": f.time, "age_s": round(max(0.0, now - f.time), 3), "bytes": f.bytes, "files": f.files,
                "rung": f.level, "world_size": f.world_size, "samples": f.samples,
                "leases": [{"holder": x.holder, "until": x.until, "why": x.why} for x in held[f.name]],
            }
            for f in found
        ]  # fmt: skip
        print(json.dumps({"place": storage.url, "checkpoints": rows}))
        return
    if not found:
        print(f"No checkpoint lies in {storage.url}.")
        return
    table = [["CHECKPOINT", "AGE", "SIZE", "RANKS", "LEVEL", "STATE"]]
    for f in found:
        state = f.status.replace("_", " ") + (f": {f.why}" if f.why else "")
        if held[f.name]:
            state += f", held by {', '.join(x.holder for x in held[f.name])}"
        age = str(Duration(max(1, round(now - f.time)))) if f.time else "?"
        level = f.level if f.committed else "-"
        table.append([f.name, age, str(Bytes(f.bytes)), str(f.world_size or "?"), level, state])
    print(columns(table))
    whole = sum(f.committed for f in found)
    print(f"{whole} of {len(found)} committed, {Bytes(sum(f.bytes for f in found))} in {storage.url}")


def verify(
    place: One,
    every: Annotated[
        bool, typer.Option("--all", help="Every committed checkpoint, not only the newest.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Lengths, headers and manifests only, not the data.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Read a checkpoint and compare every byte with its checksums. Exit code 31 if anything differs."""
    from ...checkpoint.catalogue import contents as catalogue

    storage, name = place_of(place)
    if name:
        names = [name]
    else:
        found = catalogue.listing(storage, quick=True)
        names = [f.name for f in found if f.committed or (every and f.status != "incomplete")]
        names = names if every else names[:1]
        if not names:
            raise InputError("there is no committed checkpoint", where=storage.url)
    results = [catalogue.verify_in(storage, n, deep=not quick) for n in names]
    if as_json:
        rows = [
            {
                "name": r.name, "ok": r.ok, "deep": r.deep, "bytes": r.bytes, "seconds": round(r.seconds, 3),
                "problems": [{"file": p.file, "what": p.what} for p in r.problems],
            }
            for r in results
        ]  # fmt: skip
        print(json.dumps({"place": storage.url, "ok": all(r.ok for r in results), "checkpoints": rows}))
    else:
        for r in results:
            read = f", {Bytes(r.bytes)} read in {Duration(r.seconds)}" if r.bytes else ""
            print(f"{r.name}: {'whole' if r.ok else 'DAMAGED'}{read}")
            for p in r.problems:
                print(f"  {p}")
    if not all(r.ok for r in results):
        raise typer.Exit(Exit.VERIFY_FOUND_DAMAGE)


def columns(table: list[list[Any]]) -> str:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table
    )
