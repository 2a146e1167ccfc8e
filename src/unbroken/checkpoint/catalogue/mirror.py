"""Copies a committed checkpoint from one storage to another: disk to bucket, bucket to disk. No torch.

Resumable: data before part, parts before manifest, marker last; a rank whose part lies at the target, byte for byte,
has its data there and is not sent again. So whoever runs the same copy after the copier's death goes on from the
last whole file. Every chunk is checked as it is read; what is damaged is never spread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ...errors import CheckpointCorrupt, StorageError
from ...journal.checksummed import digest
from ..format.manifest import COMMITTED, MANIFEST, PartManifest, data_name, part_name
from ..storage.base import Storage
from ..storage.pages import scratch_pages
from .contents import read_committed, read_part


@dataclass(frozen=True)
class Mirrored:
    """`sent` and `skipped` bytes of data; `committed` if the target has the whole checkpoint now."""

    name: str
    sent: int
    skipped: int
    committed: bool
    seconds: float
    world_size: int


def mirror(
    source: Storage,
    name: str,
    target: Storage,
    *,
    ranks: Iterable[int] | None = None,
    gate: Callable[[], None] = lambda: None,
) -> Mirrored:
    """Copies checkpoint `name`; only these `ranks` if given (each node its own), then commits if all are there.

    `gate` is called before each chunk and may raise to stop. Raises NoCheckpoint, CheckpointCorrupt if the source is
    damaged, StorageError.
    """
    began, sent, skipped = time.monotonic(), 0, 0
    manifest = read_committed(source, name)
    marker = source.read(f"{name}/{COMMITTED}")
    for rank in range(manifest.world_size) if ranks is None else ranks:
        part = read_part(source, manifest, rank)
        encoded = source.read(f"{name}/{part_name(rank)}")
        if _has(target, name, part, encoded):
            skipped += part.file.bytes
            continue
        target.write(f"{name}/{data_name(rank)}", _check(source, name, part, gate), part.file.bytes)
        gate()
        target.put(f"{name}/{part_name(rank)}", encoded)
        sent += part.file.bytes
    have = set(target.list(name))
    whole = all(part_name(r) in have and data_name(r) in have for r in range(manifest.world_size))
    if whole and COMMITTED not in have:
        gate()
        target.put(f"{name}/{MANIFEST}", source.read(f"{name}/{MANIFEST}"))
        gate()
        target.create(f"{name}/{COMMITTED}", marker)
    if whole and read_committed(target, name).encoded != manifest.encoded:
        raise StorageError("another checkpoint of this name is there", where=f"{target.url}/{name}")
    return Mirrored(name, sent, skipped, whole, time.monotonic() - began, manifest.world_size)


def _has(target: Storage, name: str, part: PartManifest, encoded: bytes) -> bool:
    try:
        there = target.read(f"{name}/{part_name(part.rank)}")
        return there == encoded and target.size(f"{name}/{data_name(part.rank)}") == part.file.bytes
    except FileNotFoundError:
        return False


def _check(source: Storage, name: str, part: PartManifest, gate: Callable[[], None]) -> Iterator[memoryview]:
    file = part.file
    for i, due in enumerate(file.checksums):
        gate()
        start = i * file.chunk_bytes
        data = scratch_pages(min(file.chunk_bytes, file.bytes - start))
        source.read_into(f"{name}/{file.name}", start, data)
        if digest(data) != due:
            raise CheckpointCorrupt(
                f"bytes {start} and on differ from their checksum", where=f"{name}/{file.name}"
            )
        yield data
