"""Where agents come in: a Unix socket where all nodes are this machine, else a port with TLS."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Protocol

from ....link.address import Address, check_socket
from ....link.bounds import Malformed
from ....link.listener import Listener
from ....link.tls import Identity
from ....private import private_folder
from ....progress import Term
from ...wire import list_doors


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


def wide_door(identity: Identity, host: str, before: Address | None) -> Listen:
    """A port on all addresses of this machine, which others reach as `host`: one of those that the run's agents know, where
    its first supervisor here listened at `before`. Raises OSError."""

    def listen(serve: Serve) -> Door:
        for port in [] if before is None else [door.port for door in list_doors(before)]:
            with contextlib.suppress(OSError):  # another one's, or that of a supervisor that lives
                return Listener(serve, "0.0.0.0", identity=identity, name=host, port=port)
        return Listener(serve, "0.0.0.0", identity=identity, name=host)

    return listen


def find_first_door(terms: Iterable[Term], host: str) -> Address | None:
    """Where the run's first supervisor on this host listened; None where there was none."""
    for term in terms:
        with contextlib.suppress(Malformed):
            if (address := Address.parse(term.address)).kind == "tls" and address.host == host:
                return address
    return None
