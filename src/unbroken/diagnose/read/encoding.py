"""Logs in UTF-16 or UTF-32 (PowerShell's `>`, Windows services) as UTF-8, line for line; byte order marks are dropped."""

from __future__ import annotations

import codecs
from typing import IO, Protocol

_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
    (codecs.BOM_UTF8, "utf-8"),
)


class Readable(Protocol):
    """What gives bytes."""

    def read(self, size: int = -1, /) -> bytes: ...


def encoding_of(head: bytes) -> tuple[str | None, int]:
    """The encoding that a file's first bytes tell, and the length of its mark; (None, 0) for UTF-8 and its kin."""
    for mark, name in _MARKS:
        if head.startswith(mark):
            return (None if name == "utf-8" else name), len(mark)
    pairs = len(head) // 2
    if pairs >= 8:
        # Without a mark every second byte of mostly Latin text is NUL.
        if head[1::2].count(0) > 0.7 * pairs and head[::2].count(0) < 0.1 * pairs:
            return "utf-16-le", 0
        if head[::2].count(0) > 0.7 * pairs and head[1::2].count(0) < 0.1 * pairs:
            return "utf-16-be", 0
    return None, 0


class Utf8:
    """A stream's bytes as UTF-8 whatever it is written in. What is damaged becomes a replacement character."""

    def __init__(self, stream: IO[bytes] | Readable) -> None:
        self._stream = stream
        self._decoder: codecs.IncrementalDecoder | None = None
        self._started = False

    def read(self, size: int = -1, /) -> bytes:
        """About `size` bytes; empty only at the end."""
        if not self._started:
            first = self._stream.read(max(size, 4096) if size >= 0 else -1)
            name, mark = encoding_of(first[:4096])
            self._decoder = codecs.getincrementaldecoder(name)("replace") if name else None
            self._started = True
            data = first[mark:]
            if not data and first:
                data = self._stream.read(size)
        else:
            data = self._stream.read(size)
        if self._decoder is not None:
            while data:
                out = self._decoder.decode(data).encode("utf-8", "replace")
                if out:
                    return out
                data = self._stream.read(size)
            return self._decoder.decode(b"", final=True).encode("utf-8", "replace")
        # A part in UTF-16 behind one in UTF-8 (two shells, one file) is text between NULs; a hole is only NULs.
        while b"\0" in data:
            kept = data.replace(b"\0", b"")
            if kept:
                return kept
            data = self._stream.read(size)
        return data
