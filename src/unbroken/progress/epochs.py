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


def read_terms(run_dir: RunDir) -> list[Term]:
    """The terms so far, oldest first. Raises ContractError on a file of a newer version."""
    if not run_dir.terms.is_dir():
        return []
    found = []
    for path in run_dir.terms.iterdir():
        if m := _NAME.fullmatch(path.name):
            found.append((int(m[1]), path))
    terms = []
    for number, path in sorted(found):
        try:
            value: dict[str, Any] = json.loads(path.read_bytes())
            schema = value.pop("schema")
            if schema > SCHEMA:
                raise ContractError(
                    f"the term's file has schema {schema}, this version knows {SCHEMA}",
                    where=str(path),
                    hint="Use the version of unbroken that wrote it, or a newer one",
                )
            if not isinstance(value["address"], str):
                host, port = value["address"]
                value["address"] = (host, port)
            terms.append(Term(**value))
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ContractError(f"epoch {number} cannot be read: {e}", where=str(path)) from e
    return terms


def newest_term(run_dir: RunDir) -> int:
    """The highest term's number, 0 where there is none; reads names only."""
    try:
        names = os.listdir(run_dir.terms)
    except FileNotFoundError:
        return 0
    return max((int(m[1]) for n in names if (m := _NAME.fullmatch(n))), default=0)


def claim(
    run_dir: RunDir, number: int, *, run_id: str, address: str | tuple[str, int], sealed: dict[str, int]
) -> Term | None:
    """Claims epoch `number` and returns it, or None if somebody else was first."""
    me = psutil.Process()
    term = Term(
        number=number,
        run_id=run_id,
        host=socket.gethostname(),
        pid=me.pid,
        pid_started=me.create_time(),
        address=address,
        claimed=time.time(),
        sealed=sealed,
    )
    schema = SCHEMA if isinstance(address, str) else 1
    data = json.dumps({"schema": schema, **asdict(term)}, indent=1).encode()
    return term if atomic.create_exclusive(run_dir.term(number), data) else None
