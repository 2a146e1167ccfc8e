"""Folders and files that only their owner may use: key files, sockets, progress pages, copies of models.

A folder in shared memory or /tmp has a name that others can guess, and may be made beforehand by them. So the mode is
set whatever the umask is, and the owner is looked at before anything is put there or believed.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from . import atomic
from .errors import UnsafeFile


def private_folder(path: Path, *, parents: bool = True) -> Path:
    """Makes the folder with mode 0700, whatever the umask, or closes to others one of ours that is there.

    Missing parents are made 0700 too. Raises UnsafeFile if the folder is a link or somebody else's, OSError as the
    system gives it.
    """
    if parents and not path.parent.is_dir():
        private_folder(path.parent)
    try:
        os.mkdir(path, 0o700)
        os.chmod(path, 0o700)  # a umask may have taken away the owner's own rights
        return path
    except FileExistsError:
        pass
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode) or not stat.S_ISDIR(found.st_mode):
        raise UnsafeFile("this is no folder, and somebody may have put it here for us", where=str(path),
                         hint="Remove it, and run the same command")  # fmt: skip
    if found.st_uid != os.geteuid():
        raise UnsafeFile(f"this folder belongs to another user ({found.st_uid})", where=str(path),
                         hint="Remove it, or choose another place for it")  # fmt: skip
    if stat.S_IMODE(found.st_mode) & 0o077:
        os.chmod(path, 0o700)
    return path


def write_secret(path: Path, data: bytes) -> None:
    """Puts a file there that only its owner can read, in place of whatever was there.

    It is made aside under a random name that must not exist yet, so that nobody holds it open or planted it. Raises
    UnsafeFile where the file system keeps no modes, OSError as the system gives it.
    """
    atomic.write_bytes(path, data, mode=0o600)
    read_secret(path)


def read_secret(path: Path) -> bytes:
    """The content of a key file. Raises UnsafeFile if others may read or change it, or it was planted.

    The owner must be us, root, or whoever owns the folder that it lies in: who gave us the folder to use. Raises
    OSError as the system gives it.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as f:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise UnsafeFile("a key file must be a plain file", where=str(path), hint="Remove it")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise UnsafeFile(
                f"others may use this key file (mode {stat.S_IMODE(found.st_mode):04o})", where=str(path),
                hint=f"chmod 600 {path}, after asking who read it; a file system that keeps no modes is no place for it",
            )  # fmt: skip
        if found.st_uid not in (os.geteuid(), 0, os.stat(path.parent).st_uid):
            raise UnsafeFile(f"this key file belongs to another user ({found.st_uid})", where=str(path),
                             hint="Remove it, and start again what writes it")  # fmt: skip
        return f.read(1 << 16)
