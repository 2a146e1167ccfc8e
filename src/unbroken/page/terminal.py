"""Text of others on a terminal: what could move the cursor, set a title, hide or reverse text is shown or dropped.

Log lines, users, partitions, suites, folders: each may hold whatever its author liked. One filter, put around both
streams of every command by `cli/main`, lets through text, line ends and tabs; on a terminal also colours that can hide
nothing. Screens of ours that move the cursor write to `own(stream)` and clean what they show with `plain`. Pages use
`escape` and `script_json`.
"""

from __future__ import annotations

import html
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]?"  # CSI: colours, cursor
    r"|\x1b[\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # OSC, DCS, SOS, PM, APC: titles, clipboard, links
    r"|\x1b[ -/]*[0-~]?"
    r"|\x9b[0-?]*[ -/]*[@-~]?|[\x90\x98\x9d\x9e\x9f][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
)
"""Terminal sequences, whole or cut off."""
BIDI = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
INVISIBLE = re.compile(
    f"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180e\u200b-\u200d\u2028\u2029"
    f"\u2060-\u2065\u206a-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffb{BIDI}\U000e0000-\U000e0fff]"
)
"""Control characters but tab and line ends, and characters without a width or that turn the text round."""
_COLOUR = re.compile(r"\x1b\[(?:(?:[0-4]|2[2-4]|3[1-69]|9[1-6])(?:;(?:[0-4]|2[2-4]|3[1-69]|9[1-6]))*)?m")
"""Bold, dim, italic, underlined and the colours that show on any ground; not hidden, reversed, white or a ground."""
_ANY = re.compile(f"{SEQUENCE.pattern}|{INVISIBLE.pattern}|\r(?!\n)")
_RESET = "\x1b[0m"


def plain(text: str) -> str:
    """The text as one line without sequences, control, zero-width and direction characters."""
    return " ".join(_ANY.sub("", text).splitlines()) if _ANY.search(text) or "\n" in text else text


def visible(text: str) -> str:
    """The text without sequences, control, zero-width and direction characters; tabs and line ends stay."""
    return _ANY.sub("", text)


def escape(text: str, quote: bool = True) -> str:
    """The text as HTML shows it and nothing else: markup quoted, direction and control characters gone."""
    return html.escape(_ANY.sub("", text), quote=quote)


def script_json(value: Any, **options: Any) -> str:
    """A value as JSON for a script element: no `<`, and no character in a text that `escape` would drop."""
    return json.dumps(_without(value), separators=(",", ":"), **options).replace("<", "\\u003c")


def _without(value: Any) -> Any:
    if isinstance(value, str):
        return _ANY.sub("", value)
    if isinstance(value, dict):
        return {_without(k): _without(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without(v) for v in value]
    return value


class Filtered:
    """A text stream that drops what could act on a terminal; everything else is the stream's own."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._colours = bool(getattr(stream, "isatty", lambda: False)())
        self._open = False

    def write(self, text: str) -> int:
        """Writes what may be seen of a text; returns the length of the whole, as if all were written."""
        if not isinstance(text, str):
            raise TypeError(f"write() takes a text, not {type(text).__name__}")
        if self._open or _ANY.search(text):
            self.stream.write(self._clean(text))
        else:
            self.stream.write(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Writes each."""
        for line in lines:
            self.write(line)

    @property
    def buffer(self) -> Any:
        """The bytes below: as they are in a file or pipe, which must get a log unchanged; filtered on a terminal."""
        return _FilteredBytes(self) if self._colours else self.stream.buffer

    def _clean(self, text: str) -> str:
        if not self._colours:
            return _ANY.sub("", text)
        text = _ANY.sub(lambda m: m.group(0) if _COLOUR.fullmatch(m.group(0)) else "", text)
        out = []
        for line in text.splitlines(keepends=True):
            colours = _COLOUR.findall(line)
            self._open = (
                self._open if not colours else colours[-1] not in (_RESET, "\x1b[m", "\x1b[39m", "\x1b[22m")
            )
            if self._open and line.endswith("\n"):  # no line colours the next one
                line, self._open = line.rstrip("\r\n") + _RESET + "\n", False
            out.append(line)
        return "".join(out)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.stream)


class _FilteredBytes:
    def __init__(self, text: Filtered) -> None:
        self._text = text

    def write(self, data: bytes) -> int:
        self._text.write(bytes(data).decode("utf-8", "replace"))
        return len(data)

    def flush(self) -> None:
        self._text.flush()


def own(stream: Any) -> Any:
    """The stream below the filter, for a screen of ours that moves the cursor and cleans what it shows itself."""
    return stream.stream if isinstance(stream, Filtered) else stream


@contextmanager
def filtered() -> Iterator[None]:
    """Both streams of the process filtered, until it is left."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (s if isinstance(s, Filtered) or s is None else Filtered(s) for s in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
