"""Messages between supervisor and agent: one JSON object a line over TCP, requests answered by their id."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from ..errors import RunError, UnbrokenError

Message = dict[str, Any]
_LIMIT = 64 * 2**20
_log = logging.getLogger(__name__)


class LinkClosed(RunError):
    """The other side is gone."""


class Link:
    """One connection. `call` asks and waits for the answer; `tell` sends and goes on; what the other side
    asks or tells comes to `on_message`, whose return value is the answer to a request."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_message: Callable[[Message], Awaitable[Message | None]],
    ) -> None:
        self._reader, self._writer, self._on_message = reader, writer, on_message
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.closed = asyncio.Event()

    @classmethod
    async def connect(
        cls,
        host: str,
        port: int,
        on_message: Callable[[Message], Awaitable[Message | None]],
        timeout: float = 3.0,
    ) -> Link:
        """Connects. Raises OSError or TimeoutError."""
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port, limit=_LIMIT), timeout)
        return cls(reader, writer, on_message)

    def tell(self, **message: Any) -> None:
        """Sends without waiting; does nothing on a closed link."""
        if not self.closed.is_set():
            self._writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    async def call(self, op: str, *, timeout: float = 30.0, **fields: Any) -> Message:
        """Asks and returns the answer. Raises LinkClosed, TimeoutError, or RunError with the other side's words."""
        if self.closed.is_set():
            raise LinkClosed(f"the link is closed; '{op}' was not sent")
        number = next(self._ids)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self.tell(op=op, id=number, **fields)
            answer = await asyncio.wait_for(future, timeout)
        finally:
            self._waiting.pop(number, None)
        if not answer.get("ok", False):
            raise RunError(
                answer.get("what", f"'{op}' failed"), where=answer.get("where"), todo=answer.get("todo")
            )
        return answer

    async def serve(self) -> None:
        """Reads until the other side is gone; then every waiting call raises LinkClosed."""
        try:
            while line := await self._reader.readline():
                try:
                    message = json.loads(line)
                except ValueError:
                    message = None
                if not isinstance(message, dict):
                    _log.warning("a line that is no message came over the link; dropped")
                    continue
                if "answer" in message:
                    waiting = self._waiting.get(message["answer"])
                    if waiting is not None and not waiting.done():
                        waiting.set_result(message)
                else:
                    task = asyncio.create_task(self._handle(message))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
        except (ConnectionError, asyncio.IncompleteReadError, ValueError):
            pass
        finally:
            self.close()

    async def _handle(self, message: Message) -> None:
        number = message.get("id")
        try:
            answer = await self._on_message(message)
        except UnbrokenError as e:
            answer = {"ok": False, "what": e.what, "where": e.where, "todo": e.todo}
        except Exception as e:  # noqa: BLE001  a defect in one message must not end the link; it is logged and told
            _log.exception("a message could not be handled: %s", message.get("op"))
            answer = {"ok": False, "what": f"{type(e).__name__}: {e}"}
        if number is not None:
            self.tell(**{"answer": number, "ok": True, **(answer or {})})

    def close(self) -> None:
        """Closes; idempotent."""
        if self.closed.is_set():
            return
        self.closed.set()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(LinkClosed("the other side is gone"))
        self._writer.close()
