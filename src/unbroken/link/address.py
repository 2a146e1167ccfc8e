"""Where somebody listens: a Unix socket on one machine, TLS off it. There is nothing else to fall back to."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError
from .bounds import Malformed
from .tls import Identity, TlsSocket

SOCKET_PATH_MAX = 100
"""Bytes; a Unix socket's path may have 107."""
KINDS = ("unix", "tls")


@dataclass(frozen=True)
class Address:
    """`unix:/path/of/socket`, or `tls:host:port`."""

    kind: str
    host: str
    """The path, of a Unix socket."""
    port: int = 0

    def __str__(self) -> str:
        if self.kind == "unix":
            return f"unix:{self.host}"
        return (
            f"{self.kind}:[{self.host}]:{self.port}"
            if ":" in self.host
            else f"{self.kind}:{self.host}:{self.port}"
        )

    @property
    def name(self) -> str:
        """What a proof is bound to: what whoever connects called, and whoever listens knows of itself."""
        return self.host if self.kind == "unix" else str(self.port)

    @classmethod
    def unix(cls, path: Path) -> Address:
        return cls("unix", str(path))

    @classmethod
    def parse(cls, text: object) -> Address:
        """Reads `str(address)`. Raises Malformed, for a plain host and port too."""
        if isinstance(text, str) and len(text) <= 400 and text.isprintable():
            kind, _, rest = text.partition(":")
            if kind == "unix" and rest.startswith("/"):
                return cls(kind, rest)
            host, _, port = rest.rpartition(":")
            if kind == "tls" and host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16:
                return cls(kind, host.removeprefix("[").removesuffix("]"), int(port))
        raise Malformed(f"no address of a link: {str(text)!r:.80}")


def check_socket(path: Path, setting: str, what: str = "the keeper's socket") -> None:
    """Raises UsageError where a Unix socket cannot have this path; `setting` is what makes it shorter."""
    if (size := len(os.fsencode(path))) > SOCKET_PATH_MAX:
        raise UsageError(
            f"the path of {what} has {size} bytes, a Unix socket's may have {SOCKET_PATH_MAX}",
            where=str(path),
            hint=f"Set {setting} to a shorter folder on this machine, such as /tmp",
        )


def own_address(towards: str = "192.0.2.1") -> str:
    """This machine's address as others reach it who can be reached at `towards`; no packet is sent for that."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((towards, 9))
        return str(s.getsockname()[0])
    return socket.gethostname()


def listen_unix(path: Path, *, backlog: int = 64) -> socket.socket:
    """A Unix socket that only its owner can connect to, in place of one that a dead process left. Raises OSError."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(sock.fileno(), 0o600)  # the file has it from its first moment on
        sock.bind(str(path))
        os.chmod(path, 0o600)
        sock.listen(backlog)
    except OSError:
        sock.close()
        raise
    return sock


def connect(address: Address, identity: Identity | None, *, within_s: float) -> socket.socket | TlsSocket:
    """A connection without a time-out, after both sides have shown the run's certificate where it is TLS.

    Raises OSError (TimeoutError too), and ssl.SSLError, which is one, where the other side is not the run's.
    """
    if address.kind == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(within_s)
            sock.connect(address.host)
            sock.settimeout(None)
        except OSError:
            sock.close()
            raise
        return sock
    if identity is None:
        raise ConnectionRefusedError(f"{address} asks for a certificate, and there is none here")
    sock = socket.create_connection((address.host, address.port), timeout=within_s)
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return TlsSocket(sock, identity, server=False, within_s=within_s)
