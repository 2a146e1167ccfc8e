"""From a coordinator's cluster.json to a channel to it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from ....errors import EvaluationError, RunError
from ....link.address import Address
from ....link.address import connect as link_connect
from ....link.bounds import Message
from ....link.tls import Identity
from ....private import read_secret
from ..wire import WorkerChannel


def connect(cluster: Path | Message, *, within_s: float = 60.0) -> tuple[WorkerChannel, Message]:
    """A channel to the coordinator that wrote this file (or gave this), and what the file says.

    Raises EvaluationError after `within_s`.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            where = cluster if isinstance(cluster, dict) else _read_address(cluster)
            identity = Identity.from_pem(pem, "cluster.json") if (pem := where.get("identity")) else None
            return WorkerChannel(link_connect(Address.parse(where["address"]), identity, within_s=10)), where
        except (OSError, ValueError, RunError) as e:
            if time.monotonic() > deadline:
                raise EvaluationError(f"no coordinator answers: {e}", where=str(cluster),
                                      hint="Start `unbroken eval run` first, and check that its address can be reached from here") from e  # fmt: skip
            time.sleep(0.1)


def _read_address(cluster: Path) -> Message:
    """Raises ValueError for a file that names no coordinator (yet), UnsafeFile for one that others may have written."""
    _address(json.loads(cluster.read_bytes()))
    return _address(json.loads(read_secret(cluster)))


def _address(found: Any) -> Message:
    """What a cluster.json says, once it says all of it. Raises ValueError."""
    kinds = {"address": str, "token": str, "shared": str, "identity": str}
    if not isinstance(found, dict) or any(type(found.get(k)) is not kind for k, kind in kinds.items()):
        raise ValueError(f"the file does not say {', '.join(kinds)}")
    Address.parse(found["address"])
    return found
