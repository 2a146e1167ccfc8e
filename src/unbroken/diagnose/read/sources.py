"""Files, folders, globs, pipes, .gz and .zst as streams of whole lines, with what could not be read said aloud.

A `Source` names one log; `blocks` yields it in pieces of about 4 MB that end at a line's end, so that memory
stays flat whatever the size. Nothing here knows what the lines mean.
"""

from __future__ import annotations

import functools
import glob
import gzip
import io
import os
import re
import stat
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from ...errors import InputError, MissingExtra
from ...progress.growing_logs import has_hole, open_past_holes
from .encoding import Utf8, encoding_of

BLOCK = 4 << 20
LONGEST_LINE = 1 << 20
_SKIP_SUFFIXES = (".pt", ".pth", ".bin", ".safetensors", ".npy", ".npz", ".so", ".whl", ".png", ".html", ".sqlite", ".zip", ".tar")  # fmt: skip
_RANK = re.compile(r"(?:^|[^a-z])(?:rank|worker|proc)[-_.]?(\d{1,6})(?!\d)", re.I)
_NODE_DIR = re.compile(
    r"^(?:node|host|gpu|worker|cn|nid|ip|dgx|a100|h100|[a-z]{2,12})-?[a-z]{0,3}\d[\w.\-]*$", re.I
)
# A file's name also holds users, jobs and models: there only the usual words for a machine count.
_NODE_FILE = re.compile(
    r"^(?:[a-z]{0,8}node|[a-z]{0,3}host|[a-z]{0,4}gpu|worker|cn|nid|ip|dgx|hgx|[abh][12]00)s?-?[a-z]{0,3}\d[\w\-]*$",
    re.I,
)
_ODD = bytes(c for c in range(32) if c < 9 or (13 < c < 32 and c != 27))
_PRINTED = bytes(range(9, 14)) + bytes(range(27, 127))
_ADDRESS = re.compile(r"\d+\.\d+\.")


@dataclass(frozen=True)
class Source:
    """One log. `name` is how reports call it; `rank`, `node`, `attempt` are what its path says, if anything. `kind`: log, pipe (can be read once), flight-recorder."""

    path: Path | None
    name: str
    bytes: int = 0
    mtime: float = 0.0
    rank: int | None = None
    node: str | None = None
    attempt: int | None = None
    kind: str = "log"


@dataclass(frozen=True)
class Sources:
    """What to read, and what was left out and why."""

    logs: tuple[Source, ...]
    dumps: tuple[Source, ...] = ()
    notes: tuple[str, ...] = ()


def expand(paths: Sequence[Path | str]) -> Sources:
    """The logs that `paths` (files, folders, globs, or '-' for stdin) stand for.

    Raises InputError if a path does not exist or nothing readable is left; everything else that cannot be used
    becomes a note.
    """
    logs: list[Source] = []
    dumps: list[Source] = []
    notes: list[str] = []
    seen: set[str] = set()
    _real_folder.cache_clear()  # links may have been changed meanwhile
    for given in paths:
        if str(given) == "-":
            logs.append(Source(None, "<stdin>"))
            continue
        for path in _matching(str(given)):
            root = path if path.is_dir() else path.parent
            for file in _files_below(path, notes):
                real = _real(file)
                if real in seen:
                    continue
                seen.add(real)
                source = _source(file, root, notes, explicit=file == path)
                if source is not None:
                    (dumps if source.kind == "flight-recorder" else logs).append(source)
    if not logs and not dumps:
        why = f": {'; '.join(notes[:3])}" if notes else ""
        raise InputError(
            f"there is no log to read{why}",
            where=", ".join(map(str, paths)),
            hint="Name a log file or a folder of logs",
        )
    return Sources(_told_apart(logs), tuple(dumps), tuple(notes))


def _real(file: Path) -> str:
    """The file behind links, or the name itself where links may not be followed."""
    try:
        if file.is_symlink():
            return os.path.realpath(file)
        return os.path.join(_real_folder(file.parent), file.name)
    except OSError:
        return str(file)


@functools.lru_cache(maxsize=1024)
def _real_folder(folder: Path) -> str:
    return os.path.realpath(folder)


def _told_apart(logs: list[Source]) -> tuple[Source, ...]:
    """The logs with names that differ: those that share one are called by their path below the folder of all."""
    counts = Counter(s.name for s in logs)
    double = [s.path.absolute() for s in logs if s.path is not None and counts[s.name] > 1]
    if not double:
        return tuple(logs)
    top = Path(os.path.commonpath([p.parent for p in double]))
    return tuple(
        replace(s, name=s.path.absolute().relative_to(top).as_posix())
        if s.path is not None and counts[s.name] > 1
        else s
        for s in logs
    )


def _matching(given: str) -> list[Path]:
    path = Path(given)
    if path.exists() or path.is_symlink():
        return [path]
    if any(c in given for c in "*?["):
        found = sorted(glob.glob(given, recursive=True))
        if found:
            return [Path(f) for f in found]
    raise InputError(
        f"there is no file or folder '{given}'",
        hint="Check the path; quote a glob so that the shell leaves it alone",
    )


def _files_below(path: Path, notes: list[str]) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return

    def refused(e: OSError) -> None:
        notes.append(f"cannot enter {e.filename}: {e.strerror}")

    for folder, subfolders, files in os.walk(path, onerror=refused):
        subfolders[:] = sorted(
            d for d in subfolders if not d.startswith(".") and d not in ("checkpoints", "__pycache__")
        )
        for name in sorted(files):
            if (
                not name.startswith(".")
                and not name.lower().endswith(_SKIP_SUFFIXES)
                and name not in ("case.json", "facts.json")
            ):
                yield Path(folder) / name


def _source(file: Path, root: Path, notes: list[str], *, explicit: bool) -> Source | None:
    try:
        info = file.stat()
        if explicit and (stat.S_ISFIFO(info.st_mode) or stat.S_ISCHR(info.st_mode)):
            return Source(file, file.name, kind="pipe")
        if not stat.S_ISREG(info.st_mode):
            notes.append(f"{file} is not a regular file")
            return None
        with file.open("rb") as f:
            head = f.read(4096)
    except OSError as e:
        notes.append(f"cannot read {file}: {e.strerror or e}")
        return None
    name = file.relative_to(root).as_posix() if file != root else file.name
    kind = _kind(head, file)
    if kind == "binary":
        notes.append(f"{name} is not a text log ({info.st_size} bytes)")
        return None
    if info.st_size == 0:
        notes.append(f"{name} is empty")
    rank, node, attempt = _from_path(file, root)
    return Source(file, name, info.st_size, info.st_mtime, rank, node, attempt, kind)


def _kind(head: bytes, file: Path) -> str:
    if head[:2] == b"\x1f\x8b" or head[:4] == b"\x28\xb5\x2f\xfd":
        return "log"
    if (
        head[:1] == b"\x80"
        and head[1:2] in b"\x02\x03\x04\x05"
        and (b"entries" in head or b"pg_config" in head)
    ):
        return "flight-recorder"
    if head.isascii() and not head.translate(None, _PRINTED):
        return "log"
    encoding, mark = encoding_of(head)
    if encoding:
        head = head[mark:].decode(encoding, "replace").encode()
    sample = head.replace(b"\0", b"")
    odd = len(sample) - len(sample.translate(None, _ODD))
    text = len(sample.decode("utf-8", "ignore").encode())
    if head and (len(sample) < len(head) // 2 or odd > len(sample) * 0.1 + 2 or text < len(sample) * 0.7 - 4):
        return "binary"
    return "log"


def _from_path(file: Path, root: Path) -> tuple[int | None, str | None, int | None]:
    """Rank, node and attempt out of a path: `attempts/0002/node-003/rank-24.log`, or folders below `root`."""
    rank = None
    m = _RANK.search(file.name.removesuffix(".gz").removesuffix(".zst"))
    if m:
        rank = int(m.group(1))
    attempt, node = _from_folder(file.parent, root)
    if rank is None and attempt is None and node is None:
        stem = file.name.split(".", 1)[0]
        if (
            _NODE_FILE.match(stem)
            and not _ADDRESS.search(file.name)
            and not re.match(
                r"(?:log|out|err|stdout|stderr|slurm|job|train|run|rank|c|part|dump)-?\d", stem, re.I
            )
        ):
            node = stem
    if (
        rank is None
        and attempt is None
        and file.parent.name.isdigit()
        and file.name.startswith(("stdout", "stderr"))
    ):
        rank = int(file.parent.name)  # torchrun --log-dir: <run>/attempt_0/<local rank>/stderr.log
    return rank, node, attempt


@functools.lru_cache(maxsize=1024)
def _from_folder(folder: Path, root: Path) -> tuple[int | None, str | None]:
    """Attempt and node out of a folder's path, below `root` by its name alone."""
    node = attempt = None
    parts = [p.name for p in (folder, *list(folder.parents)[:3])]
    for index, name in enumerate(parts):
        if name == "attempts" and index and parts[index - 1].isdigit():
            attempt = int(parts[index - 1])
            node = parts[index - 2] if index >= 2 else None
    below = folder.relative_to(root).parts if folder.is_relative_to(root) else ()
    if node is None:
        node = next(
            (
                n
                for n in reversed(below)
                if _NODE_DIR.match(n)
                and not _ADDRESS.search(n)
                and not n.startswith(("attempt", "rank", "job", "run", "case"))
            ),
            None,
        )
    return attempt, node


@contextmanager
def opened(source: Source) -> Iterator[IO[bytes]]:
    """The raw bytes of a source, decompressed. Raises InputError or MissingExtra."""
    if source.path is None:
        yield sys.stdin.buffer
        return
    raw = open_past_holes(source.path) if _has_hole(source.path) else source.path.open("rb")
    try:
        magic = raw.peek(4)[:4] if isinstance(raw, io.BufferedReader) else b""
        if magic[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=raw) as stream:
                yield stream  # type: ignore[misc]
        elif magic == b"\x28\xb5\x2f\xfd":
            try:
                import zstandard
            except ImportError:
                raise MissingExtra("zstandard", "diagnose", what=f"reading {source.name}") from None
            with zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as stream:
                yield stream
        else:
            yield raw
    finally:
        raw.close()


def _has_hole(path: Path) -> bool:
    try:
        return has_hole(path)
    except OSError:
        return False  # opening it says why


def seekable(source: Source) -> bool:
    """Whether any part of a log can be read without what lies before it: a plain file of an 8-bit encoding, and whole."""
    if source.path is None or source.kind == "pipe" or _has_hole(source.path):
        return False
    try:
        with source.path.open("rb") as f:
            start = f.read(4)
    except OSError:
        return True  # reading it will say why not
    packed = start[:2] == b"\x1f\x8b" or start == b"\x28\xb5\x2f\xfd"
    return not packed and start[:2] not in (b"\xff\xfe", b"\xfe\xff") and b"\0" not in start


def blocks(source: Source, notes: list[str], size: int = BLOCK) -> Iterator[bytes]:
    """The source as UTF-8 in pieces of about `size` bytes that end with a whole line (the last one may be cut off).

    Damage in a compressed stream ends it with a note; a line longer than 1 MB is passed on in pieces.
    """
    rest = b""
    try:
        with opened(source) as raw:
            stream = Utf8(raw)
            while True:
                data = stream.read(size)
                if not data:
                    break
                end = data.rfind(b"\n")
                if end < 0 and len(rest) + len(data) < LONGEST_LINE:
                    rest += data
                    continue
                if end < 0:
                    yield rest + data
                    rest = b""
                    continue
                yield rest + data[: end + 1]
                rest = data[end + 1 :]
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        notes.append(f"{source.name} is damaged or still being written, read up to there: {e}")
    except OSError as e:
        notes.append(f"{source.name} could not be read to its end: {e.strerror or e}")
    except MissingExtra as e:
        notes.append(str(e))
    except Exception as e:
        if type(e).__module__.split(".")[0] != "zstandard":
            raise
        notes.append(f"{source.name} is damaged, read up to there: {e}")
    if rest:
        yield rest


def head(source: Source, size: int = 65536) -> str:
    """The first bytes of a source as text, for guesses about the whole; empty where it cannot be read."""
    if source.path is None or source.kind == "pipe":
        return ""
    try:
        with opened(source) as stream:
            return Utf8(stream).read(size).decode("utf-8", "replace")
    except (OSError, EOFError, zlib.error, MissingExtra):
        return ""
    except Exception as e:
        if type(e).__module__.split(".")[0] != "zstandard":
            raise
        return ""


def total_bytes(sources: Iterable[Source]) -> int:
    """Bytes on disk of all sources."""
    return sum(s.bytes for s in sources)
