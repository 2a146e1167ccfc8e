"""Terms: who supervises a run. A supervisor claims the next number by creating its file exclusively."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from .. import atomic
from ..errors import ContractError
from .rundir import RunDir

SCHEMA = 2
"""2: `address` is one text, such as unix:/path or tls:host:port; 1: the host and port of a plain connection."""
_NAME = re.compile(r"(\d{6,})\.json")


@dataclass(frozen=True)
class Term:
    """One supervisor's term. `address` is where its agents reach it (a host and a port, of an earlier version); `sealed`
    maps each earlier term to the number of bytes of its journal that count."""

    number: int
    run_id: str
    host: str
    pid: int
    pid_started: float
    address: str | tuple[str, int]
    claimed: float
    sealed: dict[str, int] = field(default_factory=dict)

    def supervisor_is_gone(self) -> bool:
        """Whether its process is provably gone: same host, and no process of that pid and start time."""
        if self.host != socket.gethostname():
            return False
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.pid_started) < 1.0
            return not same or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def supervisor_runs_here(self) -> bool:
        """Whether its process is on this host, and neither ended nor stopped by a signal."""
        if self.host != socket.gethostname() or self.supervisor_is_gone():
            return False
        try:
            return bool(psutil.Process(self.pid).status() != psutil.STATUS_STOPPED)
        except psutil.NoSuchProcess:
            return False

    def encode(self) -> bytes:
        """As it is written down."""
        schema = SCHEMA if isinstance(self.address, str) else 1
        return json.dumps({"schema": schema, **asdict(self)}, indent=1).encode()

    @classmethod
    def decode(cls, data: bytes, number: int, where: str) -> Term:
        """Reads `encode`. Raises ContractError, also for one of a newer version."""
        try:
            value: dict[str, Any] = json.loads(data)
            schema = value.pop("schema")
            if schema > SCHEMA:
                raise ContractError(
                    f"the term's file has schema {schema}, this version knows {SCHEMA}",
                    where=where,
                    hint="Use the version of unbroken that wrote it, or a newer one",
                )
            if not isinstance(value["address"], str):
                host, port = value["address"]
                value["address"] = (host, port)
            return cls(**value)
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ContractError(f"epoch {number} cannot be read: {e}", where=where) from e

    @classmethod
    def mine(
        cls, number: int, *, run_id: str, address: str | tuple[str, int], sealed: dict[str, int]
    ) -> Term:
        """One of this process."""
        me = psutil.Process()
        return cls(
            number, run_id, socket.gethostname(), me.pid, me.create_time(), address, time.time(), sealed
        )


def term_number(name: str) -> int | None:
    """The number in a file's name, None where it is no term's."""
    return int(m[1]) if (m := _NAME.fullmatch(name)) else None


def read_terms(run_dir: RunDir) -> list[Term]:
    """The terms so far, oldest first. Raises ContractError on a file of a newer version."""
    if not run_dir.terms.is_dir():
        return []
    found = [(n, path) for path in run_dir.terms.iterdir() if (n := term_number(path.name)) is not None]
    return [Term.decode(path.read_bytes(), number, str(path)) for number, path in sorted(found)]


def newest_term(run_dir: RunDir) -> int:
    """The highest term's number, 0 where there is none; reads names only."""
    try:
        names = os.listdir(run_dir.terms)
    except FileNotFoundError:
        return 0
    return max((n for name in names if (n := term_number(name)) is not None), default=0)


def claim(
    run_dir: RunDir, number: int, *, run_id: str, address: str | tuple[str, int], sealed: dict[str, int]
) -> Term | None:
    """Claims epoch `number` and returns it, or None if somebody else was first."""
    term = Term.mine(number, run_id=run_id, address=address, sealed=sealed)
    return term if atomic.create_exclusive(run_dir.term(number), term.encode()) else None
