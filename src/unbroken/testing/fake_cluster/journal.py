"""A journal in memory, with the same `append` as the one on disk, and a disk that can be full."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any


class MemoryJournal:
    """The records of one term. While `refuses` is set, `append` raises OSError and writes nothing, as a full disk does.

    `clock` gives the time `t` of each record."""

    slow = False

    def __init__(self, clock: Callable[[], float], term: int = 1) -> None:
        self.term, self.records = term, list[dict[str, Any]]()
        self.refuses = False
        self._clock = clock

    def append(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Adds one record and returns it. Raises OSError while the disk is full."""
        if self.refuses:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        record = {
            "kind": kind, "t": round(self._clock(), 6), "n": len(self.records) + 1, "epoch": self.term, **fields,
        }  # fmt: skip
        self.records.append(record)
        return record

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The records of one kind, oldest first."""
        return [r for r in self.records if r["kind"] == kind]

    def close(self) -> None:
        """Nothing is held."""
