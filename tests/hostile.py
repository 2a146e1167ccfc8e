"""What a hostile or broken other side sends: frames that lie, JSON that is deep, wide or of another shape."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

NESTED = b"[" * 200_000
"""Deeper than any parser that calls itself can go."""

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 70), 1 << 70), st.floats(), st.text(max_size=20),
    st.sampled_from(["", "../..", "\x1b[2J", "a\nb", "9" * 400, "w0", "-1", "NaN"]),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)

bodies = st.one_of(
    st.binary(max_size=200),
    st.sampled_from([b"", b"null", b"[]", b"{}", b'{"op":5}', b'{"op":"hello"', b"\xff\xfe", NESTED, b'{"op":' + NESTED,
                     b'{"a":1e999}', b'{"op":"beat","task":"\\ud800","block":' + b"9" * 4000 + b"}"]),
    values.map(lambda v: json.dumps(v).encode()),
)  # fmt: skip


def framed(body: bytes, length: int | None = None) -> bytes:
    """With its length before it, or another one."""
    return struct.pack(">I", len(body) if length is None else length) + body


frames = st.one_of(
    bodies.map(framed),
    st.builds(framed, bodies, st.sampled_from([0, 1, 4096, 4097, 1 << 20, (1 << 30) - 1, (1 << 32) - 1])),
    st.binary(max_size=12),
)
lines = st.one_of(
    bodies.map(lambda b: b.replace(b"\n", b" ") + b"\n"),
    bodies,
    st.sampled_from([b"x" * 5000, b"[" * 70_000 + b"\n"]),
)


def mutated(valid: Sequence[Mapping[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """One of these messages with some of its fields replaced, dropped, or joined by others."""

    def change(message: Mapping[str, Any], fields: dict[str, Any], dropped: set[str]) -> dict[str, Any]:
        return {k: v for k, v in {**message, **fields}.items() if k not in dropped or k == "op"}

    def of(message: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
        names = sorted(set(message) - {"op"}) or ["x"]
        return st.builds(
            change, st.just(message), st.dictionaries(st.sampled_from([*names, "extra"]), values, max_size=3),
            st.sets(st.sampled_from(names), max_size=1),
        )  # fmt: skip

    return st.sampled_from(list(valid)).flatmap(of)


def send(sock: socket.socket, data: bytes) -> bool:
    """Sends it; False where the other side has closed already."""
    try:
        sock.sendall(data)
        return True
    except OSError:
        return False


def closed_within(sock: socket.socket, seconds: float) -> bool:
    """Whether the other side closes; what it says until then is dropped."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        sock.settimeout(left)
        try:
            if not sock.recv(1 << 16):
                return True
        except TimeoutError:
            return False
        except OSError:
            return True
    return False


def receive_frame(sock: socket.socket, within_s: float = 10.0) -> dict[str, Any]:
    """The next message of a peer that frames by length. Raises OSError or ValueError where there is none."""
    sock.settimeout(within_s)
    data = b""
    want = 4
    while len(data) < want:
        piece = sock.recv(want - len(data))
        if not piece:
            raise OSError("closed")
        data += piece
        if len(data) == 4 and want == 4:
            want += struct.unpack(">I", data)[0]
    found: dict[str, Any] = json.loads(data[4:])
    return found
