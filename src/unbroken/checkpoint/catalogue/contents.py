"""What lies in a checkpoints folder or bucket: which checkpoints count, which do not and why, and whether bytes hold.

Everything that is read here may be torn, hostile, or vanish meanwhile; nothing but what verifies is ever returned.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointCorrupt, CheckpointError, CheckpointTooNew, NoCheckpoint, StorageError
from ...journal.checksummed import digest
from ...progress.records.candidate import parse_folder_name
from ...units import plural
from ..format import layout as arena
from ..format.manifest import (
    COMMITTED,
    MANIFEST,
    Committed,
    FileRecord,
    Manifest,
    PartManifest,
    data_name,
    part_name,
)
from ..storage.base import Storage
from ..storage.pages import scratch_pages
from ..storage.posix import PosixStorage

_MAX_MARKER = 64 * 2**10
_MAX_JSON = 2**29  # a manifest of 2048 ranks and 3000 tensors, sharded unevenly, is below


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: in which file, and what."""

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


@dataclass(frozen=True)
class Verification:
    """The result of `verify`. `deep`: every byte was read, not only lengths, headers and manifests."""

    name: str
    deep: bool
    bytes: int
    seconds: float
    problems: tuple[Problem, ...]
    manifest: Manifest | None

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class Found:
    """One folder of the listing. `status`: committed, incomplete (no marker yet), damaged, too_new, or
    unreadable (the storage failed just now).

    `why` says what is wrong where it is not committed. `time` is when it was committed, else when it was last
    written to (Unix seconds); `bytes` are those of all its files.
    """

    name: str
    step: int
    attempt: int
    status: str
    time: float
    bytes: int
    files: int
    level: str
    why: str = ""
    world_size: int = 0
    samples: int = 0

    @property
    def committed(self) -> bool:
        return self.status == "committed"


def read_marker(storage: Storage, name: str) -> Committed:
    """The commit marker of checkpoint `name`.

    Raises NoCheckpoint without one, CheckpointCorrupt, CheckpointTooNew, StorageError.
    """
    where = f"{storage.url}/{name}"
    try:
        data = _small(storage, f"{name}/{COMMITTED}", _MAX_MARKER)
    except FileNotFoundError:
        raise NoCheckpoint("there is no commit marker: it was never finished", where=where) from None
    marker = Committed.decode(data, where=f"{where}/{COMMITTED}")
    if (marker.step, marker.attempt) != parse_folder_name(name):
        raise CheckpointCorrupt("the marker is of another checkpoint", where=where)
    return marker


def read_committed(storage: Storage, name: str) -> Manifest:
    """The manifest that the marker of checkpoint `name` vouches for.

    Raises NoCheckpoint without a marker, CheckpointCorrupt, CheckpointTooNew, StorageError.
    """
    where = f"{storage.url}/{name}"
    marker = read_marker(storage, name)
    try:
        data = _small(storage, f"{name}/{MANIFEST}", _MAX_JSON)
    except FileNotFoundError:
        raise CheckpointCorrupt("the marker is there, the manifest is missing", where=where) from None
    return marker.admit(data, where=f"{where}/{MANIFEST}")


def read_part(storage: Storage, manifest: Manifest, rank: int) -> PartManifest:
    """The part of `rank`, proven to be the one that was committed. Raises CheckpointCorrupt, StorageError."""
    name = f"{manifest.name}/{part_name(rank)}"
    where = f"{storage.url}/{name}"
    try:
        data = _small(storage, name, _MAX_JSON)
    except FileNotFoundError:
        raise CheckpointCorrupt("the part is missing", where=where) from None
    part = PartManifest.decode(data, where=where)
    if part.rank != rank:
        raise CheckpointCorrupt(f"it is the part of rank {part.rank}", where=where)
    manifest.check_part(part, data)
    return part


def listing(storage: Storage, *, quick: bool = False) -> list[Found]:
    """Every checkpoint folder, newest first, damaged ones too.

    Newest is the highest attempt, then the highest step: what a later attempt saved supersedes what it went back
    behind. `quick` trusts the marker and does not read manifests: sizes of files are not compared then.
    """
    named = [(key[1], key[0], n) for n in storage.folders() if (key := parse_folder_name(n))]
    return [_look(storage, n, quick) for _, _, n in sorted(named, reverse=True)]


def newest(storage: Storage, *, deep: bool = True) -> Manifest:
    """The newest checkpoint that verifies. Raises NoCheckpoint, which says why each newer one was passed over."""
    passed = []
    for found in listing(storage):
        if not found.committed:
            passed.append(f"{found.name}: {found.why}")
            continue
        result = verify_in(storage, found.name, deep=deep)
        if result.manifest and result.ok:
            return result.manifest
        passed.append(f"{found.name}: {result.problems[0]}")
    why = "; ".join(passed[:5]) or "the folder holds none"
    raise NoCheckpoint(f"no checkpoint verifies: {why}", where=storage.url)


def verify(folder: Path, *, deep: bool = True) -> Verification:
    """As `verify_in`, for one checkpoint's folder on disk."""
    folder = folder.absolute()
    return verify_in(PosixStorage(folder.parent), folder.name, deep=deep)


def verify_in(
    storage: Storage, name: str, *, deep: bool = True, ranks: Iterable[int] | None = None, workers: int = 4
) -> Verification:
    """Checks checkpoint `name`: marker, manifest, parts, headers, lengths, and (`deep`) the bytes of every chunk.

    Only those `ranks` if given. Never raises for damage: it comes back as `problems`.
    """
    began = time.monotonic()
    try:
        manifest = read_committed(storage, name)
    except (CheckpointError, OSError) as e:
        problem = Problem(COMMITTED if isinstance(e, NoCheckpoint) else MANIFEST, _text(e))
        return Verification(name, deep, 0, time.monotonic() - began, (problem,), None)
    wanted = range(manifest.world_size) if ranks is None else list(ranks)
    # xxh3 and reading leave the interpreter's lock alone, so threads overlap disk and checksum.
    with ThreadPoolExecutor(max_workers=max(1, min(workers, len(wanted)))) as pool:
        results = list(pool.map(lambda r: _verify_rank(storage, manifest, r, deep), wanted))
    problems = tuple(p for found, _ in results for p in found)
    read = sum(n for _, n in results)
    return Verification(name, deep, read, time.monotonic() - began, problems, manifest)


def read_header(storage: Storage, name: str, file_bytes: int) -> arena.Layout:
    """The layout of a safetensors file in a storage. Raises CheckpointCorrupt, StorageError, FileNotFoundError."""
    where = f"{storage.url}/{name}"
    length = arena.header_length(storage.read(name, 0, min(8, file_bytes)), file_bytes, where=where)
    return arena.parse_header(storage.read(name, 0, length), file_bytes, where=where)


def check_against_header(part: PartManifest, layout: arena.Layout, *, where: str) -> None:
    """Raises CheckpointCorrupt unless every shard of the part is just where the file's own header has it."""
    for name, tensor in part.tensors.items():
        for s in tensor.shards:
            due = (s.start, s.start + tensor.bytes_of(s))
            if s.stored not in layout.by_name or layout.span(s.stored) != due:
                raise CheckpointCorrupt(f"header and manifest disagree on tensor '{name}'"[:300], where=where)


def damaged_chunks(
    storage: Storage, name: str, record: FileRecord, only: Iterable[int] | None = None
) -> list[int]:
    """The numbers of the chunks (of `only`, or of all) whose bytes differ from their checksum."""
    count = len(record.checksums)
    buffer = scratch_pages(min(record.chunk_bytes, record.bytes))
    bad = []
    for i in range(count) if only is None else only:
        start = i * record.chunk_bytes
        view = buffer[: min(record.chunk_bytes, record.bytes - start)]
        storage.read_into(name, start, view)
        if digest(view) != record.checksums[i]:
            bad.append(i)
    return bad


def _verify_rank(storage: Storage, manifest: Manifest, rank: int, deep: bool) -> tuple[list[Problem], int]:
    name = f"{manifest.name}/{data_name(rank)}"
    file = part_name(rank)
    try:
        part = read_part(storage, manifest, rank)
        file = data_name(rank)
        size = storage.size(name)
        if size != part.file.bytes:
            return [Problem(file, f"it has {size} bytes, {part.file.bytes} were committed")], 0
        check_against_header(part, read_header(storage, name, size), where=name)
        if not deep:
            return [], 0
        bad = damaged_chunks(storage, name, part.file)
        problems = [
            Problem(
                file,
                f"bytes {i * part.file.chunk_bytes} and on differ from their checksum ({_holds(part, i)})",
            )
            for i in bad
        ]
        return problems, size
    except FileNotFoundError:
        return [Problem(file, "it is missing")], 0
    except (CheckpointError, OSError) as e:
        return [Problem(file, _text(e))], 0


def _holds(part: PartManifest, chunk: int) -> str:
    """The names of the first tensors that a chunk touches."""
    low = chunk * part.file.chunk_bytes
    high = low + part.file.chunk_bytes
    names = [
        n
        for n, t in part.tensors.items()
        if any(s.start < high and s.start + t.bytes_of(s) > low for s in t.shards)
    ]
    return (
        ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        if names
        else "header"
    )


def _look(storage: Storage, name: str, quick: bool) -> Found:
    step, attempt = parse_folder_name(name) or (0, 0)
    entries = storage.files(name)
    written = max((e.modified for e in entries), default=0.0)
    size = sum(e.bytes for e in entries)
    common = {"files": len(entries), "level": storage.level}

    def found(status: str, why: str) -> Found:
        return Found(name, step, attempt, status, written, size, why=why, **common)  # type: ignore[arg-type]

    try:
        if quick:
            read_marker(storage, name)
            return found("committed", "")
        manifest = read_committed(storage, name)
    except NoCheckpoint:
        parts = sum(e.name.startswith("rank-") and e.name.endswith(".json") for e in entries)
        return found("incomplete", f"no commit marker ({plural(parts, 'rank')} had written)")
    except CheckpointTooNew as e:
        return found("too_new", _text(e))
    except (StorageError, OSError) as e:  # a disk or a store that fails now: no verdict on the checkpoint
        return found("unreadable", _text(e))
    except CheckpointError as e:
        return found("damaged", _text(e))
    when = next((e.modified for e in entries if e.name == COMMITTED), written)
    have = {e.name: e.bytes for e in entries}
    for rank, record in enumerate(manifest.parts):
        if part_name(rank) not in have:
            return found("damaged", f"{part_name(rank)} is missing")
        if have.get(data_name(rank)) != record.data_bytes:
            length = have.get(data_name(rank))
            why = (
                "is missing" if length is None else f"has {length} bytes, {record.data_bytes} were committed"
            )
            return found("damaged", f"{data_name(rank)} {why}")
    return Found(
        name, step, attempt, "committed", when, size, world_size=manifest.world_size,
        samples=manifest.position.consumed(), **common,  # type: ignore[arg-type]
    )  # fmt: skip


def _small(storage: Storage, name: str, limit: int) -> bytes:
    size = storage.size(name)
    if size > limit:
        raise CheckpointCorrupt(f"{size} bytes are too many for this file", where=f"{storage.url}/{name}")
    return storage.read(name, 0, size)


def _text(e: Exception) -> str:
    """A problem in one line: what happened, and the file where it is not the obvious one."""
    if isinstance(e, StorageError) and e.where:
        return f"{e.message} ({e.where})"
    return e.message if isinstance(e, CheckpointError) else str(e)
