"""What a connection may send and how long it may take, and how bytes become a message: one place for all protocols.

A connection has two states. A *stranger* has shown no secret yet: it may send one small hello within `HELLO_S`, and
there are at most `STRANGERS` of them at a time. What comes after the hello is bounded by each protocol's own number.
Whatever is no message raises `Malformed`, never anything else: whoever reads drops the link and goes on.
docs/security.md has the numbers. Standard library only: the keeper starts with this.
"""

from __future__ import annotations

import hmac
import json
import re
from hashlib import sha256
from typing import Any

HELLO_BYTES = 4096
"""The largest first message."""
HELLO_S = 10.0
"""So long a connection may take to say who it is."""
STRANGERS = 64
"""Connections that have not said who they are, at a time; further ones wait in the kernel, not here."""
PRESSED_S = 1.0
"""While others wait, a stranger has so long: whoever belongs here says its hello in milliseconds."""
READ_AHEAD = 1 << 16
"""Bytes of a connection that may lie unread in our memory (twice this, and one read of 256 KiB)."""
VALUES = 4_000_000
"""Values in one message at most: parsed, each takes up to a hundred times its three bytes of text."""
NAME = 200
"""Characters of a name that comes over a link."""

Message = dict[str, Any]

_MARKS = re.compile(rb"[,\[{]")


class Malformed(ValueError):
    """What came is no message of this protocol."""


def decode(body: bytes | bytearray | memoryview, *, values: int = VALUES) -> Message:
    """The JSON object that these bytes are. Raises Malformed, for what is nested too deep and holds too many values too."""
    if len(body) > values and sum(1 for _ in _MARKS.finditer(body)) > values:
        raise Malformed(f"a message of more than {values:,} values")
    try:
        found = json.loads(bytes(body))
    except (ValueError, RecursionError) as e:
        raise Malformed(f"no JSON: {type(e).__name__}: {e}"[:200]) from None
    if not isinstance(found, dict):
        raise Malformed(f"JSON, but no object: a {type(found).__name__}")
    return found


def text(value: Any, what: str, *, most: int = NAME, empty: bool = True) -> str:
    """The value, if it is such a text without control characters. Raises Malformed."""
    if not isinstance(value, str) or len(value) > most or (not empty and not value):
        raise Malformed(f"'{what}' is no text of at most {most} characters")
    if not value.isprintable():
        raise Malformed(f"'{what}' holds characters that cannot be printed")
    return value


def whole(value: Any, what: str, low: int, high: int) -> int:
    """The value, if it is a whole number in [low, high]. Raises Malformed."""
    if type(value) is not int or not low <= value <= high:
        raise Malformed(f"'{what}' is no whole number from {low} to {high}")
    return value


def number(value: Any, what: str, low: float, high: float) -> float:
    """The value, if it is a number in [low, high], which NaN never is. Raises Malformed."""
    if type(value) not in (int, float) or not low <= value <= high:
        raise Malformed(f"'{what}' is no number from {low:g} to {high:g}")
    return float(value)


def same_secret(given: Any, expected: str) -> bool:
    """Whether it is the secret; in the same time whatever was given. An empty secret is never right."""
    if not expected or not isinstance(given, str):
        return False
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())


def proof(secret: str, side: str, theirs: str, ours: str) -> str:
    """What only a holder of the secret can answer to a challenge; `side` keeps one side's answer from being the other's."""
    return hmac.new(secret.encode(), f"{side}|{theirs}|{ours}".encode(), sha256).hexdigest()
