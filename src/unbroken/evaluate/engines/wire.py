"""Messages between coordinator and workers: 4 bytes of length, big-endian, then a JSON object with a key `op`.

Worker to coordinator
    hello    version, token, name, node, gpus, pid, now, sees  the first one
    ready    fetch_s, load_s, cached, conditions, uncompiled   the model is loaded
    block    task, block, visit, started, ended, answers, conditions
    failed   task, block, visit, kind, why, started, ended  this block raised; the worker goes on
    yielded  blocks                                         what it gives up of what it was asked for
    beat     task, block, since                             every `beat_s`, from a thread
    unfit    kind, what, where, todo                        the model does not load; the worker ends
    bye      why

Coordinator to worker
    welcome  suite, spec, model, beat_s                     load it
    refused  why                                            another version, or a name that is taken
    task     prepared                                       before its first block
    work     visit, task, blocks, lines                     append to the queue; lines: the samples, where files are not seen
    yield    blocks                                         give up those that have not begun
    stop     why                                            end after the block in flight

`visit` is the number of the assignment that a block belongs to.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from typing import Any

from ...link.bounds import Malformed, Message, decode

VERSION = 1
FROM_WORKER = 64 << 20
"""Bytes of one message of a worker that has shown the token: a block's answers."""
TO_WORKER = 1 << 30
"""Bytes of one message of the coordinator: a bundle's prompts, for workers that do not see the files."""
BODY_S = 120.0
"""So long a message may take from its length to its last byte."""


class TooLarge(ValueError):
    """A message above the limit; it was not sent."""


def pack(message: Message, limit: int = TO_WORKER) -> bytes:
    """Bytes on the wire. Raises TooLarge."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > limit:
        raise TooLarge(f"a message of {len(body):,} bytes is above the limit of {limit:,}")
    return struct.pack(">I", len(body)) + body


class Channel:
    """The worker's end: blocking, one reader thread, any number of writers."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, op: str, **fields: Any) -> None:
        """Sends one message. Raises OSError when the coordinator is gone, TooLarge for what it would not take."""
        data = pack({"op": op, **fields}, FROM_WORKER)
        with self._lock:
            self._sock.sendall(data)

    def receive(self) -> Message | None:
        """The next message; None when the coordinator has closed, or is none."""
        head = self._exactly(4)
        if head is None:
            return None
        (size,) = struct.unpack(">I", head)
        body = self._exactly(size) if size <= TO_WORKER else None
        try:
            return None if body is None else _checked(decode(body, values=TO_WORKER))
        except Malformed:
            return None

    def _exactly(self, size: int) -> bytes | None:
        parts = []
        while size:
            try:
                part = self._sock.recv(min(size, 1 << 20))
            except OSError:
                return None
            if not part:
                return None
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Closes both directions."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._sock.close()


async def receive(
    reader: asyncio.StreamReader, limit: int = FROM_WORKER, within_s: float = BODY_S
) -> Message | None:
    """The next message on the coordinator's side; None when the worker is gone, also in the middle of a message.

    `within_s` counts from the message's first bytes: between two a worker may be silent (its beats are watched
    elsewhere). Raises Malformed for what is no message, or larger than `limit`.
    """
    try:
        (size,) = struct.unpack(">I", await reader.readexactly(4))
        if size > limit:
            raise Malformed(f"a message of {size:,} bytes, above the limit of {limit:,}")
        body = await asyncio.wait_for(reader.readexactly(size), within_s)
    except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
        return None
    return _checked(decode(body))


def _checked(message: Message) -> Message:
    if not isinstance(message.get("op"), str):
        raise Malformed("a message without 'op'")
    return message
