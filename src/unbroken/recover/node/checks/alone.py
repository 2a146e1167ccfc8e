"""One agent a node: two that are told the same would each end what the other has started."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from ....errors import RunError

_WAIT_S = 10.0
_held: list[int] = []
"""Kept open for as long as this process lives; no child has it."""


def claim_node(scratch: Path, node: str, within_s: float = _WAIT_S) -> None:
    """Makes this process the node's agent. Raises RunError where another one is that, and does not end in time."""
    fd = os.open(scratch / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + within_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _held.append(fd)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(fd)
                raise RunError(f"another agent of {node} runs here", where=str(scratch)) from None
            time.sleep(0.05)
