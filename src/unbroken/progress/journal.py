"""The journal: one append-only file per term, one checked JSON record a line. It is the truth about a run.

A line is `{"sum":"<16 hex digits>",` followed by the rest of the record's JSON; the sum is xxh3_64 of
`{` plus that rest. A line that does not check is never believed: at the end of a file it is a torn write,
elsewhere it is counted and shown.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from ..atomic import fsync_folder
from .epochs import Term, read_terms
from .rundir import RunDir

_PREFIX = len('{"sum":"0123456789abcdef",')


def encode(record: dict[str, Any]) -> bytes:
    """One journal line, with its checksum and newline."""
    body = json.dumps(record, separators=(",", ":"), sort_keys=True)
    return f'{{"sum":"{xxhash.xxh3_64_hexdigest(body.encode())}",{body[1:]}\n'.encode()


def decode(line: bytes) -> dict[str, Any] | None:
    """The record of one line, or None where it does not check."""
    if not line.endswith(b"\n") or line[:8] != b'{"sum":"' or line[24:_PREFIX] != b'",':
        return None
    body = b"{" + line[_PREFIX:-1]
    if xxhash.xxh3_64_hexdigest(body).encode() != line[8:24]:
        return None
    record: dict[str, Any] = json.loads(body)
    return record


class JournalWriter:
    """Appends to the journal of one term; each record is on disk when `append` returns."""

    def __init__(self, run_dir: RunDir, term: int, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since the Unix epoch."""
        self._clock = clock
        self.path = run_dir.journal(term)
        self.term = term
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
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
        data = encode(record)
        start = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, data)
            if written != len(data):
                raise OSError(28, "No space left on device", str(self.path))
            os.fsync(self._fd)
        except OSError:
            # A half-written line would spoil the next one: cut it off again.
            os.ftruncate(self._fd, start)
            raise
        return record

    def close(self) -> None:
        os.close(self._fd)


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
        for _, record in _lines(run_dir.journal(term.number), limit):
            if record is None:
                damaged += 1
            else:
                records.append(record)
    return JournalText(records, damaged)


def sealable(run_dir: RunDir, terms: list[Term]) -> dict[str, int]:
    """The offset up to which each earlier term's journal counts: the end of its last line that checks."""
    offsets = dict(terms[-1].sealed) if terms else {}
    for term in terms[-1:]:
        end = 0
        for stop, record in _lines(run_dir.journal(term.number), None):
            if record is not None:
                end = stop
        offsets[str(term.number)] = end
    return offsets


def _lines(path: Path, limit: int | None) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(end offset, record or None) of each line up to `limit`; a torn last line is left out."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    if limit is not None:
        data = data[:limit]
    end = 0
    for line in data.splitlines(keepends=True):
        end += len(line)
        if not line.endswith(b"\n"):
            return
        yield end, decode(line)
