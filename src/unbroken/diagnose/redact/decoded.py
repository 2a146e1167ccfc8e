"""Texts as another reader would see them: without escapes, percent signs, entities or base64, with the way back.

A credential that was percent-encoded, escaped as JSON, or cut by a colour code is still one. Each `DecodedText` is decoded
text together with the place in the original that every character came from, so that what is found in the view can be
replaced in the original.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...page.terminal import INVISIBLE, SEQUENCE


@dataclass(frozen=True)
class DecodedText:
    """A text, and for each of its characters (and its end) the place in the original; None where they are equal."""

    text: str
    starts: tuple[int, ...] | None = None

    def original(self, start: int, end: int) -> tuple[int, int]:
        """The piece of the original that a piece of the view stands for."""
        return (start, end) if self.starts is None else (self.starts[start], self.starts[end])


_PERCENT = re.compile(r"(?:%[0-9A-Fa-f]{2})+")
_ESCAPE = re.compile(r"\\+(?:u([0-9A-Fa-f]{4})|x([0-9A-Fa-f]{2})|(.))")
_ENTITY = re.compile(r"&(?:#(\d{1,7})|#x([0-9A-Fa-f]{1,6})|(quot|amp|lt|gt|apos|nbsp));")
_WIDE = re.compile("[\uff01-\uff5e]")
_NARROW = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_NAMED = {"quot": '"', "amp": "&", "lt": "<", "gt": ">", "apos": "'", "nbsp": " "}
_CONTROL = {"n": "\n", "t": "\t", "r": "\r", "b": "", "f": ""}
_BASE64 = re.compile(r"(?<![A-Za-z0-9+/_\-])[A-Za-z0-9+/_\-]{16,4000}={0,2}(?![A-Za-z0-9+/_\-])")


def visible(text: str) -> str:
    """The text without terminal sequences, zero-width, direction and control characters; tabs and line ends stay."""
    return INVISIBLE.sub("", SEQUENCE.sub("", text))


def views(text: str) -> Iterator[DecodedText]:
    """The text itself, then each way of decoding it that changes it, one after the other at most twice."""
    here = DecodedText(text)
    yield here
    if _WIDE.search(text):  # full-width letters and signs stand for plain ones, place by place
        here = DecodedText(text.translate(_NARROW))
        yield here
    for _ in range(2):
        changed = False
        for pattern, decode, sign in (
            (_PERCENT, _percent, "%"), (_ESCAPE, _escape, "\\"), (_ENTITY, _entity, "&"),
        ):  # fmt: skip
            if sign in here.text and pattern.search(here.text):
                here, changed = _replace(here, pattern, decode), True
                yield here
        if not changed:
            return


def _percent(m: re.Match[str]) -> str:
    return bytes.fromhex(m.group(0).replace("%", "")).decode("latin-1")


def _escape(m: re.Match[str]) -> str:
    code = m.group(1) or m.group(2)
    return chr(int(code, 16)) if code else _CONTROL.get(m.group(3), m.group(3))


def _entity(m: re.Match[str]) -> str:
    if m.group(3):
        return _NAMED[m.group(3)]
    code = int(m.group(1)) if m.group(1) else int(m.group(2), 16)
    return chr(code) if code < 0x110000 else "?"


def _replace(
    view: DecodedText, pattern: re.Pattern[str], decode: Callable[[re.Match[str]], str]
) -> DecodedText:
    out: list[str] = []
    starts: list[int] = []
    before = view.starts if view.starts is not None else range(len(view.text) + 1)
    at = 0
    for m in pattern.finditer(view.text):
        piece = decode(m)
        out += (view.text[at : m.start()], piece)
        starts.extend(before[at : m.start()])
        starts.extend([before[m.start()]] * len(piece))
        at = m.end()
    out.append(view.text[at:])
    starts.extend(before[at:])
    return DecodedText("".join(out), tuple(starts))


def base64_texts(text: str) -> Iterator[tuple[int, int, str]]:
    """Pieces that are readable text in base64: (start, end, what they say)."""
    for m in _BASE64.finditer(text):
        raw = m.group(0).rstrip("=").replace("-", "+").replace("_", "/")
        if len(raw) % 4 == 1 or raw.isdigit() or (raw.isalpha() and raw.islower()):
            continue
        try:
            said = base64.b64decode(raw + "=" * (-len(raw) % 4)).decode("ascii")
        except (binascii.Error, UnicodeDecodeError):
            continue
        if said.isprintable() or said.replace("\n", "").isprintable():
            yield m.start(), m.end(), said
