"""HTTP servers for tests that misbehave to order: slow, resetting, refusing, losing answers, flipping bits."""

from __future__ import annotations

import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, ClassVar, Self


@dataclass(frozen=True)
class HttpRequest:
    """One request as it came in; `number` counts from 1, `key` is its path without the first slash."""

    number: int
    method: str
    key: str
    query: dict[str, str]
    bytes: int

    @property
    def is_part(self) -> bool:
        """Whether it uploads a part of a multipart upload to S3."""
        return self.method == "PUT" and "partNumber" in self.query


@dataclass(frozen=True)
class Fault:
    """What to do to a request: answer with `status`, wait `delay` seconds, reset the connection before the request
    is acted on (`reset`) or after it (`lose_answer`), flip a bit of the body that arrives (`flip`)."""

    status: int = 0
    code: str = "SlowDown"
    delay: float = 0.0
    reset: bool = False
    lose_answer: bool = False
    flip: bool = False


SLOW_DOWN = Fault(503, "SlowDown")
RESET = Fault(reset=True)


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are what these servers are for; anything else is shown."""
        if not isinstance(sys.exc_info()[1], ConnectionError | ValueError):
            super().handle_error(request, client_address)


@dataclass
class FaultyServer:
    """A server on a free port of this machine; a context manager. `requests` may be read at any time."""

    fault: Callable[[HttpRequest], Fault | None] = lambda _: None
    requests: list[HttpRequest] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    handler: ClassVar[type[FaultyHandler]]

    def __enter__(self) -> Self:
        self.http = _Quiet(("127.0.0.1", 0), type("Bound", (self.handler,), {"owner": self}))
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}"


class FaultyHandler(BaseHTTPRequestHandler):
    """Notes a request, does to it what the owner's `fault` says, and else hands it to `respond`."""

    owner: Any
    protocol_version = "HTTP/1.1"
    losing = False

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: a test's output is its own."""

    def respond(self, request: HttpRequest, body: bytes) -> None:
        """Acts on the request and answers with `answer`."""
        raise NotImplementedError

    def _serve(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        key = urllib.parse.unquote(url.path).lstrip("/")
        with self.owner.lock:
            request = HttpRequest(len(self.owner.requests) + 1, self.command, key, query, len(body))
            self.owner.requests.append(request)
        fault = self.owner.fault(request) or Fault()
        if fault.delay:
            time.sleep(fault.delay)
        if fault.reset:
            return self.reset()
        if fault.status:
            return self.refuse(fault.status, fault.code)
        if fault.flip and body:
            body = body[:-1] + bytes([body[-1] ^ 1])
        self.losing = fault.lose_answer
        self.respond(request, body)
        if self.losing:
            self.losing = False
            self.reset()
        return None

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        """Sends an answer, unless it is to be lost. A HEAD sends no body, but may state a length of its own."""
        if self.losing:
            return
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        """Answers with an error as S3 writes it."""
        text = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
        self.answer(status, text.encode(), {"Content-Type": "application/xml"})

    def reset(self) -> None:
        """Ends the connection with a TCP reset."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        self.connection.close()
