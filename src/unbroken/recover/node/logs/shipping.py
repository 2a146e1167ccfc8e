"""Brings what a node's processes print to the supervisor, where the node has not got the run directory.

Each process writes into a file of its own node, so that no kill and no silence of the link loses a line or holds the
process up. The files are sent in pieces with their offsets; the supervisor answers how much it has. What it has is let go
here (its blocks are freed, the file keeps its length), so that a log takes no more of the node's memory than what is on
its way. After a break, or with a successor, the supervisor's answer says where to go on.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import logging
import os
import re
import secrets
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .... import atomic
from ....errors import RunError
from ....progress import RunDir
from ....waiting import wait_within
from ...wire import LOG_BYTES, Link, Message

_log = logging.getLogger("unbroken.agent")
_EVERY_S = 0.2
_RETRY_S = 1.0
_CALL_S = 30.0
_KEPT = 8 << 20
"""Of what the supervisor has: whoever follows a log here is never so far behind."""
_FREE_STEP = 4 << 20
BACKLOG = 256 << 20
"""Bytes of one log that may wait. More comes in the time of a lease from nothing but an endless loop: then its middle is
left out, and the log says so."""
_PUNCH = 0x03
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE."""
_libc = ctypes.CDLL(None, use_errno=True)
_RANK = re.compile(r"rank-(\d+)\.log")


@dataclass
class _File:
    """`sent` is how much the supervisor has, None until it has said; `kept` where what is still here begins."""

    path: Path
    attempt: int
    name: str
    sent: int | None = None
    kept: int = 0

    @property
    def size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    @property
    def waits(self) -> bool:
        return self.sent is None or self.size > self.sent

    def take_piece(self, most: int) -> Message:
        """The next piece, which may be empty: then it only asks."""
        at = self.sent or 0
        if self.sent is not None and self.size - at > BACKLOG:
            at = self.size - BACKLOG // 2
        at = max(at, self.kept)
        with contextlib.suppress(OSError), open(self.path, "rb") as f:
            data = os.pread(f.fileno(), most, at) if self.sent is not None else b""
            packed = base64.b64encode(zlib.compress(data, 1)).decode()
            return {
                "attempt": self.attempt,
                "log": self.name,
                "at": at,
                "first": at > (self.sent or 0),
                "data": packed,
            }
        return {"attempt": self.attempt, "log": self.name, "at": at, "first": False, "data": ""}

    def note(self, have: int) -> None:
        """The supervisor has so much."""
        self.sent = min(have, self.size)
        if (until := (self.sent - _KEPT) // _FREE_STEP * _FREE_STEP) > self.kept:
            with contextlib.suppress(OSError), open(self.path, "rb+") as f:
                args = (ctypes.c_int(_PUNCH), ctypes.c_int64(0), ctypes.c_int64(until))
                if _libc.fallocate(ctypes.c_int(f.fileno()), *args) == 0:
                    self.kept = until


class LogShipper:
    """The logs of one node in `own`, a folder with the names of a run directory."""

    def __init__(self, own: RunDir, node: str) -> None:
        self._own, self._node = own, node
        self._life = _read_life(own.path / "life")
        self._files: dict[Path, _File] = {}
        self._caught_up = asyncio.Event()
        self._hurry = asyncio.Event()

    def _look(self) -> Iterator[_File]:
        """All files, also of an agent before this one; those of older attempts go once the supervisor has them."""
        agent = self._own.agent_log(self._node)
        found = [(agent, 0, "agent"), (agent.with_suffix(".keeper.log"), 0, "keeper")]
        numbers = self._own.attempt_numbers()
        for number in numbers:
            folder = self._own.node(number, self._node)
            for path in folder.glob("rank-*.log"):
                if m := _RANK.fullmatch(path.name):
                    found.append((path, number, f"rank-{int(m[1])}"))
        for path, number, name in found:
            file = self._files.setdefault(path, _File(path, number, name))
            if number and number < numbers[-1] and not file.waits:
                path.unlink(missing_ok=True)
                del self._files[path]
            elif file.waits and path.exists():
                yield file

    async def run(self, link: Link) -> None:
        """Sends what there is, and what comes, until the link closes."""
        for file in self._files.values():
            file.sent = None  # another supervisor may have less
        while not link.closed.is_set():
            batch, left = [], LOG_BYTES
            for file in await asyncio.to_thread(lambda: list(self._look())):
                piece = await asyncio.to_thread(file.take_piece, left)
                batch.append((file, piece))
                left -= max(1024, min(left, file.size - piece["at"]))
                if left <= 1024:
                    break
            if not batch:
                self._caught_up.set()
            elif not await self._send(link, batch):
                with contextlib.suppress(TimeoutError):
                    await wait_within(link.closed.wait(), _RETRY_S)
                continue
            if left > 1024:
                self._hurry.clear()
                with contextlib.suppress(TimeoutError):
                    await wait_within(self._hurry.wait(), _EVERY_S if not batch else 0.02)

    async def _send(self, link: Link, batch: list[tuple[_File, Message]]) -> bool:
        """Whether the supervisor took them; where it cannot write them now they are sent again."""
        try:
            answer = await link.call("logs", timeout=_CALL_S, life=self._life, pieces=[p for _, p in batch])
            for (file, _), have in zip(batch, answer["have"], strict=True):
                file.note(int(have))
        except (RunError, TimeoutError, KeyError, ValueError, TypeError) as e:
            if not link.closed.is_set():
                _log.warning("the supervisor did not take logs: %s", e)
            return False
        return True

    async def catch_up(self, within_s: float) -> bool:
        """Waits until all that lies here now is with the supervisor; whether it is."""
        self._caught_up.clear()
        self._hurry.set()
        try:
            await wait_within(self._caught_up.wait(), within_s)
        except TimeoutError:
            return False
        return True


def _read_life(path: Path) -> str:
    """The name of this folder's time, made with its first agent: it goes where the node's memory goes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.create_exclusive(path, secrets.token_hex(8).encode())
    return path.read_text()
