"""Epochs: who supervises a run. A supervisor claims the next number by creating its file exclusively."""

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

SCHEMA = 1
_NAME = re.compile(r"(\d{6,})\.json")


@dataclass(frozen=True)
class Term:
    """One supervisor's reign. `address` is where its agents reach it; `sealed` maps each earlier epoch to the
    number of bytes of its journal that count."""

    number: int
    run_id: str
    host: str
    pid: int
    pid_started: float
    address: tuple[str, int]
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


def read_terms(run_dir: RunDir) -> list[Term]:
    """The epochs so far, oldest first. Raises ContractError on a file of a newer version."""
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
                    f"the epoch file has schema {schema}, this version knows {SCHEMA}",
                    where=str(path),
                    hint="Use the version of unbroken that wrote it, or a newer one",
                )
            value["address"] = tuple(value["address"])
            terms.append(Term(**value))
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ContractError(f"epoch {number} cannot be read: {e}", where=str(path)) from e
    return terms


def newest_term(run_dir: RunDir) -> int:
    """The highest epoch's number, 0 where there is none; reads names only."""
    try:
        names = os.listdir(run_dir.terms)
    except FileNotFoundError:
        return 0
    return max((int(m[1]) for n in names if (m := _NAME.fullmatch(n))), default=0)


def claim(
    run_dir: RunDir, number: int, *, run_id: str, address: tuple[str, int], sealed: dict[str, int]
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
    data = json.dumps({"schema": SCHEMA, **asdict(term)}, indent=1).encode()
    return term if atomic.create_exclusive(run_dir.term(number), data) else None
