"""How messages become bytes and bytes messages: one framing for all links.

A message is 4 bytes of length, big-endian, then a JSON object. Links between supervisor and agents were of lines before
(version 1: a JSON object, then a line feed); who speaks first shows by its first byte which of the two it speaks, and
is answered alike. Standard library only: the keeper starts with this.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Mapping
from enum import Enum
from typing import Any

from .bounds import VALUES, Malformed, Message, decode

LENGTH = struct.Struct(">I")
LONGEST = 1 << 30
"""Bytes of one message on any link; each link has its own limit below it."""
_FRAMES_BELOW = 9
"""A first byte below a tab's: no JSON begins with one, and no message is as long as a larger one would say where lines
are spoken too (144 MiB)."""


class Form(Enum):
    """How the messages of a link are told apart."""

    FRAMES = "frames"
    LINES = "lines"


class TooLarge(ValueError):
    """A message above the limit; it was not sent."""


class Encoded:
    """A JSON object, as text: what is sent again and again is encoded once. A value of a message, or deeper in it."""

    def __init__(self, value: Mapping[str, Any], head: bytes = b"{}") -> None:
        self._value, self._head = value, head

    @functools.cached_property
    def text(self) -> bytes:
        """Made when it is first asked for."""
        return _joined(self._head, _text(self._value))

    def with_more(self, more: Mapping[str, Any]) -> Encoded:
        """With these keys, which it lacks, after its own; encoded by whoever sends it."""
        return Encoded(more, self.text)


def _text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), default=_deeper).encode()


def _deeper(value: Any) -> Any:
    if isinstance(value, Encoded):
        return json.loads(value.text)
    raise TypeError(f"a {type(value).__name__} is no JSON")


def _joined(a: bytes, b: bytes) -> bytes:
    """Two JSON objects as one."""
    return a if b == b"{}" else b if a == b"{}" else a[:-1] + b"," + b[1:]


def encode(message: Message) -> bytes:
    """The JSON of a message."""
    body = _text({k: v for k, v in message.items() if not isinstance(v, Encoded)})
    for key, value in message.items():
        if isinstance(value, Encoded):
            body = _joined(body, b"{" + _text(key) + b":" + value.text + b"}")
    return body


def pack(message: Message, limit: int = LONGEST, form: Form = Form.FRAMES) -> bytes:
    """A message's bytes on the wire. Raises TooLarge above `limit` bytes of JSON."""
    body = encode(message)
    if len(body) > limit:
        raise TooLarge(f"a message of {len(body):,} bytes is above the limit of {limit:,}")
    return body + b"\n" if form is Form.LINES else LENGTH.pack(len(body)) + body


class Unpacker:
    """From bytes as they come to messages. `limit` bounds the next one; raise it once the other side is known.

    `form` is None until the first byte has shown it.
    """

    def __init__(self, limit: int, *, values: int = VALUES, form: Form | None = Form.FRAMES) -> None:
        self.limit, self.form, self._values = limit, form, values
        self._unread = bytearray()
        self._seen = 0

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Takes what came."""
        self._unread += data

    @property
    def partial(self) -> bool:
        """Whether something has come that is no whole message yet."""
        return bool(self._unread)

    def next(self) -> bytes | None:
        """The next message's JSON, None while it has not come whole. Raises Malformed for one above the limit, after which
        nothing of this link makes sense any more."""
        if not self._unread:
            return None
        if self.form is None:
            self.form = Form.FRAMES if self._unread[0] < _FRAMES_BELOW else Form.LINES
        return self._line() if self.form is Form.LINES else self._frame()

    def read(self) -> Message | None:
        """The next message, None while it has not come whole. Raises Malformed."""
        body = self.next()
        return None if body is None else self.decode(body)

    def decode(self, body: bytes) -> Message:
        """The message of this JSON. Raises Malformed; the next one may make sense all the same."""
        return decode(body, values=self._values)

    def _frame(self) -> bytes | None:
        if len(self._unread) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack_from(self._unread)
        if size > self.limit:
            raise Malformed(f"a message of {size:,} bytes, above the limit of {self.limit:,}")
        return (
            self._take(LENGTH.size, LENGTH.size + size) if len(self._unread) - LENGTH.size >= size else None
        )

    def _line(self) -> bytes | None:
        end = self._unread.find(b"\n", self._seen)
        if end < 0:
            self._seen = len(self._unread)
        if (self._seen if end < 0 else end) > self.limit:
            raise Malformed(f"a line of more than {self.limit:,} bytes")
        if end < 0:
            return None
        self._seen = 0
        return self._take(0, end, end + 1)

    def _take(self, start: int, stop: int, upto: int | None = None) -> bytes:
        body = bytes(memoryview(self._unread)[start:stop])
        del self._unread[: stop if upto is None else upto]
        return body
