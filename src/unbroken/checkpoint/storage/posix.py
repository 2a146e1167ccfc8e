"""Checkpoints in a folder: local disk, NFS, Lustre. No rename across folders, no locks; files and folders synced.

Large files bypass the page cache where the file system allows it (O_DIRECT): writing a checkpoint then neither
evicts the data loader's pages nor stalls everyone in write-back, and the final fsync has little left to do.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from ... import atomic
from ...errors import StorageError
from ..format.memory import address_of
from .base import Buffer, Entry, probe

_PIECE = 16 * 2**20
_BLOCK = 4096
_IN_FLIGHT = 4
_DIRECT = getattr(os, "O_DIRECT", 0)
_ADVICE = {
    errno.ENOSPC: "Free space or choose another folder",
    errno.EDQUOT: "The quota is used up: free space or choose another folder",
    errno.EROFS: "The file system is read-only: choose another folder",
    errno.EACCES: "Check the folder's owner and mode",
    errno.EPERM: "Check the folder's owner and mode",
    errno.ENOTDIR: "Name a folder",
}


@contextmanager
def storage_errors(where: Path) -> Iterator[None]:
    """Turns an OSError into a StorageError that says what to do; FileNotFoundError passes as it is."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as e:
        raise StorageError(e.strerror or str(e), where=str(where), hint=_ADVICE.get(e.errno or 0)) from e


class PosixStorage:
    """Storage in one folder, which is made when the first file is written."""

    level = "disk"

    def __init__(self, root: Path, *, direct: bool = True) -> None:
        self.root = root
        self.url = str(root)
        self.direct = direct and bool(_DIRECT)

    def check(self) -> None:
        """Raises StorageError unless a commit is possible and safe here."""
        probe(self)

    def folders(self) -> list[str]:
        """The names of the folders at the root, sorted; none if the root is not there."""
        with storage_errors(self.root):
            try:
                with os.scandir(self.root) as entries:
                    return sorted(e.name for e in entries if e.is_dir())
            except FileNotFoundError:
                return []

    def files(self, folder: str) -> list[Entry]:
        """The regular files of one folder, sorted by name."""
        found = []
        with storage_errors(self.root / folder):
            try:
                with os.scandir(self.root / folder) as entries:
                    for e in entries:
                        try:
                            if e.is_file():
                                info = e.stat()
                                found.append(Entry(e.name, info.st_size, info.st_mtime))
                        except FileNotFoundError:  # removed since it was listed
                            continue
            except FileNotFoundError:
                return []
        return sorted(found, key=lambda f: f.name)

    def list(self, folder: str) -> list[str]:
        """The names of the folder's regular files, sorted."""
        return [f.name for f in self.files(folder)]

    def size(self, name: str) -> int:
        """The length of a file."""
        with storage_errors(self.root / name):
            return (self.root / name).stat().st_size

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes [start, stop) of a file; raises StorageError if it is shorter or not a regular file."""
        with self._opened(name) as fd:
            end = os.fstat(fd).st_size if stop is None else stop
            data = bytearray(max(0, end - start))
            self._fill(fd, name, start, memoryview(data))
            return bytes(data)

    def read_into(self, name: str, start: int, into: memoryview, *, once: bool = False) -> None:
        """Fills `into`; raises StorageError if the file is shorter. `once`: past the page cache, unless it is there."""
        with self._opened(name) as fd:
            got = self._read_direct(name, fd, start, into) if once and self.direct else 0
            self._fill(fd, name, start + got, into[got:])

    def write(self, name: str, chunks: Iterable[Buffer], size: int) -> None:
        """Writes aside in the same folder, syncs, renames, syncs the folder. Space is checked before."""
        path = self.root / name
        with storage_errors(path):
            self._make(path.parent)
            free = os.statvfs(path.parent)
            if free.f_bavail * free.f_frsize < size:
                raise OSError(errno.ENOSPC, f"No space left for {size} bytes")
            aside = path.with_name(f".{path.name}.{os.getpid()}.aside")
            # What a killed writer of this file left. Should it still live, its rename fails, and rightly so.
            for old in path.parent.glob(f".{path.name}.*.aside"):
                old.unlink(missing_ok=True)
            try:
                self._stream(aside, chunks, size)
                os.replace(aside, path)
            except BaseException:
                aside.unlink(missing_ok=True)
                raise
            atomic.fsync_folder(path.parent)

    def put(self, name: str, data: Buffer) -> None:
        """Writes a small file aside, syncs, renames, syncs the folder."""
        path = self.root / name
        with storage_errors(path):
            self._make(path.parent)
            atomic.write_bytes(path, bytes(data))

    def create(self, name: str, data: Buffer) -> bool:
        """Creates a file whole and durable; False if it exists. Of several hosts that try, one wins."""
        path = self.root / name
        with storage_errors(path):
            self._make(path.parent)
            aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.aside")
            try:
                atomic.write_bytes(aside, bytes(data))
                won = _link(aside, path)
                if won is None:  # this file system has no link(2)
                    won = _create_in_place(path, bytes(data))
            finally:
                aside.unlink(missing_ok=True)
            if won:
                atomic.fsync_folder(path.parent)
            return won

    def delete(self, name: str) -> None:
        """Removes a file and makes that durable."""
        path = self.root / name
        with storage_errors(path):
            try:
                path.unlink()
                atomic.fsync_folder(path.parent)
            except FileNotFoundError:
                return

    def delete_folder(self, folder: str) -> None:
        """Removes a folder; its commit marker goes first, so that a removal cut short leaves no checkpoint."""
        path = self.root / folder
        self.delete(f"{folder}/COMMITTED")
        with storage_errors(path):
            for _ in range(5):  # a file that appears meanwhile makes rmdir fail: look again
                try:
                    shutil.rmtree(path)
                    break
                except FileNotFoundError:
                    if not path.exists():
                        return
                except OSError as e:
                    if e.errno != errno.ENOTEMPTY:
                        raise
            atomic.fsync_folder(path.parent)

    def _stream(self, path: Path, chunks: Iterable[Buffer], size: int) -> None:
        """Writes the chunks in order of their places, a few at once, and syncs."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        plain = os.open(path, flags, 0o644)
        direct = self._open_direct(path)
        pending: set[Future[None]] = set()
        at = 0
        try:
            with ThreadPoolExecutor(max_workers=_IN_FLIGHT, thread_name_prefix="write") as pool:
                try:
                    for chunk in chunks:
                        view = memoryview(chunk).cast("B")
                        if at + len(view) > size:
                            raise ValueError(f"more than the {size} bytes that were announced")
                        pending.add(pool.submit(_write_at, plain, direct, view, at))
                        at += len(view)
                        if len(pending) >= _IN_FLIGHT:
                            done, pending = wait(pending, return_when=FIRST_COMPLETED)
                            for f in done:
                                f.result()
                finally:
                    done, _ = wait(pending)
                for f in done:
                    f.result()
            if at != size:
                raise ValueError(f"{at} bytes came, {size} were announced")
            os.fsync(plain)
        finally:
            os.close(plain)
            if direct is not None:
                os.close(direct)

    def _open_direct(self, path: Path) -> int | None:
        if not self.direct:
            return None
        try:
            return os.open(path, os.O_WRONLY | os.O_CLOEXEC | _DIRECT)
        except OSError:  # tmpfs and some network file systems have no such mode
            return None

    def _make(self, folder: Path) -> None:
        if not folder.is_dir():
            missing = [p for p in (folder, *folder.parents) if not p.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            for p in missing:
                atomic.fsync_folder(p.parent)

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        path = self.root / name
        with storage_errors(path):
            # O_NONBLOCK: a FIFO of this name must not hang the reader. It changes nothing for regular files.
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise StorageError("it is not a regular file", where=str(path))
                yield fd
            finally:
                os.close(fd)

    def _read_direct(self, name: str, cached: int, start: int, into: memoryview) -> int:
        """How many bytes came straight from the device: none if they lie in the page cache, or where that cannot be."""
        whole = len(into) - len(into) % _BLOCK
        if start % _BLOCK or not whole or not _aligned(into) or _in_page_cache(cached, start, len(into)):
            return 0
        # Having asked left the beginning in the page cache, and the next one would take that for all of it.
        os.posix_fadvise(cached, start, len(into), os.POSIX_FADV_DONTNEED)
        got = 0
        try:
            fd = os.open(self.root / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | _DIRECT)
        except OSError:  # as for writing
            return 0
        try:
            while got < whole and got % _BLOCK == 0:
                n = os.preadv(fd, [into[got:whole]], start + got)
                if n == 0:
                    break  # the end of the file: `_fill` says so
                got += n
        except OSError:
            pass  # reading the rest the usual way says what is wrong, if anything is
        finally:
            os.close(fd)
        return got

    def _fill(self, fd: int, name: str, start: int, into: memoryview) -> None:
        at = 0
        while at < len(into):
            n = os.preadv(fd, [into[at : at + _PIECE]], start + at)
            if n == 0:
                raise StorageError(
                    f"the file ends at byte {start + at}, {len(into) - at} more were expected",
                    where=str(self.root / name),
                )
            at += n


def _link(aside: Path, path: Path) -> bool | None:
    """Whether `path` is now the file `aside`; None where links are not known."""
    try:
        os.link(aside, path)
        return True
    except FileExistsError:
        # NFS may have done it, lost the answer and refused the second try: then our file has two names.
        return aside.stat().st_nlink == 2
    except OSError as e:
        if e.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV):
            return None
        raise


def _create_in_place(path: Path, data: bytes) -> bool:
    """Exclusive, but not all at once: a reader may see a part, and a kill may leave one. Markers have a checksum, so
    that is no checkpoint rather than a wrong one."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    return True


def _write_at(plain: int, direct: int | None, view: memoryview, at: int) -> None:
    """Writes all of `view` at this place, through `direct` as far as addresses and lengths are aligned."""
    whole = len(view) - len(view) % _BLOCK
    if direct is not None and at % _BLOCK == 0 and whole and _aligned(view):
        try:
            n = os.pwrite(direct, view[:whole], at)
            view, at = view[n:], at + n
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
    while view:
        n = os.pwrite(plain, view, at)
        view, at = view[n:], at + n


def _in_page_cache(fd: int, start: int, size: int) -> bool:
    """Whether beginning, middle and end of this can be had without the device; False where the system does not tell."""
    try:
        places = (start, start + size // 2, start + size - 1)
        return all(os.preadv(fd, [bytearray(1)], at, os.RWF_NOWAIT) == 1 for at in places)
    except (OSError, AttributeError):
        return False


def _aligned(view: memoryview) -> bool:
    """Whether the buffer begins at a page: what is mapped does, what Python allocated seldom does."""
    return address_of(view) % _BLOCK == 0
