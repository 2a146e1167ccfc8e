"""Where models come from: a folder (local or network file system) or an object store, read in ranges.

A model's *hash* is over the names, sizes and chunk checksums (xxh3, 128 bits, 32 MiB each) of its files: two copies
of the same weights have the same hash wherever they lie, and each chunk can be checked while it is fetched.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import errno
import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from ... import atomic
from ...errors import EvaluationError, MissingExtra, ModelChanged, ModelDoesNotLoad, RunInterrupted
from ...link.web import points_elsewhere
from ..contracts import digest

CHUNK = 32 * 2**20
PARALLEL = 16
"""Ranges in flight: enough to fill 25 Gb/s at the latency of object stores."""
_SKIP = (".msgpack", ".h5", ".ot", ".onnx", ".gguf", ".pt", ".pth", ".ckpt", ".lock", ".md", ".png")
_SMALL = 64 * 2**20


@dataclass(frozen=True)
class FileInfo:
    """One file of a model."""

    name: str
    size: int
    stamp: str
    """Changes when the content does (ETag; of a file its times and inode: weights may be overwritten where they lie, and
    their time of change put back, but not that of the inode)."""


class ModelSource(Protocol):
    """The files of one model."""

    address: str

    def files(self) -> tuple[FileInfo, ...]:
        """Those that a model needs, by name. Raises ModelDoesNotLoad if there is none."""
        ...

    def read(self, name: str, offset: int, size: int) -> bytes:
        """A range of a file; shorter only at its end."""
        ...


@dataclass(frozen=True)
class ModelManifest:
    """The hash of a model and what it is made of."""

    hash: str
    files: tuple[tuple[str, int, tuple[str, ...]], ...]
    """(name, size, chunk checksums)."""

    @property
    def bytes(self) -> int:
        """All files."""
        return sum(size for _, size, _ in self.files)


class FolderSource:
    """A folder that this machine can read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = str(folder)

    def files(self) -> tuple[FileInfo, ...]:
        """Regular files at the top of the folder, symbolic links followed."""
        try:
            entries = sorted(e for e in os.listdir(self.folder))
        except OSError as e:
            raise ModelDoesNotLoad(f"the model's folder cannot be read: {e.strerror}", where=self.address,
                                   hint="Give --model a folder, s3://bucket/prefix or an endpoint's URL") from e  # fmt: skip
        found = []
        for name in entries:
            path = self.folder / name
            if path.is_file():
                st = path.stat()
                found.append(FileInfo(name, st.st_size, f"{st.st_mtime_ns}-{st.st_ino}-{st.st_ctime_ns}"))
        return needed(found, self.address)

    def read(self, name: str, offset: int, size: int) -> bytes:
        """One pread."""
        with open(self.folder / name, "rb") as f:
            return os.pread(f.fileno(), size, offset)


class StoreSource:
    """A prefix of an object store, through obstore. `store` may be given, as in tests."""

    def __init__(self, address: str, store: object | None = None) -> None:
        self.address = address
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as e:
            raise MissingExtra("obstore", "s3", what="A model in an object store") from e
        self._obstore = obstore
        if store is None and address.startswith("s3://") and (endpoint := os.environ.get("AWS_ENDPOINT_URL")):
            to = points_elsewhere(f"{endpoint.rstrip('/')}/{address.removeprefix('s3://').split('/')[0]}")
            if to is not None:  # obstore would follow, with the session token's header
                raise ModelDoesNotLoad(
                    f"the endpoint sends readers on to {to}, and credentials are for the host that you named",
                    where=address, hint=f"Set AWS_ENDPOINT_URL to {to}, if that is the store that you mean",
                )  # fmt: skip
        self._store = store if store is not None else from_url(address)

    def files(self) -> tuple[FileInfo, ...]:
        """Objects directly under the prefix."""
        try:
            listed = [m for page in self._obstore.list(self._store) for m in page]
        except Exception as e:
            raise ModelDoesNotLoad(f"the object store refused: {e}", where=self.address,
                                   hint="Check the address and credentials (AWS_* variables)") from e  # fmt: skip
        found = [
            FileInfo(m["path"], m["size"], str(m.get("e_tag") or m["last_modified"]))
            for m in listed
            if "/" not in m["path"]
        ]
        return needed(sorted(found, key=lambda f: f.name), self.address)

    def read(self, name: str, offset: int, size: int) -> bytes:
        """One ranged GET; obstore retries what is worth retrying."""
        if not size:
            return b""  # an empty range is an error to object stores
        try:
            return bytes(self._obstore.get_range(self._store, name, start=offset, length=size))
        except Exception as e:
            raise EvaluationError(f"the object store gave no '{name}': {e}", where=self.address,
                                  hint="Check the network and credentials, then run the same command") from e  # fmt: skip


def open_source(address: str) -> ModelSource:
    """A source by its address: a folder, or a URL that obstore knows (s3://, gs://, az://, file://, memory://)."""
    if "://" in address and not address.startswith("file://"):
        return StoreSource(address)
    return FolderSource(Path(address.removeprefix("file://")).expanduser().resolve())


def needed(files: Sequence[FileInfo], address: str) -> tuple[FileInfo, ...]:
    """Without other formats of the same weights, documentation and hidden files. Raises ModelDoesNotLoad if nothing is left."""
    safe = any(f.name.endswith(".safetensors") for f in files)
    kept = [
        f for f in files
        if not f.name.startswith(".") and not f.name.endswith(_SKIP) and not (safe and f.name.endswith(".bin"))
    ]  # fmt: skip
    if not kept:
        raise ModelDoesNotLoad("no file of a model is there", where=address,
                               hint="Give the folder that holds config.json and the weights")  # fmt: skip
    return tuple(kept)


def fetch(source: ModelSource, files: Sequence[FileInfo], target: Path | None, *, expect: ModelManifest | None = None,
          parallel: int = PARALLEL, halt: threading.Event | None = None) -> ModelManifest:  # fmt: skip
    """Reads a model in parallel ranges, into a folder if one is given, and returns its manifest.

    Raises ModelChanged as soon as a chunk differs from `expect`; OSError from the target (a full disk); EvaluationError
    if the source gives less than it promised; RunInterrupted once `halt` is set, after the chunks in flight.
    """
    promised = {name: sums for name, _, sums in expect.files} if expect else {}
    sums: dict[str, list[str]] = {f.name: [""] * -(-f.size // CHUNK) for f in files}
    descriptors: dict[str, int] = {}
    try:
        if target is not None:
            target.mkdir(parents=True, exist_ok=True)
            for f in files:
                fd = descriptors[f.name] = os.open(
                    target / f.name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644
                )

        def one(f: FileInfo, index: int) -> None:
            _unless(halt, source)
            size = min(CHUNK, f.size - index * CHUNK)
            data = source.read(f.name, index * CHUNK, size)
            if len(data) != size:
                raise EvaluationError(f"'{f.name}' ended early: {len(data)} of {size} bytes at {index * CHUNK}", where=source.address,
                                      hint="Wait until the model is written whole, then run the same command")  # fmt: skip
            found = xxhash.xxh3_128_hexdigest(data)
            if f.name in promised and (index >= len(promised[f.name]) or promised[f.name][index] != found):
                raise ModelChanged(f"'{f.name}' differs from what was hashed before, in its chunk {index}", where=source.address,
                                   hint="Evaluate the changed model into another --out")  # fmt: skip
            sums[f.name][index] = found
            if target is not None:
                write_all(descriptors[f.name], data, index * CHUNK)

        with concurrent.futures.ThreadPoolExecutor(max_workers=parallel) as pool:
            # Beside the first reads: in memory it means to clear it all, a second for each few GB.
            jobs = [
                pool.submit(make_room, descriptors[f.name], f.size) for f in files if f.size and descriptors
            ]
            jobs += [pool.submit(one, f, i) for f in files for i in range(-(-f.size // CHUNK))]
            try:
                for job in concurrent.futures.as_completed(jobs):
                    job.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    finally:
        for fd in descriptors.values():
            os.close(fd)
    _unless(halt, source)
    found = make_manifest([(f.name, f.size, tuple(sums[f.name])) for f in files])
    if expect is not None and found.hash != expect.hash:
        raise ModelChanged("the model's files differ from those hashed before", where=source.address,
                           hint="Evaluate the changed model into another --out")  # fmt: skip
    return found


def _unless(halt: threading.Event | None, source: ModelSource) -> None:
    if halt is not None and halt.is_set():
        raise RunInterrupted("the model is not fetched further", where=source.address)


def write_all(fd: int, data: bytes, at: int) -> None:
    """All of it: a disk that is nearly full takes a part, and says so with the next call. Raises OSError."""
    left = memoryview(data)
    while left:
        n = os.pwrite(fd, left, at)
        left, at = left[n:], at + n


def make_room(fd: int, size: int) -> None:
    """Reserves bytes for a file, so that a full disk is an error now and not after an hour. Raises OSError.

    By the system call itself, or not at all: what the C library does where a file system knows none is to write zeros, and
    it would write them over what others write to the file meanwhile.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, "fallocate64", None) or getattr(libc, "fallocate", None)
    if call is None:
        return
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if call(fd, 0, 0, size):
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR):
            raise OSError(number, os.strerror(number))


def make_manifest(files: Sequence[tuple[str, int, tuple[str, ...]]]) -> ModelManifest:
    """The manifest of these files."""
    ordered = tuple(sorted(files))
    return ModelManifest(digest([[n, s, list(c)] for n, s, c in ordered]), ordered)


def hash_model(
    source: ModelSource,
    memo: Path,
    reader: Callable[[Sequence[FileInfo]], ModelManifest] | None = None,
    halt: threading.Event | None = None,
) -> ModelManifest:
    """The manifest of a source; read whole once, remembered under `memo` while names, sizes and stamps stay.

    `reader` does the reading where it can be of use beside the hash (into the node's cache).
    """
    files = source.files()
    path = memo / f"{digest([source.address, [[f.name, f.size, f.stamp] for f in files]])}.json"
    try:
        value = json.loads(path.read_text())
        return make_manifest([(n, s, tuple(c)) for n, s, c in value["files"]])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, or not ours: it is made again
    manifest = reader(files) if reader else fetch(source, files, None, halt=halt)
    memo.mkdir(parents=True, exist_ok=True)
    atomic.write_json(
        path, {"address": source.address, "hash": manifest.hash, "files": manifest.files}, indent=None
    )
    return manifest


def small_files(source: ModelSource, target: Path) -> Path:
    """A folder with the tokenizer, templates and configuration: the source's own where it is one, else a copy in `target`.

    Each state of a source has a copy of its own there, so that the files of two models are never mixed.
    """
    if isinstance(source, FolderSource):
        return source.folder
    files = source.files()
    place = target / digest([source.address, [[f.name, f.size, f.stamp] for f in files]])[:16]
    place.mkdir(parents=True, exist_ok=True)
    for f in files:
        if (
            f.size <= _SMALL
            and not f.name.endswith((".safetensors", ".bin"))
            and not (place / f.name).exists()
        ):
            atomic.write_bytes(place / f.name, source.read(f.name, 0, f.size))
    return place


def memo_folder() -> Path:
    """$XDG_CACHE_HOME/unbroken/model-hashes."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "unbroken" / "model-hashes"


def on_network(folder: Path) -> bool:
    """Whether a folder lies on a file system that many nodes share, so that a local copy pays."""
    remote = (
        "nfs",
        "lustre",
        "gpfs",
        "beegfs",
        "ceph",
        "fuse",
        "cifs",
        "smb",
        "9p",
        "virtiofs",
        "glusterfs",
        "wekafs",
        "pvfs",
    )
    best, kind = "", ""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        _, mount, fs, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        if (str(folder) + "/").startswith(mount.rstrip("/") + "/") and len(mount) >= len(best):
            best, kind = mount, fs
    return kind.startswith(remote)
