"""Where connections come in whose strangers are few: accepted one by one, and no faster than they say who they are.

asyncio's own server accepts whatever comes, each with a descriptor and a buffer. Here at most `STRANGERS` connections
are open that have shown no secret; the others wait in the kernel. So a thousand workers that join at once all get in,
and whoever opens connections and says nothing costs neither memory nor descriptors. A handshake of TLS that is not over
is a stranger's too, and nothing is served before it is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from ..waiting import wait_within
from .address import Address, listen_unix
from .bounds import HELLO_S, PRESSED_S, READ_AHEAD, STRANGERS
from .tls import Identity

_log = logging.getLogger(__name__)
_BACKLOG = 4096
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Listener:
    """Accepts connections and serves each in a task; `known` when a connection has said who it is."""

    def __init__(
        self,
        serve: Serve,
        at: Path | str,
        *,
        identity: Identity | None = None,
        name: str = "",
        port: int = 0,
    ) -> None:
        """Listens from now on, on a Unix socket where `at` is a path, else on this host's address with TLS; call it in the
        event loop. `name` is the host's as others know it, where `at` is all of them; `port` a certain one, 0 any that is
        free. Raises OSError, RunError."""
        self._serve, self._identity = serve, identity
        self._path = at if isinstance(at, Path) else None
        self._context: ssl.SSLContext | None = None
        if isinstance(at, Path):
            self._socket = listen_unix(at, backlog=_BACKLOG)
            self._inode = os.stat(at).st_ino
            self.address = Address.unix(at)
        else:
            if identity is None:
                raise ValueError("off one machine there is no link without a certificate")
            self._context = identity.context(server=True)
            self._socket = socket.create_server((at, port), backlog=_BACKLOG)
            self.address = Address("tls", name or at, self._socket.getsockname()[1])
        self._socket.setblocking(False)
        self._strangers: dict[asyncio.Task[None], float] = {}
        self._writers: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self._room = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    @property
    def strangers(self) -> int:
        """Connections that have not said who they are."""
        return len(self._strangers)

    def known(self, writer: asyncio.StreamWriter) -> None:
        """This connection is a stranger no more, or gone."""
        task = self._writers.pop(writer, None)
        if task is not None:
            self._strangers.pop(task, None)
        self._room.set()

    def close(self) -> None:
        """Stops listening and closes the strangers; whoever is known stays."""
        self._accepting.cancel()
        self._socket.close()
        for task in list(self._strangers):
            self._turn_away(task)
        try:
            # A successor's socket may have the same name.
            if self._path is not None and os.stat(self._path).st_ino == self._inode:
                self._path.unlink()
        except OSError:
            pass

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
            task = loop.create_task(self._serve_one(sock))
            self._strangers[task] = time.monotonic()
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    async def _make_room(self) -> None:
        while len(self._strangers) >= STRANGERS:
            oldest, since = next(iter(self._strangers.items()))
            left = since + PRESSED_S - time.monotonic()
            if left <= 0:
                self._turn_away(oldest)
                return
            self._room.clear()
            try:
                await wait_within(self._room.wait(), left)
            except TimeoutError:
                pass

    def _turn_away(self, task: asyncio.Task[None]) -> None:
        self._strangers.pop(task, None)
        writer = next((w for w, t in self._writers.items() if t is task), None)
        if writer is None:
            task.cancel()  # in its handshake
        else:
            writer.transport.abort()
            self.known(writer)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._strangers.pop(task, None)
        self._room.set()

    async def _serve_one(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=READ_AHEAD, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        try:
            if self._context is None:
                transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock)
            else:
                transport, _ = await loop.connect_accepted_socket(
                    lambda: protocol, sock, ssl=self._context, ssl_handshake_timeout=HELLO_S,
                    ssl_shutdown_timeout=1.0,
                )  # fmt: skip
                _check(self._identity, transport)
        except (OSError, asyncio.CancelledError) as e:
            sock.close()
            if isinstance(e, OSError):
                _log.info("a connection ended before it had shown who it is: %s", e)
                return
            raise
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        task = asyncio.current_task()
        if task is not None and task in self._strangers:
            self._writers[writer] = task
        try:
            await self._serve(reader, writer)
        except asyncio.CancelledError:
            raise
        except Exception:  # noqa: BLE001  a defect in one connection must not end the others; it is logged
            _log.exception("serving a connection failed; only it ends")
        finally:
            self.known(writer)
            writer.close()


def _check(identity: Identity | None, transport: asyncio.BaseTransport) -> None:
    """Raises ssl.SSLCertVerificationError, having ended the connection, unless the other side showed the run's certificate."""
    tls = transport.get_extra_info("ssl_object")
    try:
        if identity is None or tls is None:
            raise ssl.SSLCertVerificationError("there is no certificate to compare with")
        identity.check(tls.getpeercert(binary_form=True))
    except ssl.SSLCertVerificationError:
        if isinstance(transport, asyncio.WriteTransport):
            transport.abort()
        raise


async def open_link(
    address: Address, identity: Identity | None, within_s: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to whoever listens there, after both sides have shown the run's certificate where it is TLS.

    Raises OSError (an SSLError is one), TimeoutError.
    """
    if address.kind == "unix":
        opening = asyncio.open_unix_connection(address.host, limit=READ_AHEAD)
        return await wait_within(opening, within_s)
    if identity is None:
        raise ConnectionRefusedError(f"{address} asks for a certificate, and there is none here")
    reader, writer = await wait_within(
        asyncio.open_connection(
            address.host, address.port, limit=READ_AHEAD, ssl=identity.context(server=False),
            ssl_shutdown_timeout=1.0,
        ),
        within_s,
    )  # fmt: skip
    _check(identity, writer.transport)
    return reader, writer
