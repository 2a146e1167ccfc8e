"""The port at which the ranks of an attempt meet: taken on the node where rank 0 listens, and kept for it until it does."""

from __future__ import annotations

import socket


class PortReservation:
    """Binds a port and does not listen on it: rank 0, which reuses addresses as every store of torch does, binds beside it,
    and nobody who asks the kernel for any free port is given this one meanwhile."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def take(self) -> int:
        """A port that is free on all addresses of this host; the one before is let go. Raises OSError."""
        self.release()
        try:
            self._socket = self._bind(socket.AF_INET6, "::")
        except OSError:  # a host without IPv6
            self._socket = self._bind(socket.AF_INET, "0.0.0.0")
        port: int = self._socket.getsockname()[1]
        return port

    def _bind(self, family: socket.AddressFamily, address: str) -> socket.socket:
        made = socket.socket(family, socket.SOCK_STREAM)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family is socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            made.bind((address, 0))
        except OSError:
            made.close()
            raise
        return made

    def release(self) -> None:
        """Lets it go; idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
