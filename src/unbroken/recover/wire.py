"""What supervisor and agents share of their link: it is `link.calls.Link`, and its token lies in the run directory."""

from __future__ import annotations

from ..link.address import Address
from ..link.bounds import Malformed, Message
from ..link.calls import Link, LinkClosed
from ..private import read_secret
from ..progress import RunDir

__all__ = ["DOORS", "LOG_BYTES", "Link", "LinkClosed", "Message", "is_door", "list_doors", "read_token"]

DOORS = 8
"""Off one machine a run's supervisors listen at one of so many ports, from that of the first one on: where nobody but the
supervisor's host has the run's record, agents find a successor there."""
LOG_BYTES = 256 << 10
"""Of logs in one message, before they are packed."""


def read_token(run_dir: RunDir) -> str:
    """The run's token. Raises UnsafeFile if others may read or change it, OSError as the system gives it."""
    return read_secret(run_dir.token).decode(errors="replace").strip()


def list_doors(first: Address) -> list[Address]:
    """Where a supervisor of the run may listen, if its first one listened here."""
    return [Address(first.kind, first.host, p) for p in range(first.port, min(first.port + DOORS, 1 << 16))]


def is_door(address: object, first: Address) -> bool:
    """Whether the address of a term is one of them."""
    try:
        return Address.parse(address) in list_doors(first)
    except Malformed:
        return False
