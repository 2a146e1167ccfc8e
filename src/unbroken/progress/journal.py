"""The journal: one append-only file per term, one checked JSON record a line. It is the truth about a run.

How a line proves itself whole: `journal/lines.py`. One that does not check is never believed: at the end of a file it is
a torn write, elsewhere it is counted and shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..atomic import fsync_folder
from ..journal import lines
from .rundir import RunDir
from .terms import Term, read_terms


class JournalWriter:
    """Appends to the journal of one term; each record is on disk when `append` returns."""

    slow = False
    """An append takes no longer than a disk."""

    def __init__(self, run_dir: RunDir, term: int, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since the Unix epoch."""
        self._clock = clock
        self.path = run_dir.journal(term)
        self.term = term
        self._file = lines.Appender(self.path)
        fsync_folder(self.path.parent)
        self._number = 0

    def append(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Writes one record and fsyncs it; returns it with its time `t` (seconds since the epoch, UTC).

        Raises OSError when the disk is full: the caller must not act on what was not written.
        """
        self._number += 1
        record = {
            "kind": kind,
            "t": round(self._clock(), 6),
            "n": self._number,
            "epoch": self.term,
            **fields,
        }
        self._file.append(record, durable=True)
        return record

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class JournalText:
    """All records that count, oldest first; `damaged` counts lines that do not check inside what counts."""

    records: list[dict[str, Any]] = field(default_factory=list)
    damaged: int = 0


def read_journal(run_dir: RunDir) -> JournalText:
    """Every record that counts, over all terms.

    What a term wrote counts up to the offset that its successor sealed; the newest term counts whole.
    """
    records: list[dict[str, Any]] = []
    damaged = 0
    terms = read_terms(run_dir)
    for i, term in enumerate(terms):
        successor = terms[i + 1] if i + 1 < len(terms) else None
        limit = successor.sealed.get(str(term.number)) if successor else None
        for line in _whole_lines(run_dir, term.number, limit):
            if line.record is None:
                damaged += 1
            else:
                records.append(line.record)
    return JournalText(records, damaged)


def sealable(run_dir: RunDir, terms: list[Term]) -> dict[str, int]:
    """The offset up to which each earlier term's journal counts: the end of its last line that checks."""
    offsets = dict(terms[-1].sealed) if terms else {}
    for term in terms[-1:]:
        end = 0
        for line in _whole_lines(run_dir, term.number):
            if line.record is not None:
                end = line.end
        offsets[str(term.number)] = end
    return offsets


def _whole_lines(run_dir: RunDir, number: int, limit: int | None = None) -> Iterator[lines.JournalLine]:
    """The lines of one term up to `limit`; a torn last one is left out."""
    return (line for line in lines.read(run_dir.journal(number), limit) if not line.torn)
