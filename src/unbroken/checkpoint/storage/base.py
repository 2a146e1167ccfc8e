"""What a place for checkpoints can do, and the probe that shows it."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from ...errors import StorageError

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Entry:
    """A file in a folder: its name without the folder, bytes, and when it was last changed (Unix seconds)."""

    name: str
    bytes: int
    modified: float


class Storage(Protocol):
    """A place for checkpoints. What a call wrote is durable when it returns. Safe to use from several threads."""

    url: str
    level: str  # the durability level that a checkpoint reaches here: "disk" or "remote"

    def check(self) -> None:
        """Raises StorageError unless files can be written, read back, created exclusively and removed here."""

    def folders(self) -> list[str]:
        """The names of the folders at the root, sorted."""

    def files(self, folder: str) -> list[Entry]:
        """The files of one folder, sorted by name; empty if there is none."""

    def list(self, folder: str) -> list[str]:
        """The names of `files(folder)`."""

    def size(self, name: str) -> int:
        """The length of a file."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes [start, stop) of a file, to its end by default; never fewer than asked for."""

    def read_into(self, name: str, start: int, into: memoryview, *, once: bool = False) -> None:
        """Fills `into` with the bytes of a file from `start` on; `once`: nobody here will want them again."""

    def write(self, name: str, chunks: Iterable[Buffer], size: int) -> None:
        """Writes or replaces a large file of exactly `size` bytes.

        Each chunk must stay valid and unchanged until the call returns: several may be under way at once, and one
        that failed is sent again. An exception out of `chunks` passes on, and no file of this name appears.
        """

    def put(self, name: str, data: Buffer) -> None:
        """Writes or replaces a small file."""

    def create(self, name: str, data: Buffer) -> bool:
        """Creates a small file; False, and nothing changed, if it exists. One of several callers wins."""

    def delete(self, name: str) -> None:
        """Removes a file; no error if it is not there."""

    def delete_folder(self, folder: str) -> None:
        """Removes a folder and all in it, the commit marker first."""


def probe(storage: Storage) -> None:
    """Does to a small file of its own what a commit needs, and removes it.

    Raises StorageError if the storage refuses, or lets two writers both believe that they created one file.
    """
    name = f".probe-{secrets.token_hex(8)}"
    try:
        first, second = storage.create(name, b"first"), storage.create(name, b"second")
        if not first or second or storage.read(name) != b"first":
            raise StorageError(
                "it overwrites a file that should be created only once, so no commit would be safe",
                where=storage.url,
                hint="Use a file system with link(2), or a store with conditional PUT (If-None-Match)",
            )
    finally:
        storage.delete(name)
