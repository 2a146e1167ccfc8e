"""An OpenAI-compatible endpoint that answers like the fake model, and misbehaves on purpose.

    with FakeEndpoint() as server:            # server.url is http://127.0.0.1:PORT/v1
        server.misbehave(Overloaded(2))       # the next two calls get 429 with Retry-After

Also a hostile judge: `reply` decides what a chat message is answered with.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from ..evaluate.contracts import Request
from .fake_models import respond, unit

Json = Any
Reply = Callable[[list[dict[str, str]]], str | None]


@dataclass
class Misbehaviour:
    """What goes wrong with the next `times` calls (-1: all of them)."""

    times: int = 1
    status: int = 0
    """HTTP status; 0: none, see `body`, `hang_s` and `drop`."""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b'{"error": {"message": "not today"}}'
    hang_s: float = 0.0
    drop: bool = False
    """Closes the connection without a word."""


def overloaded(times: int = 1, retry_after: str = "0") -> Misbehaviour:
    """429 with Retry-After."""
    return Misbehaviour(
        times, 429, {"Retry-After": retry_after}, b'{"error": {"message": "too many requests"}}'
    )


def broken(times: int = 1, status: int = 500) -> Misbehaviour:
    """A server error."""
    return Misbehaviour(times, status)


def garbage(times: int = 1) -> Misbehaviour:
    """200 with no JSON."""
    return Misbehaviour(times, 200, {}, b"<html>Bad Gateway</html>")


class FakeEndpoint:
    """The server; starts with `with` or `start()`. `calls` counts what was asked, by path."""

    def __init__(
        self, *, model: str = "fake", reply: Reply | None = None, delay_s: float = 0.0, key: str = ""
    ) -> None:
        self.model, self.reply, self.delay_s, self.key = model, reply, delay_s, key
        self.refuse = ""
        """Prompts that match this regular expression get 400, always."""
        self.calls: dict[str, int] = {}
        self.bodies: list[Json] = []
        self.at_once = 0
        self.most_at_once = 0
        self._wrong: list[Misbehaviour] = []
        self._lock = threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, format: str, *args: object) -> None:
                """Says nothing."""

            def do_GET(self) -> None:
                endpoint._serve(self, None)

            def do_POST(self) -> None:
                endpoint._serve(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def start(self) -> FakeEndpoint:
        """Serves from a thread."""
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return self

    def stop(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> FakeEndpoint:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()

    def misbehave(self, *how: Misbehaviour) -> None:
        """Queues misbehaviours; each lasts its `times`, then the next one, then none."""
        with self._lock:
            self._wrong.extend(how)

    def _serve(self, handler: BaseHTTPRequestHandler, body: Json) -> None:
        path = handler.path.removeprefix("/v1")
        with self._lock:
            self.calls[path] = self.calls.get(path, 0) + 1
            if body is not None:
                self.bodies.append(body)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            wrong = self._wrong[0] if self._wrong and path != "/models" else None
            if wrong is not None:
                wrong.times -= 1
                if wrong.times == 0:
                    self._wrong.pop(0)
        try:
            time.sleep(self.delay_s + (wrong.hang_s if wrong else 0.0))
            if wrong is not None and wrong.drop:
                handler.close_connection = True
                handler.connection.close()
                return
            if wrong is not None and wrong.status:
                _send(handler, wrong.status, wrong.body, wrong.headers)
            elif self.key and handler.headers.get("Authorization") != f"Bearer {self.key}":
                _send(handler, 401, b'{"error": {"message": "no such key"}}', {})
            else:
                status, value = self._answer(path, body)
                _send(handler, status, json.dumps(value).encode(), {})
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client did not wait
        finally:
            with self._lock:
                self.at_once -= 1

    def _answer(self, path: str, body: Json) -> tuple[int, Json]:
        if path == "/models":
            return 200, {
                "object": "list",
                "data": [{"id": self.model, "object": "model", "created": int(time.time())}],
            }
        if body.get("model") != self.model:
            return 404, {"error": {"message": f"there is no model {body.get('model')}"}}
        if self.refuse and re.search(self.refuse, json.dumps(body.get("prompt", body.get("messages")))):
            return 400, {"error": {"message": "content policy"}}
        if path == "/chat/completions":
            if self.reply is not None:
                text = self.reply(body["messages"])
            else:
                text = _generated(body["messages"], body)
            return 200, {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}
        if path == "/completions":
            choice = _echoed(body) if body.get("echo") else {"text": _generated(body["prompt"], body)}
            return 200, {"choices": [{"index": 0, **choice}]}
        return 404, {"error": {"message": f"there is no {path}"}}


def _generated(prompt: Json, body: Json) -> str:
    settings = {"seed": body["seed"]} if body.get("temperature") else {}
    text = str(respond(Request("generate_until", (prompt, settings))))
    for stop in body.get("stop") or []:
        text = text.split(stop)[0]
    return text


def _echoed(body: Json) -> Json:
    """The prompt's tokens (words with the space before them) with log-probabilities, and one token more."""
    prompt = str(body["prompt"])
    tokens = [*re.findall(r"\s*\S+|\s+$", prompt), " end"]
    starts, at = [], 0
    for t in tokens:
        starts.append(at)
        at += len(t)
    values: list[float | None] = [None]
    tops: list[dict[str, float] | None] = [None]
    for i, t in enumerate(tokens[1:], 1):
        value = -0.1 - 3.0 * unit("".join(tokens[:i]), t)
        values.append(value)
        tops.append({t: value} if value > -1.6 else {"other": -0.05, t: value})
    return {
        "text": "".join(tokens),
        "logprobs": {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": starts},
    }


def _send(handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
