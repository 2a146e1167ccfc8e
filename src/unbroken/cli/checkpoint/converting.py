"""`unbroken checkpoint export`, `import` and `copy`: ways in and out."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from ...errors import CheckpointCorrupt, UsageError
from ...units import Bytes, Duration
from .places import Json, One, newest, newest_attempt, newest_of, place_of


def export(
    place: One,
    to: Annotated[str, typer.Option("--to", help="dcp, huggingface or torch.", metavar="FORMAT")],
    out: Annotated[Path, typer.Option("--out", help="The new folder (dcp, huggingface) or file (torch).")],
    prefix: Annotated[
        str | None, typer.Option(help="huggingface: the part of the state that is the model ('model').")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="huggingface: convert weights, for example bfloat16.")
    ] = None,
    shard: Annotated[str, typer.Option(help="huggingface: the largest file.")] = "5GB",
    config_from: Annotated[
        Path | None, typer.Option(help="huggingface: copy config and tokenizer from this folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint in another format; every byte is verified on the way."""
    _known(to, ("dcp", "huggingface", "torch"))
    storage, name, passed = newest_of(place)
    from ...checkpoint.convert import export as exporting

    try:
        if to == "dcp":
            done = exporting.to_dcp(storage, name, out)
        elif to == "torch":
            done = exporting.to_torch(storage, name, out)
        else:
            done = exporting.to_huggingface(
                storage,
                name,
                out,
                prefix=prefix,
                dtype=dtype,
                max_shard_bytes=Bytes(shard),
                beside=config_from,
            )
    except CheckpointCorrupt as e:
        e.hint = (
            e.hint or "`unbroken checkpoint verify` says what is damaged; export an older one by its name"
        )
        raise
    notes = [f"passed over {what}" for what in passed] + list(done.notes)
    if as_json:
        told = {"checkpoint": name, "format": to, "path": str(done.path), "tensors": done.tensors}
        print(json.dumps({**told, "bytes": done.bytes, "files": list(done.files), "notes": notes}))
        return
    print(f"{name}: {done.tensors} tensors, {Bytes(done.bytes)} written to {done.path} as {to}")
    for note in notes:
        print(f"  {note}")


def import_(
    source: Annotated[
        Path, typer.Argument(help="A DCP folder, a folder of safetensors, or a file of torch.save.")
    ],
    to: Annotated[
        str, typer.Option("--to", help="The folder of checkpoints, or run directory, that gets it.")
    ],
    step: Annotated[int | None, typer.Option(help="Its step, where it does not say so itself.")] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(help="OLD=NEW: names that begin with OLD begin with NEW. Again for more."),
    ] = None,
    drop: Annotated[
        list[str] | None, typer.Option(help="Leave out what is called so, and all under it. Again for more.")
    ] = None,
    trust_pickle: Annotated[
        bool,
        typer.Option(
            "--trust-pickle", help="Also read pickled objects. They can run any code: trust the source."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Import somebody else's checkpoint as a starting point: a run on that folder goes on from it."""
    pairs = []
    for text in rename or []:
        old, sign, new = text.partition("=")
        if not sign:
            raise UsageError(f"'{text}' is no renaming", hint="Write it like --rename module=model")
        pairs.append((old, new))
    storage, name = place_of(to, must_exist=False)
    if name:
        raise UsageError("--to names a checkpoint", hint="Name the folder that gets the new one")
    from ...checkpoint.catalogue.placement import number_for_import
    from ...checkpoint.convert.imports import import_checkpoint, open_external

    newest = newest_attempt(to)
    open_external(source, trust=trust_pickle)  # before a number is taken for it
    number = number_for_import(storage, above=newest)
    manifest = import_checkpoint(
        source, storage, step=step, rename=pairs, drop=drop or [], trust=trust_pickle, attempt=number
    )
    if as_json:
        told = {"name": manifest.name, "step": manifest.step, "place": storage.url}
        print(json.dumps({**told, "tensors": len(manifest.tensors), "bytes": manifest.data_bytes}))
        return
    print(
        f"{manifest.name}: {len(manifest.tensors)} tensors, {Bytes(manifest.data_bytes)}, now in {storage.url}"
    )
    tops: dict[str, int] = {}
    for n in manifest.tensors:
        tops[n.split(".")[0]] = tops.get(n.split(".")[0], 0) + 1
    print("  " + ", ".join(f"{top}: {n} tensors" for top, n in tops.items()))


def copy(
    place: One,
    target: Annotated[str, typer.Argument(help="A folder of checkpoints or s3://bucket/prefix.")],
    as_json: Json = False,
) -> None:
    """Copy a checkpoint to another disk or bucket, verified; the same command goes on after a break."""
    from ...checkpoint.catalogue.mirror import mirror

    storage, name = newest(place)
    where, other = place_of(target, must_exist=False)
    if other:
        raise UsageError("the target names a checkpoint", hint="Name the folder or bucket that gets the copy")
    done = mirror(storage, name, where)
    if as_json:
        told = {
            "name": name,
            "place": where.url,
            "committed": done.committed,
            "seconds": round(done.seconds, 3),
        }
        print(json.dumps({**told, "sent_bytes": done.sent, "skipped_bytes": done.skipped}))
        return
    there = f", {Bytes(done.skipped)} was there already" if done.skipped else ""
    print(f"{name}: {Bytes(done.sent)} sent to {where.url} in {Duration(done.seconds)}{there}")


def _known(value: str, known: Iterable[str]) -> None:
    import difflib

    if value in known:
        return
    near = difflib.get_close_matches(value, list(known), n=1)
    raise UsageError(
        f"there is no format '{value}'",
        hint=f"Did you mean '{near[0]}'?" if near else f"Known: {', '.join(known)}",
    )
