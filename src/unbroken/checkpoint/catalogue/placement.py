"""Where the checkpoints of a training lie, who may write there, and what of it counts: one contract for all launchers.

1. The *place* is the folder or address that is given to `Checkpointer`; without one, the run's own folder. Nothing
   else decides. All ranks of an attempt have one place.
2. In a place, attempts are numbered by *claims*: `attempts/00000007` is created exclusively, by whoever starts an
   attempt or brings a checkpoint from elsewhere, and says who that is. A number is never used twice, so two
   trainings never write into one folder, whatever launched them.
3. What lies in a place and was not written by this run is taken as its starting point when an attempt begins, and
   written down; from then on only that, and what the run accepts from attempts of its own (their seals), counts.
4. A place in which another run of `unbroken run` has not ended, or has gone on after this one, is refused.
5. What was there before a run is never removed by its retention (`Retention.spare_below`).

Under `unbroken run` the ranks name the place when they open their Checkpointer: rank -> keeper -> agent ->
supervisor, which examines and claims it, journals it, and lets the ranks go on only then. Alone and under torchrun
rank 0 does the same. No torch here.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ...errors import StorageError, UnbrokenError, UsageError
from ...progress import RunDir, read_journal, read_spec
from ...progress.records.candidate import parse_folder_name
from ..storage.base import Storage
from .contents import listing

CLAIMS = "attempts"


@dataclass(frozen=True)
class Claim:
    """Who took an attempt's number. `kind`: run (of `unbroken run`), alone (torchrun or plain Python), import, or
    unknown (of an older version). `started` is in Unix seconds."""

    number: int
    kind: str = "unknown"
    run_id: str = ""
    run_dir: str = ""
    host: str = ""
    started: float = 0.0

    @property
    def name(self) -> str:
        return f"{CLAIMS}/{self.number:08d}"


@dataclass(frozen=True)
class Survey:
    """What somebody who wants to write there must know of a place. `highest` is the highest number that others have used;
    `others` the committed checkpoints by attempt that this run did not write; `where_from` says whose they are."""

    highest: int
    others: Mapping[int, tuple[str, ...]]
    where_from: str = ""


def place_of(directory: str | Path | None, run_dir: Path | None) -> str:
    """The place as an absolute path or address. Raises UsageError where neither is given, StorageError."""
    if directory is None:
        if run_dir is None:
            raise UsageError(
                "there is no folder for checkpoints",
                hint="Give Checkpointer a directory, or start with `unbroken run`",
            )
        return str(run_dir / "checkpoints")
    text = str(directory)
    if not text:
        raise UsageError(
            "the folder for checkpoints is empty text", hint="Give Checkpointer a folder or an address"
        )
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    elif "://" in text:
        return text.rstrip("/")
    folder = Path(text).absolute()
    check_folder(folder)
    return str(folder)


def check_folder(folder: Path, what: str = "the folder for checkpoints") -> None:
    """Raises StorageError, in words, for a path that can never become a folder: a file, or a link to nothing."""
    for path in (folder, *folder.parents):
        if path.is_dir():
            return
        if path.is_symlink():
            raise StorageError(
                f"{what} is a link to {os.readlink(path)}, which does not exist",
                where=str(path),
                hint="Make the folder that it points to, or remove the link",
            )
        if path.exists():
            raise StorageError(
                f"{what} is not a folder" if path == folder else f"{what} would lie in a file",
                where=str(path),
                hint="Name a folder",
            )


def same_place(a: str, b: str) -> bool:
    """Whether both name one place: links and dots in paths do not make another of it."""
    if a == b:
        return True
    if "://" in a or "://" in b:
        return a.rstrip("/") == b.rstrip("/")
    return os.path.realpath(a) == os.path.realpath(b)


def elsewhere_of(folder: str, run_id: str) -> str:
    """Where the last checkpoint of this run goes if its own place refuses it; "" where no folder was named."""
    return f"{folder.rstrip('/')}/{run_id}" if folder else ""


def claim(storage: Storage, number: int, kind: str, *, run_id: str = "", run_dir: str = "") -> bool:
    """Takes an attempt's number for good; False if somebody has it. Raises StorageError."""
    mine = Claim(number, kind, run_id, run_dir, socket.gethostname(), round(time.time(), 3))
    return storage.create(mine.name, json.dumps(asdict(mine)).encode() + b"\n")


def claims(storage: Storage) -> dict[int, Claim]:
    """Every claim by its number; what cannot be read is of an unknown kind. Raises StorageError."""
    return {n: read_claim(storage, n) for n in numbers(storage)}


def numbers(storage: Storage) -> list[int]:
    """The numbers that are claimed, lowest first."""
    return sorted(int(n) for n in storage.list(CLAIMS) if n.isdigit())


def read_claim(storage: Storage, number: int) -> Claim:
    """The claim of this number."""
    known = {f.name for f in fields(Claim)}
    try:
        value: Any = json.loads(storage.read(Claim(number).name))
        return Claim(**{**{k: v for k, v in value.items() if k in known}, "number": number})
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return Claim(number)


def next_number(storage: Storage, *, above: int = 0) -> int:
    """A number that nobody has used there, as far as can be seen. Raises StorageError."""
    return max([above, *numbers(storage), *_written(storage)], default=0) + 1


def number_for_import(storage: Storage, *, above: int = 0) -> int:
    """The attempt's number that a checkpoint from elsewhere is written under: above all that is there, and claimed.

    `above` is the newest attempt of the run that the place belongs to. Raises StorageError.
    """
    if not above and not numbers(storage) and not _written(storage):
        return 0
    number = next_number(storage, above=above)
    while not claim(storage, number, "import"):
        number += 1
    return number


def survey(storage: Storage, *, run_id: str, mine: Collection[int], url: str = "") -> Survey:
    """What a run finds in a place that it wants to write to. `mine` are the numbers of its own attempts there.

    Raises UsageError where it may not (rule 4), StorageError.
    """
    known = claims(storage)
    own = {n for n, c in known.items() if c.kind == "run" and c.run_id == run_id} | set(mine)
    others = {n: c for n, c in known.items() if n not in own}
    runs = {c.run_id: c for _, c in sorted(others.items()) if c.kind == "run"}
    accepted: dict[str, set[str]] = {}
    for other in runs.values():
        _refuse_living(other, url or storage.url)
        if own and other.number > min(own):
            raise UsageError(
                "another run has gone on in this folder of checkpoints since",
                where=f"{url or storage.url}, run directory {other.run_dir}",
                hint=f"Go on with that run, or start a new one in another folder: unbroken run --from {other.run_dir} ...",
            )
        accepted[other.run_id] = _sealed(other)
    found: dict[int, list[str]] = {}
    for f in listing(storage, quick=True):
        if f.committed and f.attempt not in own:
            by = known.get(f.attempt)
            if (
                by is not None
                and by.kind == "run"
                and accepted.get(by.run_id)
                and f.name not in accepted[by.run_id]
            ):
                continue  # its own run did not accept it
            found.setdefault(f.attempt, []).append(f.name)
    highest = max([n for n in (0, *known, *_written(storage)) if n not in own])
    whose = sorted({_whose(known.get(n)) for n in found})
    return Survey(highest, {n: tuple(names) for n, names in sorted(found.items())}, ", ".join(whose))


def refuse_supervised(storage: Storage, url: str) -> None:
    """Raises UsageError if a run of `unbroken run` has not ended in this place: for who starts there without one."""
    for number in reversed(numbers(storage)):
        last = read_claim(storage, number)
        if last.kind == "run":
            _refuse_living(last, url)
            return


def still_going(run_dir: str, run_id: str) -> bool:
    """Whether the run in this directory has begun and not ended (it may be down, and go on)."""
    folder = RunDir(run_dir)
    try:
        if read_spec(folder.spec).run_id != run_id:
            return False
        records = read_journal(folder).records
    except (UnbrokenError, OSError):
        return False
    last = next((r for r in reversed(records) if r["kind"] in ("status", "epoch")), None)
    return last is not None and last["kind"] == "epoch"


def _refuse_living(other: Claim, url: str) -> None:
    if other.host in ("", socket.gethostname()) and not Path(other.run_dir or "/").is_dir():
        return
    if still_going(other.run_dir, other.run_id):
        raise UsageError(
            "another run uses this folder of checkpoints, and has not ended",
            where=f"{url}, run directory {other.run_dir}",
            hint=f"Give the script another folder, or end that run first (see `unbroken status {other.run_dir}`)",
        )


def _sealed(other: Claim) -> set[str]:
    """What another run accepted, all of its seals; empty where that cannot be read any more."""
    try:
        records = read_journal(RunDir(other.run_dir)).records
    except (UnbrokenError, OSError):
        return set()
    return {str(n) for r in records if r["kind"] == "seal" for n in r.get("checkpoints", ())}


def _written(storage: Storage) -> list[int]:
    return [key[1] for n in storage.folders() if (key := parse_folder_name(n))]


def _whose(by: Claim | None) -> str:
    if by is None or by.kind == "unknown":
        return "earlier attempts there"
    return {
        "run": f"the run {by.run_dir}", "alone": "attempts without a supervisor", "import": "an import",
    }.get(by.kind, "earlier attempts there")  # fmt: skip
