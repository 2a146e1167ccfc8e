"""What supervisor and agents share of their link: it is `link.calls.Link`, and its token lies in the run directory."""

from __future__ import annotations

from ..link.bounds import Message
from ..link.calls import Link, LinkClosed
from ..private import read_secret
from ..progress import RunDir

__all__ = ["Link", "LinkClosed", "Message", "read_token"]


def read_token(run_dir: RunDir) -> str:
    """The run's token. Raises UnsafeFile if others may read or change it, OSError as the system gives it."""
    return read_secret(run_dir.token).decode(errors="replace").strip()
