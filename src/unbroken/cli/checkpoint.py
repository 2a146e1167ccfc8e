"""`unbroken checkpoint`: what lies in a checkpoints folder or bucket, whether it holds, and ways in and out."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import CheckpointCorrupt, Exit, InputError, NoCheckpoint, StorageError, UsageError
from ..units import Bytes, Duration

if TYPE_CHECKING:
    from ..checkpoint.storage.base import Storage

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Folder = Annotated[
    str,
    typer.Argument(help="A run directory, a folder of checkpoints, or s3://bucket/prefix.", metavar="FOLDER"),
]
One = Annotated[
    str, typer.Argument(help="A checkpoint, or a folder of them (then the newest one).", metavar="CHECKPOINT")
]


@app.callback()
def main() -> None:
    """List, verify, export, import, copy and prune checkpoints."""


@app.command("list", hidden=True)
@app.command()
def ls(folder: Folder, as_json: Json = False) -> None:
    """List what lies there: step, age, size, durability level, ranks, pins, and why any does not count. Newest first."""
    from ..checkpoint.catalogue import contents as catalogue
    from ..checkpoint.catalogue.retention import read_pins

    storage, name = _place(folder)
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
    print(_columns(table))
    whole = sum(f.committed for f in found)
    print(f"{whole} of {len(found)} committed, {Bytes(sum(f.bytes for f in found))} in {storage.url}")


@app.command()
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
    from ..checkpoint.catalogue import contents as catalogue

    storage, name = _place(place)
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


@app.command()
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
    storage, name, passed = _newest_of(place)
    from ..checkpoint.convert import export as exporting

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


@app.command("import")
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
    storage, name = _place(to, must_exist=False)
    if name:
        raise UsageError("--to names a checkpoint", hint="Name the folder that gets the new one")
    from ..checkpoint.catalogue.placement import number_for_import
    from ..checkpoint.convert.imports import import_checkpoint, open_external

    newest = _newest_attempt(to)
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


@app.command()
def copy(
    place: One,
    target: Annotated[str, typer.Argument(help="A folder of checkpoints or s3://bucket/prefix.")],
    as_json: Json = False,
) -> None:
    """Copy a checkpoint to another disk or bucket, verified; the same command goes on after a break."""
    from ..checkpoint.catalogue.mirror import mirror

    storage, name = _newest(place)
    where, other = _place(target, must_exist=False)
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


@app.command()
def prune(
    folder: Folder,
    keep_last: Annotated[int, typer.Option(help="Keep this many of the newest.")] = 3,
    keep_every: Annotated[
        int, typer.Option(help="Also keep every step that is a multiple of this (0: none).")
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: Json = False,
) -> None:
    """Remove what the rule does not keep. Leases are respected, and the last one that verifies never goes.

    Exit code 31 if something was found damaged, or could not be removed.
    """
    from ..checkpoint.catalogue.retention import Retention, apply

    storage, name = _place(folder)
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


@app.command()
def keep(
    place: One,
    holder: Annotated[str, typer.Option(help="Who needs it: a name without spaces.")],
    lasting: Annotated[
        str, typer.Option("--for", help="For how long, for example 6h.", metavar="TIME")
    ] = "24h",
    release: Annotated[bool, typer.Option("--release", help="Give the lease back instead.")] = False,
    as_json: Json = False,
) -> None:
    """Hold a lease on a checkpoint, so that retention leaves it alone (while it is evaluated, say)."""
    from ..checkpoint.catalogue.retention import pin_checkpoint, unpin_checkpoint

    storage, name = _newest(place)
    if release:
        unpin_checkpoint(storage, name, holder)
        print(
            json.dumps({"name": name, "holder": holder, "until": None})
            if as_json
            else f"{name}: no longer held by {holder}"
        )
        return
    lease = pin_checkpoint(storage, name, holder, Duration(lasting))
    if as_json:
        print(json.dumps({"name": name, "holder": holder, "until": lease.until}))
    else:
        print(f"{name}: held by {holder} for {Duration(lasting)}")


@app.command()
def size(
    parameters: Annotated[str | None, typer.Argument(help="Number of parameters: 7e9, 7B, 350M.")] = None,
    like: Annotated[
        str | None, typer.Option(help="As large as this checkpoint, instead.", metavar="CHECKPOINT")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Type of the parameters.")] = "float32",
    optimizer: Annotated[
        str, typer.Option(help="adamw, adam, sgd, momentum, lion, adagrad, none.")
    ] = "adamw",
    master: Annotated[
        bool, typer.Option("--master", help="fp32 copies of 16-bit parameters are saved too.")
    ] = False,
    ranks: Annotated[int, typer.Option(help="Ranks of the run.")] = 1,
    ranks_per_node: Annotated[int, typer.Option(help="Ranks on one node.")] = 8,
    replicated: Annotated[
        bool,
        typer.Option("--replicated", help="Every rank has all of it (plain data parallel), not a shard."),
    ] = False,
    buffers: Annotated[int, typer.Option(help="Snapshots that the keeper holds for each rank.")] = 3,
    peer: Annotated[
        bool, typer.Option("--peer", help="Each keeper also holds another node's snapshots.")
    ] = False,
    keep_last: Annotated[int, typer.Option(help="Checkpoints kept on disk.")] = 3,
    as_json: Json = False,
) -> None:
    """Say how much host memory and disk a run will need for its checkpoints, before it starts."""
    from .. import machine
    from ..checkpoint.catalogue import sizing

    if (parameters is None) == (like is None):
        raise UsageError("give a number of parameters, or --like CHECKPOINT")
    if like is not None:
        from ..checkpoint.catalogue.contents import read_committed

        storage, name = _newest(like)
        manifest = read_committed(storage, name)
        state = sum(t.total_bytes for n, t in manifest.tensors.items() if n not in manifest.aliases)
    else:
        state = sizing.state_bytes(_count(str(parameters)), dtype=dtype, optimizer=optimizer, master=master)
    plan = sizing.Plan(state, ranks, ranks_per_node, not replicated, buffers, peer, keep_last)
    needed, total = sizing.need(plan), machine.usable_memory()
    fits = needed.node_host_bytes <= total * 0.8
    if as_json:
        told = {
            "state_bytes": state,
            "rank_bytes": needed.rank_bytes,
            "node_host_bytes": needed.node_host_bytes,
        }
        print(json.dumps({**told, "checkpoint_bytes": needed.checkpoint_bytes, "folder_bytes": needed.folder_bytes,
                          "this_machine_bytes": total, "fits_here": fits}))  # fmt: skip
        return
    held = f"{min(ranks, ranks_per_node)} ranks x {buffers} snapshots" + (
        ", twice for the peer" if peer else ""
    )
    print(f"state            {Bytes(state)}")
    print(f"per rank         {Bytes(needed.rank_bytes)}")
    print(f"host memory      {Bytes(needed.node_host_bytes)} on each node ({held})")
    print(f"one checkpoint   {Bytes(needed.checkpoint_bytes)}")
    print(f"disk             {Bytes(needed.folder_bytes)} ({keep_last} kept, and the one being written)")
    print(f"this machine     {Bytes(total)} of memory, {Bytes(machine.available_memory() or 0)} free: "
          f"{'enough for a node' if fits else 'NOT enough for a node (at most four fifths should be snapshots)'}")  # fmt: skip


# places and texts -----------------------------------------------------------------------------------------------


def _place(text: str, *, must_exist: bool = True) -> tuple[Storage, str | None]:
    """The storage that a user means, and the checkpoint in it if they named one."""
    from ..checkpoint.catalogue.placement import check_folder
    from ..checkpoint.format.manifest import parse_folder_name
    from ..checkpoint.storage import open_storage
    from ..progress import RunDir, newest_place

    above, _, last = text.rstrip("/").rpartition("/")
    if parse_folder_name(last):
        storage = open_storage(above or ("/" if text.startswith("/") else "."))
        if must_exist and not storage.list(last):
            raise NoCheckpoint(f"there is no checkpoint '{last}'", where=storage.url,
                               hint="`unbroken checkpoint ls` lists them")  # fmt: skip
        return storage, last
    if "://" in text and not text.startswith("file://"):
        return open_storage(text), None
    folder = Path(text.removeprefix("file://"))
    try:
        if not folder.exists():
            check_folder(folder.absolute(), "this")
    except StorageError as e:
        raise InputError(e.message, where=e.where, hint=e.hint) from None
    if (folder / "run.toml").exists():
        return open_storage(newest_place(RunDir(folder))), None
    if (folder / "checkpoints").is_dir() and not _holds_checkpoints(folder):
        folder = folder / "checkpoints"
    elif must_exist and not folder.is_dir():
        raise InputError("there is no such folder", where=str(folder))
    if folder.exists() and not folder.is_dir():
        raise InputError("this is a file, not a folder of checkpoints", where=str(folder))
    if (folder / "manifest.json").exists() or (folder / "COMMITTED").exists():
        raise InputError(
            "this folder holds one checkpoint under another name",
            where=str(folder),
            hint="Give it back the name that it was written with (step-00001200.a0003)",
        )
    return open_storage(folder), None


def _newest(text: str) -> tuple[Storage, str]:
    """The checkpoint that was named, else the newest that is committed; says which newer ones are damaged."""
    storage, name, passed = _newest_of(text)
    for what in passed:
        print(f"unbroken checkpoint: passing over {what}", file=sys.stderr)
    return storage, name


def _newest_of(text: str) -> tuple[Storage, str, list[str]]:
    """As `_newest`, with what was passed over; what was never finished is not counted."""
    from ..checkpoint.catalogue.contents import listing

    storage, name = _place(text)
    if name:
        return storage, name, []
    passed: list[str] = []
    for f in listing(storage):
        if f.committed:
            return storage, f.name, passed
        if f.status != "incomplete":
            passed.append(f"{f.name}: {f.why}")
    if passed:
        raise NoCheckpoint(f"no checkpoint verifies: {'; '.join(passed[:5])}", where=storage.url)
    raise InputError("there is no committed checkpoint", where=storage.url)


def _newest_attempt(to: str) -> int:
    """The newest attempt of the run that is to get a checkpoint, 0 where it is none. Raises UsageError where it cannot."""
    from ..checkpoint.catalogue.placement import still_going
    from ..progress import RunDir, read_journal, read_spec, read_terms

    run_dir = RunDir(to)
    if "://" in to or not run_dir.spec.exists():
        return 0
    records = read_journal(run_dir).records
    if any(r["kind"] == "status" and r.get("status") == "completed" for r in records):
        raise UsageError(
            "this run is completed and does not go on",
            where=to,
            hint="Start a new one from the checkpoint: unbroken run --from CHECKPOINT --run-dir ANOTHER ...",
        )
    terms = read_terms(run_dir)
    if terms and still_going(to, read_spec(run_dir.spec).run_id) and not terms[-1].supervisor_is_gone():
        raise UsageError(
            "this run is going on",
            where=to,
            hint="Stop it first; then its next start goes on from the import",
        )
    return max((int(r["attempt"]) for r in records if r["kind"] == "attempt"), default=0)


def _holds_checkpoints(folder: Path) -> bool:
    from ..checkpoint.format.manifest import parse_folder_name

    return any(parse_folder_name(p.name) for p in folder.iterdir())


def _known(value: str, known: Iterable[str]) -> None:
    import difflib

    if value in known:
        return
    near = difflib.get_close_matches(value, list(known), n=1)
    raise UsageError(
        f"there is no format '{value}'",
        hint=f"Did you mean '{near[0]}'?" if near else f"Known: {', '.join(known)}",
    )


def _count(text: str) -> int:
    scales = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
    scale = scales.get(text[-1:].lower(), 1.0)
    try:
        number = float(text[:-1] if scale != 1.0 else text) * scale
        if not 0 <= number < 1e18:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"'{text}' is no number of parameters", hint="Write it like 7e9, 7B or 350M"
        ) from None
    return int(number)


def _columns(table: list[list[Any]]) -> str:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table
    )
