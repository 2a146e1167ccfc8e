"""Off one machine: who does not show the run's certificate, over TLS 1.3, is told nothing and served nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from unbroken.diagnose.redact.redact import Redactor
from unbroken.errors import RunError, UnsafeFile
from unbroken.link import accepting, listener
from unbroken.link.accepting import Acceptor, Connection
from unbroken.link.address import Address, connect
from unbroken.link.bounds import STRANGERS
from unbroken.link.channel import Channel, Closed
from unbroken.link.listener import Listener, open_link
from unbroken.link.secret import Secret
from unbroken.link.tls import Identity, TlsSocket, make_identity

from ..hostile import closed_within, framed, send

RUN, OTHER = Identity.make("run"), Identity.make("run")


class Served:
    """An echo of one message, by a listener in an event loop or by threads; `heard` is what came that far."""

    def __init__(self, kind: str) -> None:
        self.heard: list[Any] = []
        self.address: Address
        (self._start_loop if kind == "loop" else self._start_threads)()

    def _start_threads(self) -> None:
        sock = socket.create_server(("127.0.0.1", 0))

        def serve(connection: Connection, known: Callable[[], None]) -> None:
            channel = Channel(connection)
            with contextlib.suppress(Closed):
                self.heard.append(channel.receive()[0])
                known()
                channel.send({"echo": self.heard[-1]})

        acceptor = Acceptor(sock, serve, lambda text: None, identity=RUN)
        acceptor.start()
        self.address = Address("tls", *sock.getsockname())

        def close() -> None:
            acceptor.close()
            sock.close()

        self.close = close

    def _start_loop(self) -> None:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.heard.append(await reader.readexactly(4))
            made.known(writer)
            writer.write(framed(b'{"echo":1}'))
            await writer.drain()

        async def start() -> Listener:
            return Listener(serve, "127.0.0.1", identity=RUN)

        made = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
        self.address = made.address

        async def stop() -> None:
            made.close()

        def close() -> None:
            asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)

        self.close = close

    def raw(self) -> socket.socket:
        return socket.create_connection((self.address.host, self.address.port), timeout=10)

    def works(self) -> None:
        """Whoever has the certificate is answered."""
        channel = Channel(connect(self.address, RUN, within_s=10))
        channel.send({"op": "x"})
        assert "echo" in channel.receive()[0]
        channel.close()


@pytest.fixture(params=["loop", "threads"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    found = Served(request.param)
    yield found
    found.close()


def ends(served: Served, sock: socket.socket, within_s: float = 5.0) -> None:
    """The connection ends, nothing was served over it, and others still are."""
    assert closed_within(sock, within_s)
    sock.close()
    assert served.heard == []
    served.works()


def attempt(served: Served, context: ssl.SSLContext) -> bytes | None:
    """What is answered to a client with this context; None where it gets no connection."""
    with served.raw() as sock:
        try:
            with context.wrap_socket(sock) as tls:
                send(tls, framed(b'{"op":"x"}'))
                return tls.recv(100)
        except OSError:
            return None


def bare(**changes: Any) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for key, value in changes.items():
        setattr(context, key, value)
    return context


def test_both_sides_that_have_it_understand_each_other(served: Served) -> None:
    served.works()

    async def main() -> None:
        reader, writer = await open_link(served.address, RUN, 10)
        assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        writer.write(framed(b'{"op":"x"}'))
        assert b"echo" in await reader.read(100)
        writer.close()

    asyncio.run(main())


def test_no_certificate_is_answered_nothing(served: Served) -> None:
    assert not attempt(served, bare())
    assert served.heard == []
    served.works()


def test_another_certificate_of_the_same_name_is_answered_nothing(served: Served) -> None:
    context = OTHER.context(server=False)
    context.verify_mode = ssl.CERT_NONE
    assert not attempt(served, context)
    assert served.heard == []
    served.works()


def test_a_certificate_that_ours_signed_is_not_ours(served: Served, tmp_path: Path) -> None:
    run, leaf, asked = tmp_path / "run.pem", tmp_path / "leaf.key", tmp_path / "leaf.csr"
    RUN.write(run)
    subprocess.run(["openssl", "req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj",
                    "/CN=leaf", "-keyout", leaf, "-out", asked], check=True, capture_output=True)  # fmt: skip
    made = subprocess.run(["openssl", "x509", "-req", "-in", asked, "-CA", run, "-CAkey", run, "-set_serial", "5"],
                          check=True, capture_output=True, text=True)  # fmt: skip
    signed = Identity(made.stdout, leaf.read_text())
    context = signed.context(server=False)
    context.verify_mode = ssl.CERT_NONE
    assert not attempt(served, context)
    assert served.heard == []
    with pytest.raises(ssl.SSLCertVerificationError, match="another certificate"):
        RUN.check(ssl.PEM_cert_to_DER_cert(signed.certificate))
    with pytest.raises(ssl.SSLCertVerificationError):
        RUN.check(None)
    served.works()


def test_tls_of_yesterday_is_refused(served: Served) -> None:
    context = RUN.context(server=False)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert attempt(served, context) is None
    assert served.heard == []
    served.works()


def test_a_plain_client_gets_nothing(served: Served) -> None:
    for said in (framed(b'{"op":"token"}'), b'{"op":"token"}\n', b"GET / HTTP/1.1\r\n\r\n"):
        sock = served.raw()
        send(sock, said)
        sock.settimeout(5)
        heard = b""
        with contextlib.suppress(OSError):
            while piece := sock.recv(1000):
                heard += piece
        assert b"{" not in heard and len(heard) < 50, "at most TLS's own alert"
        sock.close()
    assert served.heard == []
    served.works()


def hello_of_a_client() -> bytes:
    come, go = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = RUN.context(server=False).wrap_bio(come, go)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return go.read()


@pytest.mark.parametrize("part", [1, 5, 0.5, 1.0])
def test_a_handshake_that_breaks_off_ends_alone(served: Served, part: float) -> None:
    hello = hello_of_a_client()
    sock = served.raw()
    send(sock, hello[: part if isinstance(part, int) else int(len(hello) * part)])
    sock.shutdown(socket.SHUT_WR)
    ends(served, sock)


def test_a_handshake_byte_by_byte_is_cut_off(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "HELLO_S", 0.4)
    monkeypatch.setattr(listener, "HELLO_S", 0.4)
    sock = served.raw()
    began = time.monotonic()
    for byte in hello_of_a_client()[:100]:
        if not send(sock, bytes([byte])) or time.monotonic() - began > 5:
            break
        time.sleep(0.02)
    assert time.monotonic() - began < 5
    ends(served, sock)


def test_silent_ones_keep_nobody_out(served: Served) -> None:
    silent = [served.raw() for _ in range(STRANGERS + 10)]
    served.works()
    for sock in silent:
        sock.close()


def test_a_client_trusts_nobody_else_either() -> None:
    """Whoever took an address over is not told anything."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = Address("tls", *sock.getsockname())

        def serve() -> None:
            for _ in range(2):
                theirs, _ = sock.accept()
                theirs.settimeout(5)
                with contextlib.suppress(OSError):
                    tls = OTHER.context(server=True)
                    tls.verify_mode = ssl.CERT_NONE
                    with tls.wrap_socket(theirs, server_side=True) as found:
                        heard.append(found.recv(100))

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ssl.SSLError):
            connect(address, RUN, within_s=5)
        with pytest.raises(ssl.SSLError):
            asyncio.run(open_link(address, RUN, 5))
        thread.join(10)
    assert not any(heard)


def test_there_is_nothing_to_fall_back_to() -> None:
    nowhere = Address("tls", "127.0.0.1", 1)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        here = Address("tls", *sock.getsockname())
        with pytest.raises(ConnectionRefusedError, match="certificate"):
            connect(here, None, within_s=1)
    for address in (nowhere, here):
        with pytest.raises(OSError):
            asyncio.run(open_link(address, None, 1))

    async def listen() -> None:
        with pytest.raises(ValueError, match="certificate"):
            Listener(lambda r, w: asyncio.sleep(0), "127.0.0.1")

    asyncio.run(listen())


def test_several_threads_send_while_one_receives() -> None:
    s, c = socket.socketpair()
    made: list[TlsSocket] = []
    thread = threading.Thread(target=lambda: made.append(TlsSocket(s, RUN, server=True, within_s=5)))
    thread.start()
    ours = Channel(TlsSocket(c, RUN, server=False, within_s=5))
    thread.join(5)
    theirs = Channel(made[0])

    def echo() -> None:
        with contextlib.suppress(Closed):
            while True:
                theirs.send(theirs.receive()[0])

    threading.Thread(target=echo, daemon=True).start()
    senders = [
        threading.Thread(target=lambda i=i: [ours.send({"i": i, "n": n, "x": "y" * 3000}) for n in range(40)])
        for i in range(4)
    ]
    for t in senders:
        t.start()
    got = [ours.receive()[0] for _ in range(160)]
    for t in senders:
        t.join(10)
    for i in range(4):
        assert [m["n"] for m in got if m["i"] == i] == list(range(40))
    ours.close()
    theirs.close()


# --- the key


def test_the_key_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    old = os.umask(0)
    try:
        first = make_identity(path, "run")
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o600
    assert make_identity(path, "run") == first, "a successor has the same"
    path.chmod(0o640)
    with pytest.raises(UnsafeFile, match="chmod 600"):
        make_identity(path, "run")
    path.chmod(0o600)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        Identity.read(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_another_users_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    RUN.write(path)
    os.chown(path, 12345, -1)
    with pytest.raises(UnsafeFile, match="another user"):
        Identity.read(path)


def test_the_key_is_shown_nowhere() -> None:
    body = RUN.key.splitlines()[1]
    secret = Secret("planted-token", RUN)
    assert body not in repr(RUN) and body not in str(RUN)
    assert body not in repr(secret) and "planted-token" not in repr(secret)
    assert Secret.from_bytes(secret.as_bytes()) == secret
    assert Secret.from_bytes(b"") is None
    with pytest.raises(RunError) as e:
        Secret.from_bytes(b'{"token": ["planted-token"]}')
    assert "planted" not in str(e.value)
    for text in ("", "planted", RUN.certificate):
        with pytest.raises(RunError) as e:
            Identity.from_pem(text, "somewhere")
        assert "planted" not in str(e.value)
    other = Identity(RUN.certificate, OTHER.key)
    with pytest.raises(RunError) as e:
        other.context(server=True)
    assert OTHER.key.splitlines()[1] not in str(e.value)


def test_the_key_is_taken_out_of_what_leaves_the_machine() -> None:
    """As where it were printed by a process after all: a diagnosis, a bundle and a model get none of it."""
    lines = RUN.key.splitlines()[1:-1]
    secret = Secret("planted-token-of-a-run", RUN)
    for text in (RUN.pem, secret.as_bytes().decode(), f"the agent said: {RUN.key!r}"):
        shown = "\n".join(map(str, Redactor().lines(text.splitlines())))
        assert not any(line in shown for line in lines)


def test_making_one_shows_no_key_and_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real = subprocess.run

    def run(command: list[str], **more: Any) -> Any:
        seen.append((command, more.get("env"), more.get("input")))
        return real(command, **more)

    monkeypatch.setattr(subprocess, "run", run)
    made = Identity.make("a run with odd/characters=\n")
    assert all(made.key.splitlines()[1] not in repr(s) for s in seen)
    paths = {word for command, *_ in seen for word in command[1:] if word.startswith("/dev")}
    assert paths == {"/dev/stdout"} and seen[0][0][-2:] == ["-keyout", "/dev/stdout"], (
        "it comes through a pipe"
    )
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RunError, match="openssl"):
        Identity.make("x")


def test_clocks_that_differ_do_not_keep_nodes_apart(tmp_path: Path) -> None:
    """A certificate that has run out, or is not valid yet, is pinned all the same."""
    key, asked, config = tmp_path / "run.pem", tmp_path / "csr", tmp_path / "ca.cnf"
    RUN.write(key)
    (tmp_path / "index").touch()
    config.write_text(
        f"[ca]\ndefault_ca=x\n[x]\ndatabase={tmp_path}/index\nnew_certs_dir={tmp_path}\ndefault_md=sha256\n"
        "policy=p\nrand_serial=yes\n[p]\ncommonName=supplied\n"
    )
    for command in (
        ["req", "-new", "-key", key, "-subj", "/CN=old", "-out", asked],
        ["ca", "-batch", "-selfsign", "-config", config, "-keyfile", key, "-in", asked, "-startdate", "200101000000Z",
         "-enddate", "200201000000Z", "-notext", "-out", tmp_path / "old.pem"],
    ):  # fmt: skip
        subprocess.run(["openssl", *command], check=True, capture_output=True)
    old = Identity((tmp_path / "old.pem").read_text(), RUN.key)
    s, c = socket.socketpair()
    thread = threading.Thread(target=lambda: TlsSocket(s, old, server=True, within_s=5))
    thread.start()
    TlsSocket(c, old, server=False, within_s=5).close()
    thread.join(5)
