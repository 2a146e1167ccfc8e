"""Where agents come in: a Unix socket where all nodes are this machine, else a port with TLS."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from ....link.address import Address, check_socket
from ....link.listener import Listener
from ....link.tls import Identity
from ....private import private_folder


class Door(Protocol):
    """What listens: `link.listener.Listener`, or a fake cluster's network."""

    address: Address

    def known(self, writer: asyncio.StreamWriter) -> None: ...
    def close(self) -> None: ...


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Listen = Callable[[Serve], Door]


def local_door(folder: Path) -> Listen:
    """A Unix socket in a folder of this user's alone, with a name of its own: an earlier supervisor may live. Raises
    UsageError for a path that is too long, UnsafeFile, OSError."""

    def listen(serve: Serve) -> Door:
        path = private_folder(folder) / f"supervisor-{secrets.token_hex(4)}.sock"
        check_socket(path, "TMPDIR", "the supervisor's socket")
        return Listener(serve, path)

    return listen


def wide_door(identity: Identity, host: str) -> Listen:
    """A port on all addresses of this machine, which others reach as `host`. Raises OSError."""
    return lambda serve: Listener(serve, "0.0.0.0", identity=identity, name=host)
