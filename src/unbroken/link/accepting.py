"""Connections that are served by a thread each: strangers are few, and the oldest of them goes when one too many comes.

Whoever belongs here shows in milliseconds who it is, so the oldest stranger is none of ours. A stranger becomes known
when `serve` says so; one that has not after `HELLO_S` is cut off. The handshake of TLS counts as being a stranger.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from ..errors import RunError
from .bounds import HELLO_S, STRANGERS
from .channel import shut
from .tls import Identity, TlsSocket

_TICK_S = 0.2
Connection = socket.socket | TlsSocket
Serve = Callable[[Connection, Callable[[], None]], None]
"""Serves a connection; the second argument is called when the other side has shown who it is."""


class Acceptor:
    """Accepts from `listener` in a thread of its own, or of whoever calls `run`, until `close`."""

    def __init__(
        self,
        listener: socket.socket,
        serve: Serve,
        log: Callable[[str], None],
        *,
        identity: Identity | None = None,
        tick: Callable[[], None] = lambda: None,
        stop: threading.Event | None = None,
    ) -> None:
        """With an `identity` each connection is TLS. `tick` is called five times a second while nobody comes; `stop` ends
        accepting as `close` does."""
        self._listener, self._serve, self._log = listener, serve, log
        self._identity, self._tick = identity, tick
        self._strangers: dict[socket.socket, float] = {}
        self._guard = threading.Lock()
        self._closed = stop or threading.Event()

    def start(self) -> None:
        """Accepts from now on, beside the caller."""
        threading.Thread(target=self.run, name="unbroken-accept", daemon=True).start()

    def close(self) -> None:
        """Accepts no more; whoever is being served stays."""
        self._closed.set()

    def run(self) -> None:
        """Accepts until `close`."""
        self._listener.settimeout(_TICK_S)
        while not self._closed.is_set():
            self._end_strangers()
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                self._tick()
                continue
            except OSError as e:  # no descriptors left, or a connection that ended while it waited
                self._log(f"a connection could not be accepted: {e.strerror}")
                self._closed.wait(0.1)
                continue
            sock.settimeout(None)
            with self._guard:
                self._strangers[sock] = time.monotonic()
            threading.Thread(target=self._serve_one, args=(sock,), daemon=True).start()

    def _end_strangers(self) -> None:
        """Cuts off those that do not say who they are, and the oldest of them where they are too many."""
        now = time.monotonic()
        with self._guard:
            excess = len(self._strangers) - STRANGERS
            for i, (sock, since) in enumerate(self._strangers.items()):
                if i < excess or now - since > HELLO_S:
                    shut(sock)

    def _serve_one(self, sock: socket.socket) -> None:
        def known() -> None:
            with self._guard:
                self._strangers.pop(sock, None)

        try:
            connection: Connection = sock
            if self._identity is not None:
                connection = TlsSocket(sock, self._identity, server=True, within_s=HELLO_S)
            self._serve(connection, known)
        except (OSError, RunError) as e:
            self._log(f"a connection ended before it had shown who it is: {e}"[:300])
        finally:
            known()
            with contextlib.suppress(OSError):
                sock.close()
