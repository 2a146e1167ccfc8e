"""Messages between coordinator and workers: 4 bytes of length, big-endian, then a JSON object with a key `op`.

Worker to coordinator
    hello    version, token, name, node, gpus, pid, now, sees  the first one
    ready    fetch_s, load_s, cached, conditions, uncompiled, at_once   the model is loaded
    block    task, block, visit, started, ended, answers, conditions, tokens
    failed   task, block, visit, kind, why, started, ended  this block raised; the worker goes on
    yielded  blocks                                         what it gives up of what it was asked for
    beat     task, block, since, steps                      every `beat_s`, from a thread
    unfit    kind, what, where, todo                        the model does not load; the worker ends
    bye      why

Coordinator to worker
    welcome  suite, spec, model, beat_s                     load it
    refused  why                                            another version, or a name that is taken
    task     prepared                                       before its first block
    work     visit, task, blocks, lines, crowd              append to the queue; lines: the samples, where files are not seen;
                                                            crowd: as in block_queue.Item
    yield    blocks                                         give up those that have not begun
    stop     why                                            end after the block in flight

`visit` is the number of the assignment that a block belongs to.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ...link import channel as links
from ...link import framing
from ...link.accepting import Connection
from ...link.bounds import READ_AHEAD, Malformed, Message
from ...link.framing import TooLarge, Unpacker
from ...waiting import wait_within

__all__ = ["BODY_S", "FROM_WORKER", "TO_WORKER", "VERSION", "Receiver", "TooLarge", "WorkerChannel", "pack"]

VERSION = 1
FROM_WORKER = 64 << 20
"""Bytes of one message of a worker that has shown the token: a block's answers."""
TO_WORKER = 1 << 30
"""Bytes of one message of the coordinator: a bundle's prompts, for workers that do not see the files."""
BODY_S = 120.0
"""So long a message may take from its length to its last byte."""


def pack(message: Message, limit: int = TO_WORKER) -> bytes:
    """Bytes on the wire. Raises TooLarge."""
    return framing.pack(message, limit)


class WorkerChannel:
    """The worker's end: blocking, one reader thread, any number of writers."""

    def __init__(self, sock: Connection) -> None:
        self._channel = links.Channel(sock, limit=TO_WORKER, most=FROM_WORKER, values=TO_WORKER)

    def send(self, op: str, **fields: Any) -> None:
        """Sends one message. Raises OSError when the coordinator is gone, TooLarge for what it would not take."""
        self._channel.send({"op": op, **fields})

    def receive(self) -> Message | None:
        """The next message; None when the coordinator has closed, or is none."""
        try:
            return _checked(self._channel.receive()[0])
        except (links.Closed, Malformed):
            return None

    def close(self) -> None:
        """Closes both directions."""
        self._channel.close()


class Receiver:
    """The coordinator's end: what one worker sends. `limit` bounds a message; raise it once the worker is known."""

    def __init__(self, reader: asyncio.StreamReader, limit: int = FROM_WORKER) -> None:
        self._reader, self._unpacker = reader, Unpacker(limit)

    def admit(self) -> None:
        """It has shown the token: from now on it may send blocks."""
        self._unpacker.limit = FROM_WORKER

    async def receive(self, within_s: float = BODY_S) -> Message | None:
        """The next message; None when the worker is gone, also in the middle of a message.

        `within_s` counts from the message's first bytes: between two a worker may be silent (its beats are watched
        elsewhere). Raises Malformed for what is no message, or larger than the limit.
        """
        try:
            if (body := self._unpacker.next()) is None and not self._unpacker.partial:
                if not await self._read():
                    return None
                body = self._unpacker.next()
            if body is None:
                body = await wait_within(self._rest(), within_s)
        except (OSError, TimeoutError):
            return None
        return None if body is None else _checked(self._unpacker.decode(body))

    async def _rest(self) -> bytes | None:
        while (body := self._unpacker.next()) is None:
            if not await self._read():
                return None
        return body

    async def _read(self) -> bool:
        piece = await self._reader.read(READ_AHEAD)
        self._unpacker.feed(piece)
        return bool(piece)


def _checked(message: Message) -> Message:
    if not isinstance(message.get("op"), str):
        raise Malformed("a message without 'op'")
    return message
