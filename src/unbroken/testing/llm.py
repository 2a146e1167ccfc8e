"""A language model that can be trusted with nothing: an OpenAI-compatible server for tests, with chosen vices.

    with FakeModel(["not json", {"reason": "ECCError", ...}]) as url: ...

Each answer is a text, a JSON-able value, or one of the vices below; they are given in turn, the last one for ever.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

SLOW, HANG_UP, ERROR_500, GARBAGE, NO_CHOICES, HUGE, DEEP = (
    "<slow>", "<hang up>", "<500>", "<garbage>", "<no choices>", "<huge>", "<deep>",
)  # fmt: skip
Answer = str | dict[str, Any] | list[Any] | Callable[[list[dict[str, str]]], Any]


class FakeAssistant:
    """The server, as a context manager that gives its address. `requests` holds what it was sent."""

    def __init__(self, answers: Sequence[Answer], *, slow_s: float = 30.0) -> None:
        self.answers, self.slow_s = list(answers), slow_s
        self.requests: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def __enter__(self) -> str:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
                fake._answer(self, body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stop.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def _answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        with self._lock:
            self.requests.append(
                body | {"path": handler.path, "authorization": handler.headers.get("Authorization")}
            )
            answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
        if handler.path.endswith("/embeddings"):
            texts = body["input"]
            _send(handler, {"data": [{"embedding": _letters(t)} for t in texts]})
            return
        if callable(answer):
            answer = answer(body["messages"])
        if answer == SLOW:
            deadline = time.monotonic() + self.slow_s
            while time.monotonic() < deadline and not self._stop.wait(0.05):
                pass
            answer = "{}"
        if answer == HANG_UP:
            handler.connection.close()
            return
        if answer == ERROR_500:
            handler.send_error(500)
            return
        if answer in (GARBAGE, NO_CHOICES):
            _send(handler, b"\x00\xff<html>" if answer == GARBAGE else {"choices": []})
            return
        text = answer if isinstance(answer, str) else json.dumps(answer)
        if answer == HUGE:
            text = "x" * (2 << 20)
        if answer == DEEP:
            text = '{"reason":' + "[" * 100_000
        _send(handler, {"choices": [{"message": {"role": "assistant", "content": text}}]})


def _send(handler: BaseHTTPRequestHandler, value: Any) -> None:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    try:
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)
    except OSError:
        pass  # the client gave up, as it should


def _letters(text: str) -> list[float]:
    """A vector that is the same for texts of the same letters."""
    return [text.lower().count(c) / (len(text) or 1) for c in "abcdefghijklmnopqrstuvwxyz"]
