"""What the keeper's socket shares with whoever connects: a version, and a `link.channel.Channel`."""

from __future__ import annotations

from ...link.address import Address, check_socket
from ...link.address import connect as _connect
from ...link.bounds import Message
from ...link.channel import MAX_MESSAGE_BYTES, Channel, Closed
from ...link.framing import Encoded

__all__ = [
    "MAX_MESSAGE_BYTES",
    "PROTOCOL",
    "VERSION",
    "Channel",
    "Closed",
    "Encoded",
    "Message",
    "check_socket",
    "connect",
]

VERSION = 1
PROTOCOL = 2
"""What is understood within that version: 2 takes ranks as runs, candidates as rows, and gives inventories as rows."""


def connect(path: str, timeout_s: float) -> Channel:
    """A channel to the keeper that listens on this Unix socket. Raises Closed."""
    try:
        return Channel(_connect(Address("unix", path), None, within_s=timeout_s), descriptors=True)
    except OSError as e:
        raise Closed(f"no keeper answers on {path}: {e}") from e
