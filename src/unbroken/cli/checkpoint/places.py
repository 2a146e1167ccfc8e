"""The folder, bucket or checkpoint that a user names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import InputError, NoCheckpoint, StorageError, UsageError

if TYPE_CHECKING:
    from ...checkpoint.storage.base import Storage

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Folder = Annotated[
    str,
    typer.Argument(help="A run directory, a folder of checkpoints, or s3://bucket/prefix.", metavar="FOLDER"),
]
One = Annotated[
    str, typer.Argument(help="A checkpoint, or a folder of them (then the newest one).", metavar="CHECKPOINT")
]


def place_of(text: str, *, must_exist: bool = True) -> tuple[Storage, str | None]:
    """The storage that a user means, and the checkpoint in it if they named one."""
    from ...checkpoint.catalogue.placement import check_folder
    from ...checkpoint.storage import open_storage
    from ...progress import RunDir, newest_place
    from ...progress.records.candidate import parse_folder_name

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


def newest(text: str) -> tuple[Storage, str]:
    """The checkpoint that was named, else the newest that is committed; says which newer ones are damaged."""
    storage, name, passed = newest_of(text)
    for what in passed:
        print(f"unbroken checkpoint: passing over {what}", file=sys.stderr)
    return storage, name


def newest_of(text: str) -> tuple[Storage, str, list[str]]:
    """As `newest`, with what was passed over; what was never finished is not counted."""
    from ...checkpoint.catalogue.contents import listing

    storage, name = place_of(text)
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


def newest_attempt(to: str) -> int:
    """The newest attempt of the run that is to get a checkpoint, 0 where it is none. Raises UsageError where it cannot."""
    from ...checkpoint.catalogue.placement import still_going
    from ...progress import RunDir, read_journal, read_spec, read_terms

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
    from ...progress.records.candidate import parse_folder_name

    return any(parse_folder_name(p.name) for p in folder.iterdir())
