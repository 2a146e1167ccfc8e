"""Who wrote a line: the ranks, nodes and error codes that it names, and whether its logger rates it below an error."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_WRITER = (
    (b"ank", re.compile(rb"ank[ =:_\[]{0,2}\d+")),
    (b"node", re.compile(rb"node[-_ ]?\d+")),
    (b"Xid (", re.compile(rb"Xid \(PCI:[^)]{0,20}\): \d+")),
)
_TASK = re.compile(rb"\s{0,5}\d{1,6}: ")
_TASKS = re.compile(rb"\n {0,5}\d{1,6}: ")
PLAIN = b"!"
_LOW = (b"INFO", b"WARN", b"DEBUG")


def writers_of(row: bytes) -> set[bytes]:
    """The ranks, nodes and error codes that a line names; those of a line that its logger does not rate below an
    error are marked, because what a rank warned of before says nothing of what it fails with."""
    return named(row) if is_low(row) else {PLAIN + w for w in named(row)}


def named(text: bytes) -> set[bytes]:
    """The ranks, nodes and error codes that some lines name; one nameless writer where they name none."""
    found = set[bytes]().union(*(pattern.findall(text) for word, pattern in _WRITER if word in text))
    if _TASK.match(text):
        found.update(w.strip() for w in _TASKS.findall(b"\n" + text))
    return found or {b""}


def is_low(row: bytes) -> bool:
    return any(w in row for w in _LOW)


def _line_without(words: Sequence[bytes]) -> Callable[[bytes], object]:
    """A search for a line, not blank, with none of `words` in it. The first letter of a word may stand nowhere else in
    any of them: then such a line is text without first letters, with beginnings of words that do not go on."""
    try:
        import re2
    except ImportError:
        return lambda text: True
    first = "".join(w[:1].decode() for w in words)
    starts = []
    for word in (w.decode() for w in words):
        starts += [f"{word[:n]}(?:[^{first}{word[n]}\\n][^{first}\\n]*)?" for n in range(1, len(word))]
    begun = f"(?:{'|'.join(starts)})"
    text = f"(?:[^{first}\\n]+{begun}*|{begun}+)"
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    return re2.compile(f"(?m)^{text}$".encode(), options).search  # type: ignore[no-any-return]


_LINE_WITHOUT_LOW = _line_without(_LOW)


def has_plain(chunk: bytes) -> bool:
    """Whether a line, not blank, has none of the words with which loggers rate it below an error."""
    return _LINE_WITHOUT_LOW(chunk) is not None
