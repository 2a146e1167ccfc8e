"""Who speaks to a keeper, what it is started with, and how it answers."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import CheckpointError, UnbrokenError
from ...link.bounds import Malformed
from ...link.tls import Identity
from .wire import Channel, Closed, Message

ORPHAN_GRACE_S = 60.0
TERM_GRACE_S = 25.0
ROOM_S = 600.0


class OperationRefused(CheckpointError):
    """The keeper does not do what was asked; the text goes back to whoever asked."""


class NotYet(OperationRefused):
    """A rank is here before the agent announced its attempt."""


@dataclass(frozen=True)
class KeeperSettings:
    """What a keeper is started with."""

    socket: Path
    node: str
    run_id: str
    checkpoints: str
    budget: int
    keep: int = 3
    keep_every: int = 0
    orphan_grace_s: float = ORPHAN_GRACE_S
    lease_s: float | None = None
    """The lease to start with; None: no lease is needed until an agent gives one."""
    writers: int = 2
    term_grace_s: float = TERM_GRACE_S
    room_s: float = ROOM_S
    """How long the last snapshot waits for a storage that refuses, where nobody says how long."""
    elsewhere: str = ""
    """Where the last snapshot is written if the storage refuses it even then; "" for nowhere."""
    identity: Identity | None = field(default=None, repr=False)
    """The run's certificate, for peers on other machines, where an agent gave it."""


@dataclass(eq=False)
class Client:
    """One connection."""

    channel: Channel
    known: Callable[[], None] = lambda: None
    """Called when it has said who it is."""
    role: str = ""
    rank: int = -1
    attempt: int = 0
    held: set[int] = field(default_factory=set)
    """Buffers that this rank reads (restore): pinned until it lets go or is gone."""
    left: bool = False
    """It said goodbye: its going is no failure."""
    since: float = field(default_factory=time.monotonic)
    """Monotonic time of its connection."""
    slow: int = 0
    """Its long requests that are being answered."""


@dataclass(eq=False)
class Wait:
    """A rank that waits for a buffer."""

    client: Client
    id: int
    size: int


def check(message: Message) -> None:
    """Raises Malformed where a number is none that a request can mean (NaN, infinite, beyond 64 bits)."""
    for key, value in message.items():
        if type(value) in (int, float) and not -(1 << 62) < value < 1 << 62:
            raise Malformed(f"'{key}' is {value!r:.40}")


def reply(client: Client, number: object, answer: Message, fds: list[int] | None = None) -> None:
    """Answers a request; a client that is gone meanwhile is no error."""
    tell(client, {"id": number, **answer}, fds)


def tell(client: Client, message: Message, fds: list[int] | None = None) -> None:
    """Sends a message; a client that does not take it is cut off."""
    try:
        client.channel.send(message, fds or [])
    except Closed:
        with contextlib.suppress(OSError):
            client.channel.sock.shutdown(socket.SHUT_RDWR)


def refusal(e: UnbrokenError) -> Message:
    return {"ok": False, "what": e.message, "where": e.where, "todo": e.hint, "kind": type(e).__name__}


def log(text: str) -> None:
    """One line to the keeper's log."""
    print(f"{time.strftime('%H:%M:%S')} keeper {os.getpid()}: {text}", file=sys.stderr, flush=True)
