"""The compile caches of a node, carried to spares: one that takes a place would compile what every other node has compiled.

Where they lie is torch's business (torch/_inductor/runtime/cache_dir_utils.py: TORCHINDUCTOR_CACHE_DIR, else torchinductor_USER in the
temporary folder, with Triton's in it unless TRITON_CACHE_DIR is set). What an agent has is packed newest first up to a limit, sent in
pieces, and written beside what a spare has: no file there is replaced. So a half-written one must not be carried: compilers write
libraries in place, and what is found under its key is never compiled again.
"""

from __future__ import annotations

import asyncio
import base64
import getpass
import io
import logging
import os
import re
import stat
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from .... import atomic
from ....errors import RunError
from ...wire import LOG_BYTES, Message

_log = logging.getLogger("unbroken.agent")
LIMIT = 256 << 20
"""Bytes of files: those of a model of billions of parameters are tens of megabytes. Older files than these are left out."""
SETTLED_S = 10.0
"""Files that were written within so many seconds are left out: their writer may not be done."""
_COMPILER = "torch._inductor"
_PASSED_OVER = re.compile(r"(^|/)(locks|tmp[^/]*|\.[^/]*)(/|$)|\.(lock|aside|tmp)$")


def is_compiled(imports: object) -> bool:
    """Whether ranks with these imports (lines by local rank) have used the compiler at all."""
    lines = imports.values() if isinstance(imports, Mapping) else ()
    return any(x.startswith(_COMPILER) for rank in lines if isinstance(rank, list) for x in rank)


def find_folders(env: Mapping[str, str]) -> list[Path]:
    """Where ranks with this environment keep what they compile."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name: as torch has it
        user = f"uid_{os.getuid()}"
    name = re.sub(r'[\\/:*?"<>|]', "_", user)
    default = os.path.join(tempfile.gettempdir(), f"torchinductor_{name}")
    found = [Path(env.get("TORCHINDUCTOR_CACHE_DIR") or default)]
    if triton := env.get("TRITON_CACHE_DIR"):
        found.append(Path(triton))
    return found


def pack(folders: Sequence[Path], into: IO[bytes], limit: int = LIMIT, settled_s: float = SETTLED_S) -> None:
    """Writes the files of these folders as one archive, the newest ones that fit into `limit`; nothing where there are none.
    One that vanishes meanwhile, as compilers tidy up, is left out. Raises OSError."""
    files, until = [], time.time() - settled_s
    for number, folder in enumerate(folders):
        for name, path, status in _list_files(folder):
            if status.st_mtime <= until:
                files.append((status.st_mtime, status.st_size, f"{number}/{name}", path))
    left = limit
    if not files:
        return
    with tarfile.open(fileobj=into, mode="w:gz", compresslevel=1) as archive:
        for _, size, name, path in sorted(files, reverse=True):
            if (left := left - size) < 0:
                break
            try:
                archive.add(path, name, recursive=False)  # opens it before anything is written
            except FileNotFoundError:
                left += size


def _list_files(folder: Path) -> Iterator[tuple[str, Path, os.stat_result]]:
    """Name below the folder, path and status of each file that is carried."""
    for place, _, names in os.walk(folder):  # which passes over folders that vanish
        for path in map(Path(place).joinpath, names):
            name = path.relative_to(folder).as_posix()
            if _PASSED_OVER.search(name):
                continue
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                yield name, path, status


def unpack(packed: IO[bytes], folders: Sequence[Path], limit: int = LIMIT) -> int:
    """Writes what is missing in these folders; how many files that were. Raises OSError, tarfile.TarError."""
    written = 0
    with tarfile.open(fileobj=packed, mode="r:gz") as archive:
        for member in archive:
            first, *rest = PurePosixPath(member.name).parts or ("",)
            if (
                not member.isfile()
                or not first.isdigit()
                or int(first) >= len(folders)
                or not rest
                or ".." in rest
            ):
                continue
            if (limit := limit - member.size) < 0:
                break
            path = folders[int(first)].joinpath(*rest)
            content = archive.extractfile(member)
            if content is None or path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_bytes(path, content.read(), durable=False, mode=member.mode & 0o755)
            written += 1
    return written


class CompileCaches:
    """Those of one node, given and taken in pieces."""

    def __init__(self, env: Mapping[str, str] = os.environ) -> None:
        self._folders = find_folders(env)
        self._out: IO[bytes] = io.BytesIO()
        self._in: IO[bytes] = io.BytesIO()
        self._total = 0

    async def give(self, offset: int) -> Message:
        """The piece from `offset` on; they are packed when the first one is asked for. `total` is 0 where there are none."""
        if offset == 0:
            await asyncio.to_thread(self._pack)
        self._out.seek(offset)
        data = self._out.read(LOG_BYTES // 2)
        if offset + len(data) >= self._total:
            self._out.close()
            self._out = io.BytesIO()
        return {"total": self._total, "size": len(data), "data": base64.b64encode(data).decode()}

    def _pack(self) -> None:
        self._out.close()
        # Not in the node's volatile folder: that is memory.
        self._out = tempfile.TemporaryFile()  # noqa: SIM115  closed with its last piece
        self._total = 0
        try:
            pack(self._folders, self._out)
        except OSError as e:
            _log.warning("what was compiled here cannot be read: %s", e)
            return
        self._total = self._out.tell()

    async def take(self, offset: int, total: int, data: str) -> Message:
        """Takes a piece; with the last one what is missing here is written. Raises RunError."""
        if offset == 0:
            self._in.close()
            self._in = tempfile.TemporaryFile()  # noqa: SIM115  closed with its last piece
        if offset != self._in.tell() or total > 2 * LIMIT:
            raise RunError("a piece of what was compiled elsewhere is missing, or it is too much")
        try:
            self._in.write(base64.b64decode(data))
            if self._in.tell() < total:
                return {}
            packed, self._in = self._in, io.BytesIO()
            with packed:
                packed.seek(0)
                return {"files": await asyncio.to_thread(unpack, packed, self._folders)}
        except (OSError, ValueError, tarfile.TarError) as e:
            raise RunError(f"what was compiled elsewhere cannot be kept here: {e}") from e
