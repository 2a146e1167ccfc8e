"""A port whose strangers are few: connections are accepted one by one, and no faster than they say who they are.

asyncio's own server accepts whatever comes, each with a descriptor and a buffer. Here at most `STRANGERS` connections
are open that have shown no secret; the others wait in the kernel. So a thousand workers that join at once all get in,
and whoever opens connections and says nothing costs neither memory nor descriptors.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable

from .bounds import PRESSED_S, READ_AHEAD, STRANGERS

_log = logging.getLogger(__name__)
_BACKLOG = 4096


class Listener:
    """Accepts connections and serves each in a task; `known` when a connection has said who it is."""

    def __init__(
        self,
        serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
        host: str,
        port: int = 0,
    ) -> None:
        """Listens from now on; call it in the event loop. Raises OSError."""
        self._serve = serve
        self._socket = socket.create_server((host, port), backlog=_BACKLOG)
        self._socket.setblocking(False)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._strangers: dict[asyncio.StreamWriter, float] = {}
        self._room = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    @property
    def strangers(self) -> int:
        """Connections that have not said who they are."""
        return len(self._strangers)

    def known(self, writer: asyncio.StreamWriter) -> None:
        """This connection is a stranger no more, or gone."""
        self._strangers.pop(writer, None)
        self._room.set()

    def close(self) -> None:
        """Stops listening and closes the strangers; whoever is known stays."""
        self._accepting.cancel()
        self._socket.close()
        for writer in list(self._strangers):
            writer.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._make_room()
            try:
                sock, _ = await loop.sock_accept(self._socket)
            except OSError as e:  # no descriptors left, or a connection that ended while it waited
                _log.warning("a connection could not be accepted: %s", e)
                await asyncio.sleep(0.1)
                continue
            try:
                reader = asyncio.StreamReader(limit=READ_AHEAD, loop=loop)
                protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
                transport, _ = await loop.connect_accepted_socket(lambda p=protocol: p, sock)  # type: ignore[misc]
            except OSError:
                sock.close()
                continue
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            self._strangers[writer] = time.monotonic()
            task = loop.create_task(self._serve_one(reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _make_room(self) -> None:
        while len(self._strangers) >= STRANGERS:
            oldest, since = next(iter(self._strangers.items()))
            left = since + PRESSED_S - time.monotonic()
            if left <= 0:
                oldest.transport.abort()
                self.known(oldest)
                return
            self._room.clear()
            try:
                await asyncio.wait_for(self._room.wait(), left)
            except TimeoutError:
                pass

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve(reader, writer)
        except asyncio.CancelledError:
            raise
        except Exception:  # noqa: BLE001  a defect in one connection must not end the others; it is logged
            _log.exception("serving a connection failed; only it ends")
        finally:
            self.known(writer)
            writer.close()
