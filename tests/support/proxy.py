"""An HTTP proxy with faults to order, to stand between a client and a real S3 server in tests.

    with FaultyProxy(target="http://127.0.0.1:4566") as proxy:
        proxy.fault = lambda r: SLOW_DOWN if r.is_part and r.number % 2 else None

Requests and answers pass unchanged, the Host header included (signatures cover it). `flip` changes the body on its
way to the server.
"""

from __future__ import annotations

import http.client
import urllib.parse
from dataclasses import dataclass

from unbroken.testing.http_faults import FaultyHandler, FaultyServer, HttpRequest

_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "proxy-connection"}
_OURS = _HOP | {"date", "server"}


class _Handler(FaultyHandler):
    def respond(self, request: HttpRequest, body: bytes) -> None:
        address = urllib.parse.urlsplit(self.owner.target)
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
            return self.reset()
        finally:
            upstream.close()
        kept = {n: v for n, v in answer.getheaders() if n.lower() not in _OURS}
        if self.command != "HEAD":
            kept = {n: v for n, v in kept.items() if n.lower() != "content-length"}
        return self.answer(answer.status, data, kept)


@dataclass
class FaultyProxy(FaultyServer):
    """The proxy; a context manager."""

    target: str = ""
    handler = _Handler
