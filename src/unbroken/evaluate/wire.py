"""Messages between coordinator and workers: 4 bytes of length, big-endian, then a JSON object with a key `op`.

Worker to coordinator
    hello    token, name, node, gpus, pid, now, sees        the first one
    ready    fetch_s, load_s, cached                        the model is loaded
    block    task, block, visit, started, ended, answers, conditions
    failed   task, block, visit, kind, why                  this block raised; the worker goes on
    yielded  blocks                                         what it gives up of what it was asked for
    beat     task, block, since                             every `beat_s`, from a thread
    unfit    kind, what, where, todo                        the model does not load; the worker ends
    bye      why

Coordinator to worker
    welcome  spec, model, places, beat_s                    load it
    task     prepared, lines (none where files are seen)    before its first block
    work     visit, task, blocks                            append to the queue
    yield    blocks                                         give up those that have not begun
    lines    task, block, lines                             answer to `want`
    stop     why                                            end after the block in flight
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from typing import Any

from ..errors import ContractError

VERSION = 1
_LIMIT = 1 << 30
Message = dict[str, Any]


def pack(message: Message) -> bytes:
    """Bytes on the wire."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return struct.pack(">I", len(body)) + body


class Channel:
    """The worker's end: blocking, one reader thread, any number of writers."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, op: str, **fields: Any) -> None:
        """Sends one message. Raises OSError when the coordinator is gone."""
        with self._lock:
            self._sock.sendall(pack({"op": op, **fields}))

    def receive(self) -> Message | None:
        """The next message; None when the coordinator has closed."""
        head = self._exactly(4)
        if head is None:
            return None
        (size,) = struct.unpack(">I", head)
        if size > _LIMIT:
            raise ContractError(f"a message of {size} bytes", where="coordinator")
        body = self._exactly(size)
        return None if body is None else json.loads(body)

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


async def receive(reader: asyncio.StreamReader) -> Message | None:
    """The next message on the coordinator's side; None when the worker is gone."""
    try:
        (size,) = struct.unpack(">I", await reader.readexactly(4))
        if size > _LIMIT:
            return None
        message = json.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, ValueError):
        return None
    return message if isinstance(message, dict) and isinstance(message.get("op"), str) else None
