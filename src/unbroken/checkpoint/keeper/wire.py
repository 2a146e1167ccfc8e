"""Messages between a keeper, its ranks and its agent: 4-byte big-endian length, then a JSON object.

Descriptors (memfds) travel with SCM_RIGHTS beside the first byte of the message that names them. Standard library
only: the keeper starts with this.
"""

from __future__ import annotations

import array
import functools
import json
import os
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...link.bounds import Malformed, decode
from ...link.bounds import Message as Message

VERSION = 1
MAX_MESSAGE_BYTES = 256 << 20
MAX_DESCRIPTORS = 64
_LENGTH = struct.Struct(">I")

VALUES = 16_000_000
"""Values in one message at most: a rank's share of a manifest may name a hundred thousand tensors."""


SOCKET_PATH_MAX = 100
"""Bytes; a Unix socket's path may have 107."""


def check_socket(path: Path, setting: str) -> None:
    """Raises UsageError where a Unix socket cannot have this path; `setting` is what makes it shorter."""
    if (size := len(os.fsencode(path))) > SOCKET_PATH_MAX:
        raise UsageError(
            f"the path of the keeper's socket has {size} bytes, a Unix socket's may have {SOCKET_PATH_MAX}",
            where=str(path),
            hint=f"Set {setting} to a shorter folder on this machine, such as /tmp",
        )


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


class Closed(ConnectionError):
    """The other side is gone, or speaks something else."""


class Channel:
    """One end of a connection. Any thread may send; one thread receives, messages of at most `limit` bytes."""

    def __init__(self, sock: socket.socket, *, limit: int = MAX_MESSAGE_BYTES) -> None:
        self.sock = sock
        self.limit = limit
        self._sending = threading.Lock()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Sends one message whole. Raises Closed."""
        body = encode(message)
        if len(body) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(body)} bytes is above the limit of {MAX_MESSAGE_BYTES}")
        data = _LENGTH.pack(len(body)) + body
        try:
            with self._sending:
                sent = 0
                if descriptors:
                    rights = array.array("i", descriptors)
                    sent = self.sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                self.sock.sendall(memoryview(data)[sent:])
        except OSError as e:
            raise Closed(f"sending failed: {e}") from e

    def receive(self) -> tuple[Message, list[int]]:
        """Waits for the next message and its descriptors, which the caller must close. Raises Closed."""
        descriptors: list[int] = []
        try:
            head = self._exactly(_LENGTH.size, descriptors)
            (length,) = _LENGTH.unpack(head)
            if length > self.limit:
                raise Closed(f"a message of {length} bytes was announced, the limit is {self.limit}")
            message = decode(self._exactly(length, descriptors), values=VALUES)
        except (OSError, Malformed) as e:
            for fd in descriptors:
                os.close(fd)
            raise e if isinstance(e, Closed) else Closed(f"receiving failed: {e}") from e
        return message, descriptors

    def _exactly(self, count: int, descriptors: list[int]) -> bytearray:
        room = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
        data = bytearray(count)
        view, got = memoryview(data), 0
        while got < count:
            n, extra, flags, _ = self.sock.recvmsg_into([view[got:]], room, socket.MSG_CMSG_CLOEXEC)
            for level, kind, payload in extra:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                    descriptors.extend(fds)
            if len(descriptors) > MAX_DESCRIPTORS:
                raise Closed(f"more than {MAX_DESCRIPTORS} descriptors came with one message")
            if flags & socket.MSG_CTRUNC:
                raise Closed("descriptors were lost on the way (limit of open files?)")
            if n == 0:
                raise Closed("the other side closed the connection")
            got += n
        return data

    def close(self) -> None:
        """Ends the connection, also under a thread that waits in `receive`."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.sock.close()


def connect(path: str, timeout_s: float) -> Channel:
    """A channel to the keeper that listens on this Unix socket. Raises Closed."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
        sock.settimeout(None)
    except OSError as e:
        sock.close()
        raise Closed(f"no keeper answers on {path}: {e}") from e
    return Channel(sock)
