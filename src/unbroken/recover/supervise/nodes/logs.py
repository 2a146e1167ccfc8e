"""What nodes without the run directory print, as it comes through their agents: written to where it lies on any other node.

Whoever sends says where a piece begins, and is answered how much of that log is here: the length of the file, so that a
successor knows it too, and a piece that comes twice is written once. `offsets.json` beside a log says by how much it is
shorter than the one on its node (of which something was lost, which a line in it says), or longer (the node began again).
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from .... import atomic
from ....errors import RunError
from ....link.bounds import Malformed, Message, text, whole
from ....progress import RunDir
from ...wire import LOG_BYTES

_LOG = re.compile(r"agent|keeper|rank-(0|[1-9]\d{0,7})")
_PIECES = 512
_FAR = 1 << 60
_NOTE = "offsets.json"


class _Offset(NamedTuple):
    """`life` names the memory of the node in which the log lies, `missing` how much more it has there than here."""

    life: str
    missing: int = 0


class ShippedLogs:
    """Writes logs of nodes into a run directory."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._offsets: dict[Path, dict[str, _Offset]] = {}

    def take(self, node: str, message: Message) -> Message:
        """Writes pieces of a node's logs; the answer says how much of each is here. Blocks: call it from a thread. Raises
        Malformed, RunError where they cannot be written now."""
        pieces = message.get("pieces")
        if not isinstance(pieces, list) or len(pieces) > _PIECES:
            raise Malformed("'pieces' is no list, or too long a one")
        life = text(message.get("life"), "life", most=64)
        left = 2 * LOG_BYTES
        have = []
        for piece in pieces:
            path, at, is_first, data = self._read(node, piece, left)
            left -= len(data)
            try:
                have.append(self._write(path, at, is_first, data, life))
            except OSError as e:
                raise RunError(f"its log cannot be written: {e.strerror}", where=str(path)) from e
        return {"have": have}

    def _read(self, node: str, piece: Any, most: int) -> tuple[Path, int, bool, bytes]:
        if not isinstance(piece, dict):
            raise Malformed("a piece of a log is no table")
        name = text(piece.get("log"), "log")
        if not _LOG.fullmatch(name):
            raise Malformed(f"there is no log '{name}'")
        attempt = whole(piece.get("attempt"), "attempt", 0, 1 << 31)
        if name.startswith("rank-"):
            path = self._run_dir.rank_log(attempt, node, int(name.removeprefix("rank-")))
        else:
            path = self._run_dir.agent_log(node)
            path = path if name == "agent" else path.with_suffix(".keeper.log")
        at = whole(piece.get("at"), "at", 0, _FAR)
        return path, at, piece.get("first") is True, _unpack(piece.get("data"), most)

    def _write(self, path: Path, at: int, is_first: bool, data: bytes, life: str) -> int:
        """Writes what is not here yet; how much of the node's log is here."""
        if not self._run_dir.path.is_dir():
            raise RunError("the run directory is gone", where=str(self._run_dir.path))
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b", buffering=0) as f:
            size = os.fstat(f.fileno()).st_size
            offset = self._read_offsets(path.parent).get(path.name, _Offset(""))
            if offset.life != life and path.parent == self._run_dir.agent_log("").parent:
                # Another file than before, on a node that had lost its memory. Of a rank there is one in each attempt.
                offset = self._note_offset(path, _Offset(life, -size))
            here = size + offset.missing
            if at > here and is_first:
                line = f"\n[unbroken: {at - here} bytes of this log are lost: they came faster than they could be sent]\n"
                size += _write_all(f.fileno(), line.encode(), size)
                self._note_offset(path, _Offset(life, at - size))
                here = at
            if data and at <= here < at + len(data):
                here += _write_all(f.fileno(), data[here - at :], size)
            return here

    def _read_offsets(self, folder: Path) -> dict[str, _Offset]:
        if folder not in self._offsets:
            try:
                found = json.loads((folder / _NOTE).read_text())
                self._offsets[folder] = {str(k): _Offset(str(v[0]), int(v[1])) for k, v in found.items()}
            except (OSError, ValueError, AttributeError, LookupError, TypeError):
                self._offsets[folder] = {}
        return self._offsets[folder]

    def _note_offset(self, path: Path, offset: _Offset) -> _Offset:
        offsets = self._read_offsets(path.parent)
        atomic.write_json(path.parent / _NOTE, {**offsets, path.name: offset}, durable=False)
        offsets[path.name] = offset
        return offset


def _unpack(data: Any, most: int) -> bytes:
    if not isinstance(data, str) or len(data) > 2 * most + 1024:
        raise Malformed("a piece of a log is no text, or too long")
    if not data:
        return b""
    try:
        unpacking = zlib.decompressobj()
        found = unpacking.decompress(base64.b64decode(data, validate=True), most + 1)
    except (binascii.Error, zlib.error, ValueError) as e:
        raise Malformed(f"a piece of a log cannot be unpacked: {e}") from None
    if len(found) > most or not unpacking.eof:
        raise Malformed("a piece of a log is too long")
    return found


def _write_all(fd: int, data: bytes, at: int) -> int:
    """Writes at an offset; a disk that is full may take a part, which counts. Raises OSError where it takes nothing."""
    done = 0
    while done < len(data):
        try:
            done += os.pwrite(fd, data[done:], at + done)
        except OSError:
            if done:
                break
            raise
    return done
