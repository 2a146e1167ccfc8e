"""TLS 1.3 on both sides with one certificate per run: whoever has its key belongs to the run, and nobody else is heard.

Both sides show the same certificate and take no other (it is pinned, so neither names nor dates are looked at: nodes'
clocks may differ). The key lies in one file that only its owner may use, or in memory; never in arguments,
environments, logs or archives. There is no fallback to a plain connection.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import atomic
from ..errors import RunError
from ..private import read_secret, write_secret

_CHECK_NO_TIMES = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME: what is pinned does not expire."""
_NAME = re.compile(r"[^A-Za-z0-9.-]")
_PEM = re.compile(r"-----BEGIN ([A-Z ]+)-----.*?-----END \1-----\n?", re.S)
_PIECE = 1 << 18
_RECEIVED = 1 << 17


@dataclass(frozen=True)
class Identity:
    """A certificate and its private key, as PEM text."""

    certificate: str
    key: str = field(repr=False)

    @classmethod
    def make(cls, name: str) -> Identity:
        """A new one, by openssl, in a few milliseconds. Raises RunError where that is missing or fails."""
        program = shutil.which("openssl")
        if program is None:
            raise RunError(
                "processes on several machines need a certificate, and there is no openssl to make it",
                hint="Install openssl (apt install openssl), or stay on one machine",
            )
        # The key comes through a pipe: it is never in a file that others could open.
        command = [
            program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-batch",
            "-subj", f"/CN=unbroken-{_NAME.sub('-', name)[:40]}", "-days", "3650", "-keyout", "/dev/stdout",
        ]  # fmt: skip
        try:
            made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as e:
            raise RunError(f"openssl makes no certificate: {e}", where=program) from e
        if made.returncode:
            last = made.stderr.strip().splitlines()[-1:] or ["it said nothing"]
            raise RunError(f"openssl makes no certificate: {last[0]}", where=program)
        return cls.from_pem(made.stdout, program)

    @classmethod
    def from_pem(cls, text: str, where: str) -> Identity:
        """The two in this text, in either order. Raises RunError where they are not in it."""
        found = {kind.split()[-1]: m[0] for m in _PEM.finditer(text) if (kind := m[1])}
        if not {"CERTIFICATE", "KEY"} <= set(found):
            raise RunError("there is no certificate with its key", where=where)
        return cls(found["CERTIFICATE"], found["KEY"])

    @property
    def pem(self) -> str:
        """Both, one after the other: a secret."""
        return self.certificate + self.key

    @classmethod
    def read(cls, path: Path) -> Identity:
        """The one in this file. Raises UnsafeFile if others may use it or it belongs to another user, RunError, OSError."""
        return cls.from_pem(read_secret(path).decode(errors="replace"), str(path))

    def write(self, path: Path) -> None:
        """Puts both into a file of mode 0600. Raises UnsafeFile where the file system keeps no modes, OSError."""
        write_secret(path, self.pem.encode())

    def context(self, *, server: bool) -> ssl.SSLContext:
        """For one side of a connection. Raises RunError for a key that does not fit."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN | _CHECK_NO_TIMES
        if server:
            context.num_tickets = 0  # a resumed session would not show the certificate again
        try:
            context.load_verify_locations(cadata=self.certificate)
            with unnamed(self.pem.encode()) as fd:
                context.load_cert_chain(f"/proc/self/fd/{fd}")  # the ssl module takes paths only
        except ssl.SSLError as e:
            raise RunError(f"the run's certificate cannot be used: {e.reason or e}") from e
        return context

    def check(self, shown: bytes | None) -> None:
        """Raises ssl.SSLCertVerificationError unless this certificate (DER) is ours: one that it signed is not enough."""
        if shown is None or not hmac.compare_digest(shown, ssl.PEM_cert_to_DER_cert(self.certificate)):
            raise ssl.SSLCertVerificationError("the other side has another certificate than the run's")


@contextlib.contextmanager
def unnamed(data: bytes) -> Iterator[int]:
    """A descriptor to read these bytes from, which lie in no file."""
    fd = os.memfd_create("secret", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as f:
            f.write(data)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


class TlsSocket:
    """A blocking socket under TLS, as far as channels use one. Several threads may send while one receives, which
    `ssl.SSLSocket` does not allow: here only the cipher is locked, never a wait."""

    family = socket.AF_INET

    def __init__(self, sock: socket.socket, identity: Identity, *, server: bool, within_s: float) -> None:
        """Shakes hands; the socket is closed where that fails. Raises OSError (an SSLError is one), TimeoutError, RunError
        for a key that does not fit."""
        self._sock = sock
        self._come, self._go = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._cipher, self._order = threading.Lock(), threading.Lock()
        timeout = sock.gettimeout()
        try:
            self._tls = identity.context(server=server).wrap_bio(self._come, self._go, server_side=server)
            self._shake_hands(time.monotonic() + within_s)
            identity.check(self._tls.getpeercert(binary_form=True))
            sock.settimeout(timeout)
        except BaseException:
            sock.close()
            raise

    def _shake_hands(self, deadline: float) -> None:
        while True:
            try:
                self._tls.do_handshake()
                self._flush(deadline)
                return
            except ssl.SSLWantReadError:
                self._flush(deadline)
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._flush(deadline)  # the alert that says why
                raise
            self._wait_until(deadline)
            data = self._sock.recv(_RECEIVED)
            if not data:
                raise ConnectionResetError("the other side closed before it had shown who it is")
            self._come.write(data)

    def _flush(self, deadline: float) -> None:
        if data := self._go.read():
            self._wait_until(deadline)
            self._sock.sendall(data)

    def _wait_until(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other side did not show in time who it is")
        self._sock.settimeout(left)

    def sendall(self, data: Any) -> None:
        """Sends all of it. Raises OSError."""
        view = memoryview(data).cast("B")
        with self._order:
            for at in range(0, len(view), _PIECE):
                with self._cipher:
                    self._tls.write(view[at : at + _PIECE])
                    ready = self._go.read()
                self._sock.sendall(ready)

    def recv_into(self, view: memoryview) -> int:
        """Waits for bytes; 0 at the end. Raises OSError."""
        while True:
            with self._cipher:
                try:
                    return self._tls.read(len(view), view)  # type: ignore[return-value]
                except ssl.SSLWantReadError:
                    pass
                except ssl.SSLZeroReturnError:
                    return 0
            data = self._sock.recv(_RECEIVED)
            if not data:
                return 0
            with self._cipher:
                self._come.write(data)

    def settimeout(self, seconds: float | None) -> None:
        self._sock.settimeout(seconds)

    def setsockopt(self, *args: Any) -> None:
        self._sock.setsockopt(*args)

    def fileno(self) -> int:
        return self._sock.fileno()

    def shutdown(self, how: int) -> None:
        self._sock.shutdown(how)

    def close(self) -> None:
        self._sock.close()


def make_identity(path: Path, name: str) -> Identity:
    """The identity in this file, made where there is none. Raises UnsafeFile, RunError, OSError."""
    if not path.exists():
        # Of two that start at once one makes the file, and both read it.
        atomic.create_exclusive(path, Identity.make(name).pem.encode(), mode=0o600)
    return Identity.read(path)
