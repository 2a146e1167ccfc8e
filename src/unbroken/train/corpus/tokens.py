"""Text as memory-mapped bytes: tokenised once into a cache file, whole or not at all, with its fingerprint.

The vocabulary is the 256 bytes; files follow each other in the order of their names, each ended by a zero byte.
The cache file is `UNBRKTOK`, a little-endian length, a JSON header padded to 4 KiB, then one byte a token. Its name
carries a key made from every file's name, size and time of change, so that changed text gets a file of its own;
the header carries the SHA-256 of the tokens, which a checkpoint keeps and a resumed run compares.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import struct
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import InputError, UnsafeFile
from ...private import private_folder

if TYPE_CHECKING:
    import numpy as np

MAGIC = b"UNBRKTOK"
HEADER_BYTES = 4096
VERSION = 1
STDLIB = "stdlib"
TEXT_SUFFIXES = frozenset(
    [
        ".py",
        ".txt",
        ".md",
        ".rst",
        ".c",
        ".h",
        ".cc",
        ".cpp",
        ".hpp",
        ".rs",
        ".go",
        ".java",
        ".js",
        ".ts",
        ".json",
        ".jsonl",
        ".csv",
        ".html",
        ".xml",
        ".toml",
        ".yaml",
        ".yml",
        ".tex",
        ".sh",
        ".sql",
    ]
)
_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
_PIECE = 1 << 20


@dataclass(frozen=True)
class Corpus:
    """Text files of a folder, in the order in which they are read."""

    root: Path
    files: tuple[tuple[str, int, int], ...]
    """Relative name, size in bytes, time of change in nanoseconds."""

    @property
    def key(self) -> str:
        """Changes when any file is added, removed, resized or written."""
        h = hashlib.sha256(f"{VERSION}\0{self.root}\0".encode())
        for name, size, changed in self.files:
            h.update(f"{name}\0{size}\0{changed}\n".encode(errors="surrogateescape"))
        return h.hexdigest()[:24]


@dataclass(frozen=True)
class Tokens:
    """The tokens of a corpus, in a memory-mapped file."""

    path: Path
    count: int
    fingerprint: str
    """SHA-256 of the tokens, hexadecimal."""
    source: str
    dtype: str = "uint8"
    offset: int = HEADER_BYTES
    """Bytes of the file before the first token."""
    mask: Path | None = None
    """A file with a byte for each token: 0 where it is not to be learnt. None: all are."""

    def map(self) -> np.memmap:
        """The tokens as a read-only array of shape (count,)."""
        import numpy as np

        return np.memmap(
            self.path, dtype=np.dtype(self.dtype), mode="r", offset=self.offset, shape=(self.count,)
        )

    def map_mask(self) -> np.memmap | None:
        """Whether each token is to be learnt, as a read-only array of shape (count,); None where all are."""
        import numpy as np

        return (
            None if self.mask is None else np.memmap(self.mask, dtype=np.bool_, mode="r", shape=(self.count,))
        )


def find_corpus(source: str) -> Corpus:
    """Lists the text of a folder or a single file; `stdlib` means the source of Python's own standard library.

    Raises InputError where there is nothing to read.
    """
    stdlib = source == STDLIB
    root = Path(sysconfig.get_path("stdlib") if stdlib else source).expanduser().resolve()
    if root.is_file():
        s = root.stat()
        return Corpus(root.parent, ((root.name, s.st_size, s.st_mtime_ns),))
    if not root.is_dir():
        raise InputError(
            "there is no text to train on", where=f"--data {source}", hint="Name a folder or a file"
        )
    suffixes = {".py"} if stdlib else TEXT_SUFFIXES
    found = sorted(_walk(root, "", suffixes, _SKIPPED_FOLDERS if stdlib else {"__pycache__"}))
    if not found:
        kinds = " ".join(sorted(suffixes))
        raise InputError(
            "the folder holds no text files", where=str(root), hint=f"Files that are read: {kinds}"
        )
    return Corpus(root, tuple(found))


def _walk(
    root: Path, below: str, suffixes: set[str] | frozenset[str], skip: set[str]
) -> Iterator[tuple[str, int, int]]:
    try:
        entries = list(os.scandir(root / below))
    except PermissionError as e:
        raise InputError("a folder of the text cannot be read", where=str(root / below)) from e
    for entry in entries:
        name = f"{below}/{entry.name}" if below else entry.name
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in skip and not entry.name.startswith("config-"):
                yield from _walk(root, name, suffixes, skip)
        elif os.path.splitext(entry.name)[1].lower() in suffixes and entry.is_file():
            s = entry.stat()
            yield name, s.st_size, s.st_mtime_ns


def default_cache() -> Path:
    """The folder for token files: `$XDG_CACHE_HOME/unbroken/tokens`, else under the home or temporary folder."""
    home = os.environ.get("XDG_CACHE_HOME") or (
        os.path.expanduser("~/.cache") if os.environ.get("HOME") else ""
    )
    for base in (home, os.path.join(tempfile.gettempdir(), f"unbroken-{os.getuid()}")):
        if not base:
            continue
        folder = Path(base) / "unbroken" / "tokens"
        with contextlib.suppress(OSError, UnsafeFile):
            if base != home:  # others can make folders there, and fill them
                private_folder(Path(base))
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    raise InputError("no folder for the token cache can be written", hint="Name one with --cache DIR")


def open_tokens(source: str, cache: Path | None = None) -> Tokens:
    """The tokens of a source, tokenised first if no whole cache file is there. Safe when many ranks call at once.

    One rank of a host tokenises while the others wait for its lock; where locks do not work each writes its own
    copy and the last rename wins, with equal bytes. Raises InputError for text that cannot be read.
    """
    corpus = find_corpus(source)
    folder = cache or default_cache()
    path = folder / f"tokens-{corpus.key}.bin"
    tokens = _open(path)
    if tokens is not None:
        return tokens
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{path.name}.lock"):
            tokens = _open(path)
            if tokens is None:
                _write(path, corpus, source)
                tokens = _open(path)
    except OSError as e:
        raise InputError(
            f"the token cache cannot be written: {e.strerror or e}",
            where=str(path),
            hint="Name another folder with --cache DIR",
        ) from e
    if tokens is None:
        raise InputError("the token cache is damaged right after it was written", where=str(path))
    return tokens


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "a") as f:
        # Not every shared file system has locks; they only save work here, renames keep it right.
        with contextlib.suppress(OSError):
            fcntl.flock(f, fcntl.LOCK_EX)
        yield


def _open(path: Path) -> Tokens | None:
    """The tokens of a cache file; None where it is absent, short, or of another version."""
    try:
        with open(path, "rb") as f:
            head = f.read(HEADER_BYTES)
            size = os.fstat(f.fileno()).st_size
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        raise InputError(f"the token cache cannot be read: {e.strerror}", where=str(path)) from e
    if len(head) < HEADER_BYTES or head[:8] != MAGIC:
        return None
    (length,) = struct.unpack("<Q", head[8:16])
    try:
        header = json.loads(head[16 : 16 + length])
        if header["version"] != VERSION or size != HEADER_BYTES + header["count"]:
            return None
        return Tokens(path, header["count"], header["sha256"], header["source"])
    except (ValueError, KeyError, TypeError):
        return None


def _write(path: Path, corpus: Corpus, source: str) -> None:
    digest = hashlib.sha256()
    count = 0
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.aside")
    try:
        with open(aside, "xb") as out:
            out.write(b"\0" * HEADER_BYTES)
            for name, _, _ in corpus.files:
                for piece in _pieces(corpus.root / name):
                    out.write(piece)
                    digest.update(piece)
                    count += len(piece)
            header = json.dumps(
                {
                    "version": VERSION,
                    "count": count,
                    "sha256": digest.hexdigest(),
                    "source": source,
                    "files": len(corpus.files),
                }
            ).encode()
            if 16 + len(header) > HEADER_BYTES:
                raise InputError("the name of the text's folder is too long", where=source)
            out.seek(0)
            out.write(MAGIC + struct.pack("<Q", len(header)) + header)
            out.flush()
            os.fsync(out.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _pieces(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as f:
            while piece := f.read(_PIECE):
                yield piece
    except (FileNotFoundError, PermissionError) as e:
        raise InputError(f"a file of the text cannot be read: {e.strerror}", where=str(path)) from e
    yield b"\0"
