"""What the processes of a run know and nobody else: its token, and off one machine its certificate with the key.

It comes to an agent on its standard input, and stays in memory there.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..errors import RunError
from .tls import Identity, unnamed

_MOST = 1 << 16


@dataclass(frozen=True)
class Secret:
    """`identity` is None where all of the run is on one machine."""

    token: str = field(repr=False)
    identity: Identity | None = field(default=None, repr=False)

    def as_bytes(self) -> bytes:
        """As it is handed to a process that is started."""
        value = {"token": self.token}
        if self.identity is not None:
            value["identity"] = self.identity.pem
        return json.dumps(value).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Secret | None:
        """Reads `as_bytes`, or a token alone; None where nothing was handed over. Raises RunError for anything else."""
        if not data.strip():
            return None
        if not data.startswith(b"{"):
            return cls(data.decode(errors="replace").strip())
        try:
            value = json.loads(data)
            token, pem = value["token"], value.get("identity")
            if not isinstance(token, str) or not isinstance(pem, str | None):
                raise TypeError("of another kind")
        except (ValueError, KeyError, TypeError, AttributeError):
            # What it is stays unsaid: this text goes into a log.
            raise RunError("what came on standard input is no secret of a run") from None
        return cls(token, None if pem is None else Identity.from_pem(pem, "standard input"))


def take_from_input() -> Secret | None:
    """The secret on standard input, which is closed then: no process that is started later finds it there. Raises RunError."""
    data = b""
    while len(data) < _MOST and (piece := os.read(0, _MOST)):
        data += piece
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return Secret.from_bytes(data)


@contextlib.contextmanager
def as_input(secret: bytes) -> Iterator[int]:
    """A descriptor to read these bytes from, which have no name anywhere; nothing to read where there are none."""
    if not secret:
        yield subprocess.DEVNULL
        return
    with unnamed(secret) as fd:
        yield fd
