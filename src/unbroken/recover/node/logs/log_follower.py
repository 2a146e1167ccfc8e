"""Follows what a rank prints, for its steps, a bounded piece at a time: a log that floods holds nobody up."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from ....detect.logstep import StepPattern
from ....progress import StepRecord

_PIECE = 256 << 10
"""Bytes read at a time: twenty times a second that is 5 MiB/s, far above what a person would print."""
_BEHIND_MAX = 4 << 20
"""Further behind than this, what lies between is left out: the newest step is what counts."""
_WITHIN_S = 0.02
_LINE_MAX = 4096
_WORDS = (b"step", b"iter", b"num_updates", b"batch", b"it/s", b"s/it")
_IT = re.compile(rb"\bit\b")
"""Lines without any of these words tell no step; looked for in the whole piece at once, which is far faster. The last
is a part of so many words that it is looked for in small pieces only: what a person would print."""
_SMALL = 32 << 10
_CHECK_EVERY = 32


class LogFollower:
    """One rank's log, read from where it was left. Costs at most `_WITHIN_S` a call."""

    def __init__(self, path: Path, *, enabled: bool = True) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  followed until the rank is gone
        self._pattern = StepPattern() if enabled else None
        self._rest = b""
        self.count = 0
        """Steps read so far."""
        self.left_out = 0
        """Bytes passed over."""

    @property
    def learnt(self) -> bool:
        """Whether this log prints steps that advance."""
        return self._pattern is not None and self._pattern.learnt

    def poll(self, now: float) -> list[StepRecord]:
        """The steps in the next piece; `now` (seconds) becomes their time."""
        return self._take(now, _BEHIND_MAX)

    def finish(self, now: float) -> list[StepRecord]:
        """The steps in the last piece, once the rank is gone: what lies before is left out."""
        return self._take(now, _PIECE)

    def _take(self, now: float, behind_max: int) -> list[StepRecord]:
        pattern = self._pattern
        if pattern is None:
            return []
        at, size = self._file.tell(), os.fstat(self._file.fileno()).st_size
        if size - at > behind_max:
            self.left_out += size - _PIECE - at
            self._file.seek(size - _PIECE)
            self._rest = b""
        piece = self._file.read(_PIECE)
        if not piece:
            return []
        text = (self._rest + piece).replace(b"\r", b"\n")
        end = text.rfind(b"\n") + 1
        text, self._rest = text[:end], text[end:][-65536:]
        records, until = [], time.monotonic() + _WITHIN_S
        for n, (start, stop) in enumerate(_lines_that_may_tell(text)):
            record = pattern.feed(text[start:stop][-_LINE_MAX:].decode(errors="replace"), now)
            if record is not None:
                self.count += 1
                records.append(record)
            if n % _CHECK_EVERY == _CHECK_EVERY - 1 and time.monotonic() > until:
                self.left_out += len(text) - stop
                break
        return records

    def close(self) -> None:
        self._file.close()


def _lines_that_may_tell(text: bytes) -> Iterator[tuple[int, int]]:
    """(start, end) of each line with a word that may tell a step, in order."""
    lowered = text.lower()
    small = len(text) <= _SMALL
    next_at = {word: lowered.find(word) for word in _WORDS}
    at = 0
    while True:
        for word, found in next_at.items():
            if 0 <= found < at:
                next_at[word] = lowered.find(word, at)
        hits = [found for found in next_at.values() if found >= 0]
        if small and (it := _IT.search(lowered, at)) is not None:
            hits.append(it.start())
        if not hits:
            return
        first = min(hits)
        start, stop = text.rfind(b"\n", 0, first) + 1, text.find(b"\n", first)
        yield start, stop
        at = stop + 1
