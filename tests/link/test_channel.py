"""Channels between processes with threads: descriptors, bounds, and the end of the other side in any moment."""

from __future__ import annotations

import os
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from unbroken.errors import UsageError
from unbroken.link.address import Address, check_socket, connect, listen_unix
from unbroken.link.bounds import Malformed
from unbroken.link.channel import MAX_DESCRIPTORS, Channel, Closed
from unbroken.link.framing import LENGTH, TooLarge
from unbroken.link.tls import Identity, TlsSocket


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    a, b = (Channel(s, descriptors=True) for s in socket.socketpair())
    yield a, b
    a.close()
    b.close()


def test_descriptors_come_with_the_message_that_names_them(pair: tuple[Channel, Channel]) -> None:
    a, b = pair
    fd = os.memfd_create("x")
    os.write(fd, b"held")
    a.send({"op": "first"}, [fd])
    a.send({"op": "second"})
    os.close(fd)
    first, got = b.receive()
    assert first == {"op": "first"} and len(got) == 1
    assert os.pread(got[0], 10, 0) == b"held"
    os.close(got[0])
    assert b.receive() == ({"op": "second"}, [])
    with pytest.raises(Closed):
        a.send({"op": "too many"}, [0] * (MAX_DESCRIPTORS * 10))


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\0",
        LENGTH.pack(50) + b"{",
        LENGTH.pack(1 << 31),
        LENGTH.pack(2) + b"[]",
        LENGTH.pack(1) + b"\xff",
    ],
)
def test_what_is_no_message_is_an_end(pair: tuple[Channel, Channel], sent: bytes) -> None:
    a, b = pair
    a.send_bytes(memoryview(sent))
    a.close()
    with pytest.raises(Closed):
        b.receive()


def test_memory_is_taken_as_bytes_come_and_not_as_they_are_announced(pair: tuple[Channel, Channel]) -> None:
    a, b = pair
    a.send_bytes(memoryview(LENGTH.pack(250 << 20) + b"x" * 1000))
    a.close()
    tracemalloc.start()
    with pytest.raises(Closed):
        b.receive()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_a_long_message_comes_whole(pair: tuple[Channel, Channel]) -> None:
    a, b = pair
    text = "x" * (5 << 20)
    threading.Thread(target=a.send, args=({"t": text},)).start()
    assert b.receive()[0] == {"t": text}
    small = Channel(a.sock, most=100)
    with pytest.raises(TooLarge, match="above the limit of 100"):
        small.send({"t": text})


def test_a_reader_is_woken_when_its_own_side_closes(pair: tuple[Channel, Channel]) -> None:
    a, _ = pair
    ended: list[Exception] = []

    def read() -> None:
        try:
            a.receive()
        except Closed as e:
            ended.append(e)

    reader = threading.Thread(target=read)
    reader.start()
    a.close()
    reader.join(5)
    assert len(ended) == 1


def test_descriptors_do_not_leave_a_machine() -> None:
    identity, (s, c) = Identity.make("t"), socket.socketpair()
    served: list[TlsSocket] = []
    thread = threading.Thread(target=lambda: served.append(TlsSocket(s, identity, server=True, within_s=5)))
    thread.start()
    channel = Channel(TlsSocket(c, identity, server=False, within_s=5))
    thread.join(5)
    with pytest.raises(Closed, match="do not leave a machine"):
        channel.send({"op": "x"}, [0])
    channel.send({"op": "y"})
    assert Channel(served[0]).receive() == ({"op": "y"}, [])


# --- addresses


@pytest.mark.parametrize(
    "text", ["unix:/run/a b.sock", "tls:10.0.0.1:80", "tls:[2001:db8::1]:443", "tls:node-3:65535"]
)
def test_an_address_is_what_it_says(text: str) -> None:
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize(
    "text", [None, 5, ["127.0.0.1", 5], "", "unix:relative", "tcp:10.0.0.1:80", "10.0.0.1:80", "tls:h:0", "tls:h:65536", "tls::80", "tls:h:\u0663",
             "unix:/a\nb", "tls:h:x", "unix:/" + "x" * 500],
)  # fmt: skip
def test_what_is_no_address_is_malformed(text: object) -> None:
    with pytest.raises(Malformed):
        Address.parse(text)


def test_a_unix_socket_is_its_owners_alone_and_replaces_one_that_was_left(tmp_path: Path) -> None:
    path = tmp_path / "s"
    old = os.umask(0)
    try:
        for _ in range(2):
            listener = listen_unix(path)
            assert path.stat().st_mode & 0o777 == 0o600
            connect(Address.unix(path), None, within_s=1).close()
            listener.close()
    finally:
        os.umask(old)
    with pytest.raises(OSError):
        connect(Address.unix(path), None, within_s=1)
    with pytest.raises(UsageError, match="TMPDIR"):
        check_socket(tmp_path / ("x" * 100), "TMPDIR")
