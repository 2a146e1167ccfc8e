"""An HTTP proxy with faults to order, to stand between a client and a real S3 server in tests.

    with FaultyProxy("http://127.0.0.1:4566") as proxy:
        proxy.fault = lambda r: SLOW_DOWN if r.is_part and r.number % 2 else None

Requests and answers pass unchanged, the Host header included (signatures cover it). Faults are those of
`testing.object_store`; `flip` changes the body on its way to the server.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from .object_store import Fault, Request

_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "proxy-connection"}


@dataclass
class FaultyProxy:
    """The proxy; a context manager. `requests` are those seen so far."""

    target: str
    fault: Callable[[Request], Fault | None] = lambda _: None
    requests: list[Request] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> FaultyProxy:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"proxy": self}))
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    proxy: FaultyProxy
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: a test's output is its own."""

    def _pass(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.proxy.lock:
            number = len(self.proxy.requests) + 1
            request = Request(
                number, self.command, urllib.parse.unquote(url.path).lstrip("/"), query, len(body)
            )
            self.proxy.requests.append(request)
        fault = self.proxy.fault(request) or Fault()
        if fault.delay:
            time.sleep(fault.delay)
        if fault.reset:
            return self._reset()
        if fault.status:
            text = f"<Error><Code>{fault.code}</Code><Message>{fault.code}</Message></Error>".encode()
            return self._answer(fault.status, [("Content-Type", "application/xml")], text)
        if fault.flip and body:
            body = body[:-1] + bytes([body[-1] ^ 1])
        address = urllib.parse.urlsplit(self.proxy.target)
        upstream = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in _HOP:
                    upstream.putheader(name, value)
            upstream.endheaders(body or None)
            answer = upstream.getresponse()
            data = answer.read()
        except OSError:
            return self._reset()
        finally:
            upstream.close()
        if fault.lose_answer:
            return self._reset()
        kept = [
            (n, v)
            for n, v in answer.getheaders()
            if n.lower() not in _HOP | {"content-length", "date", "server"}
        ]
        if self.command == "HEAD":
            kept.append(("Content-Length", answer.getheader("Content-Length") or "0"))
        return self._answer(answer.status, kept, data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _reset(self) -> None:
        """Ends the connection with a TCP reset."""
        self.close_connection = True
        linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()
