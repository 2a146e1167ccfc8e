"""One copy of a model per node, in shared memory, for as long as somebody uses it.

ROOT/HASH/ holds the files; ROOT/HASH.lock is held while the copy is made or removed; ROOT/HASH.leases/ has one file
per user, locked (flock) for as long as its process lives, so that a reference ends with its holder however that dies. The
first user fetches, the others wait for it and then map the same pages. A copy is whole if its .complete marker is
there; what is not whole is made again.

The copy goes when the last reference goes. After a crash of everything that used it, or was fetching it, a small watcher
process (reaper.py) finds no live reference, waits `linger_s` seconds for the same command to come again, and removes it; if
the watcher was killed too, the next evaluation on the node sweeps.

A model whose hash is not known yet is fetched as a copy with a name of its own, ROOT/.incoming-..., with a lock, a
reference and a watcher like any other, and gets its hash as name when it is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import NoRoomForModel, RunInterrupted, UnsafeFile
from ...machine import cgroup_headroom, meminfo
from ...private import private_folder
from ...units import Bytes
from .sources import FileInfo, ModelManifest, ModelSource, fetch

LINGER_S = 60.0
RESERVE = 0.05
"""Share of memory that stays free beside the model."""


@dataclass(frozen=True)
class Room:
    """What a place can take."""

    path: str
    free: int
    limited_by: str


@dataclass(frozen=True)
class Places:
    """Where copies may lie."""

    memory: Path | None = Path("/dev/shm")
    disks: tuple[Path, ...] = ()
    """Tried in order when the model does not fit into memory."""

    def roots(self) -> list[tuple[Path, bool]]:
        """(folder of copies, whether it is memory)."""
        name = f"unbroken-models-{os.getuid()}"
        found = [(self.memory / name, True)] if self.memory is not None else []
        return found + [(d / name, False) for d in self.disks]


def default_places() -> Places:
    """/dev/shm, then $TMPDIR."""
    shm = Path("/dev/shm")
    return Places(shm if shm.is_dir() else None, (Path(os.environ.get("TMPDIR") or "/tmp"),))


@dataclass
class ModelReference:
    """The right to use a copy; `release` it, or die."""

    path: Path
    fetched_s: float
    """0 where the copy was there."""
    in_memory: bool
    _fd: int = -1
    _root: Path = Path()
    _hash: str = ""

    def release(self) -> None:
        """Gives it back; the last one removes the copy."""
        if self._fd < 0:
            return
        with _locked(self._root, self._hash):
            os.close(self._fd)
            self._fd = -1
            if not live_references(self._root, self._hash):
                remove(self._root, self._hash)


def take_reference(
    source: ModelSource,
    manifest: ModelManifest,
    places: Places,
    *,
    linger_s: float = LINGER_S,
    watcher: bool = True,
    halt: threading.Event | None = None,
) -> ModelReference:
    """A reference to this node's copy, which is fetched and checked first if it is not there.

    Raises NoRoomForModel if no place can take it, ModelChanged if the source's bytes differ from the manifest,
    RunInterrupted once `halt` is set while it fetches.
    """
    files = [FileInfo(n, s, "") for n, s, _ in manifest.files]
    refused: list[Room] = []
    for root, in_memory in places.roots():
        try:
            private_folder(root)
        except (OSError, UnsafeFile) as e:
            refused.append(Room(str(root), 0, e.message if isinstance(e, UnsafeFile) else str(e.strerror)))
            continue
        sweep(root, keep=manifest.hash)
        with _locked(root, manifest.hash, halt=halt):
            copy = root / manifest.hash
            there = (copy / ".complete").exists()
            if not there:
                remove(root, manifest.hash, references=False)
                room = room_in(root, in_memory)
                if room.free < manifest.bytes:
                    refused.append(room)
                    continue
            began = time.monotonic()
            fd = _new_reference(root, manifest.hash)
            if not there:
                try:
                    if watcher:  # before room is taken: a fetch may be killed too
                        start_watcher(root, manifest.hash, linger_s)
                    fetch(source, files, copy, expect=manifest, halt=halt)
                    (copy / ".complete").write_text(json.dumps({"bytes": manifest.bytes}))
                except OSError as e:
                    os.close(fd)
                    remove(root, manifest.hash)
                    refused.append(Room(str(root), 0, str(e.strerror or e)))
                    continue
                except BaseException:
                    os.close(fd)
                    remove(root, manifest.hash)
                    raise
            took = 0.0 if there else time.monotonic() - began
            return ModelReference(copy, took, in_memory, fd, root, manifest.hash)
    tried = "; ".join(f"{r.path}: {Bytes(r.free)} free, limited by {r.limited_by}" for r in refused)
    raise NoRoomForModel(f"the model needs {Bytes(manifest.bytes)}, and no place on this node can hold it", where=tried,
                         hint="Enlarge /dev/shm (docker --shm-size, an emptyDir with medium Memory) or give --cache-disk a folder")  # fmt: skip


def fetch_unknown(
    source: ModelSource,
    files: Sequence[FileInfo],
    places: Places,
    halt: threading.Event | None = None,
    linger_s: float = LINGER_S,
) -> tuple[ModelManifest, ModelReference | None]:
    """Fetches a model whose hash nobody knows yet into the first place with room; returns its manifest and a reference.

    The hash is computed from the bytes as they come, so that a node reads the source once and not twice; `take_reference` then
    finds the copy, as long as this one is held. Without room anywhere the source is only read, and there is none.
    """
    for root, in_memory in places.roots():
        try:
            private_folder(root)
            sweep(root)
            if room_in(root, in_memory).free < total_bytes(files):
                continue
            incoming = f".incoming-{os.getpid()}-{secrets.token_hex(4)}"
            with _locked(root, incoming):
                fetching = _new_reference(root, incoming)
                try:
                    start_watcher(root, incoming, linger_s)
                    manifest = fetch(source, files, root / incoming, halt=halt)
                    (root / incoming / ".complete").write_text(json.dumps({"bytes": manifest.bytes}))
                    with _locked(root, manifest.hash, halt=halt):
                        if not (root / manifest.hash / ".complete").exists():
                            remove(root, manifest.hash, references=False)
                            start_watcher(root, manifest.hash, linger_s)
                            os.rename(root / incoming, root / manifest.hash)
                        fd = _new_reference(root, manifest.hash)
                    return manifest, ModelReference(
                        root / manifest.hash, 0.0, in_memory, fd, root, manifest.hash
                    )
                finally:
                    os.close(fetching)
                    remove(root, incoming)
        except (OSError, UnsafeFile):
            continue  # full or forbidden: the next place, and in the end no copy, which `take_reference` reports with reasons
    return fetch(source, files, None, halt=halt), None


def room_in(root: Path, in_memory: bool) -> Room:
    """How much more may be put there: the file system's free space and, for memory, what the machine and the cgroup allow.

    Pages of /dev/shm are charged to the cgroup of whoever wrote them: beyond its limit the kernel kills, it does not
    refuse. So the limit is asked first.
    """
    stat = os.statvfs(root)
    found = [(stat.f_bavail * stat.f_frsize, "the file system")]
    if in_memory:
        available = meminfo("MemAvailable")
        if available is not None:
            found.append((int(available - RESERVE * (meminfo("MemTotal") or 0)), "free memory"))
        headroom = cgroup_headroom()
        if headroom is not None:
            found.append((int(headroom * (1 - RESERVE)), "the cgroup's memory limit"))
    free, why = min(found)
    return Room(str(root), max(0, free), why)


@dataclass(frozen=True)
class Copy:
    """A model's copy on this node."""

    hash: str
    path: str
    bytes: int
    users: int


def copies(root: Path) -> list[Copy]:
    """What lies in a folder of copies."""
    found = []
    for lock in sorted(root.glob("*.lock")):
        name = lock.name.removesuffix(".lock")
        files = [f for f in (root / name).glob("*") if f.is_file()]
        if files:
            found.append(
                Copy(
                    name, str(root / name), sum(f.stat().st_size for f in files), live_references(root, name)
                )
            )
    return found


def sweep(root: Path, *, keep: str = "", force: bool = False) -> list[str]:
    """Removes copies that no live process refers to and no watcher guards; returns their hashes.

    A watcher guards a whole copy for the same command (`force`: not even that); what a killed fetch left is of no use
    to anybody, and takes room.
    """
    gone = []
    for lock in sorted(root.glob("*.lock")):
        name = lock.name.removesuffix(".lock")
        guarded = not force and (root / name / ".complete").exists() and _guarded(root, name)
        if name == keep or live_references(root, name) or guarded:
            continue
        with contextlib.suppress(BlockingIOError), _locked(root, name, wait=False):
            if not live_references(root, name):
                remove(root, name)
                gone.append(name)
    return gone


def live_references(root: Path, name: str) -> int:
    """How many processes use a copy; removes the files of those that died."""
    count = 0
    for path in (root / f"{name}.leases").glob("*"):
        try:
            with open(path, "rb") as f:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
        except BlockingIOError:
            count += 1
        except FileNotFoundError:
            continue
    return count


def remove(root: Path, name: str, *, references: bool = True) -> None:
    """Removes a copy; the caller holds its lock."""
    (root / name / ".complete").unlink(missing_ok=True)
    shutil.rmtree(root / name, ignore_errors=True)
    if references:
        shutil.rmtree(root / f"{name}.leases", ignore_errors=True)
        (root / f"{name}.watch").unlink(missing_ok=True)
        (root / f"{name}.lock").unlink(missing_ok=True)


def start_watcher(root: Path, name: str, linger_s: float) -> None:
    """Starts the process that removes the copy after a crash of all its users."""
    subprocess.Popen(
        [sys.executable, "-m", "unbroken.evaluate.model.reaper", str(root), name, str(linger_s)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, cwd="/",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip


@contextlib.contextmanager
def _locked(
    root: Path, name: str, *, wait: bool = True, halt: threading.Event | None = None
) -> Iterator[None]:
    """Holds HASH.lock; starts over if the file was removed while waiting for it.

    Raises BlockingIOError without `wait` where another has it, RunInterrupted once `halt` is set while waiting.
    """
    path = root / f"{name}.lock"
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _lock(fd, wait, halt)
            try:
                same = os.stat(path).st_ino == os.fstat(fd).st_ino
            except FileNotFoundError:
                same = False
            if same:
                yield
                return
        finally:
            os.close(fd)


def _lock(fd: int, wait: bool, halt: threading.Event | None) -> None:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait and halt is None else fcntl.LOCK_NB))
            return
        except BlockingIOError:
            if not wait or halt is None:
                raise
        if halt.wait(0.1):
            raise RunInterrupted("another process fetches the model, and is not waited for any longer")


def _new_reference(root: Path, name: str) -> int:
    folder = root / f"{name}.leases"
    private_folder(folder)
    # Locked before it has its name: `live_references` never sees it unlocked.
    aside = root / f".lease-{os.getpid()}-{secrets.token_hex(4)}"
    fd = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.rename(aside, folder / f"{os.getpid()}-{secrets.token_hex(4)}")
    return fd


def _guarded(root: Path, name: str) -> bool:
    """Whether a watcher holds HASH.watch."""
    try:
        with open(root / f"{name}.watch", "rb") as f:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def total_bytes(files: Sequence[FileInfo]) -> int:
    """Size of a model's files."""
    return sum(f.size for f in files)
