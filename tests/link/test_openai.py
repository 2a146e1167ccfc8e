"""One client for every OpenAI-compatible endpoint: what may pass is tried again, what is cut off is no answer, the key stays."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

import unbroken
from unbroken.diagnose.assist.model import AssistantConfig, HttpModel, ModelUnreachable
from unbroken.errors import DiagnoseError
from unbroken.link.openai import Endpoint, EndpointRefused, Retry
from unbroken.testing.fake_endpoint import FakeEndpoint, broken, overloaded

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def server() -> Iterator[FakeEndpoint]:
    with FakeEndpoint(model="default", reply=lambda messages: "here") as s:
        yield s


def test_there_is_one_client() -> None:
    root = Path(unbroken.__file__).parent
    speak = [p for p in root.rglob("*.py") if re.search(r"POST.*/chat/completions", p.read_text())]
    assert [p.relative_to(root).as_posix() for p in speak] == ["link/openai.py"]


def test_a_busy_server_is_asked_again_also_by_a_diagnosis(server: FakeEndpoint) -> None:
    model = HttpModel(AssistantConfig(server.url))
    pauses: list[float] = []
    model.retry.sleep = pauses.append
    server.misbehave(overloaded(1, "7"), broken(1, 503))
    assert model(HELLO) == "here"
    assert len(pauses) == 2 and pauses[0] == 7.0
    server.misbehave(broken(3, 503))
    with pytest.raises(DiagnoseError, match=r"HTTP 503: not today \(attempt 3 of 3\)"):
        model(HELLO)


def test_a_diagnosis_does_not_wait_longer_than_it_may(server: FakeEndpoint) -> None:
    model = HttpModel(AssistantConfig(server.url, timeout_s=5))
    pauses: list[float] = []
    model.retry.sleep = pauses.append
    server.misbehave(overloaded(1, "3600"))
    assert model(HELLO) == "here" and pauses == [5.0]


def test_a_server_that_is_gone_is_asked_once_by_a_diagnosis() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    model = HttpModel(AssistantConfig(f"http://127.0.0.1:{port}"))
    model.retry.sleep = lambda seconds: pytest.fail("it waits for a server that is not there")
    with pytest.raises(ModelUnreachable, match="cannot reach"):
        model(HELLO)


def test_pauses_double_and_at_once_means_at_once() -> None:
    pauses: list[float] = []
    asked: list[int] = []

    def ask(attempt: int) -> str:
        asked.append(attempt)
        if attempt < 4:
            raise EndpointRefused("no", again=True, retry_after=0.0 if attempt == 3 else None)
        return "yes"

    assert Retry(5, pauses.append)(ask) == "yes"
    assert asked == [0, 1, 2, 3, 4]
    assert all(0.5 * 2**i * 0.5 <= p <= 0.5 * 2**i * 1.5 for i, p in enumerate(pauses[:3])) and pauses[3] == 0


@pytest.mark.parametrize("reply", [b'{"choices": [{"mes', b""])
def test_a_reply_that_is_cut_off_is_no_answer_and_the_next_call_is_not_confused(reply: bytes) -> None:
    whole = json.dumps({"choices": [{"message": {"content": "whole"}}]}).encode()
    replies = iter([(reply, 100), (whole, len(whole))])

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            body, said = next(replies)
            self.send_response(200)
            self.send_header("Content-Length", str(said))
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = len(body) < said

        def log_message(self, format: str, *args: object) -> None: ...

    with serving(Handler) as url:
        endpoint = Endpoint(url, "m")
        with pytest.raises(EndpointRefused) as e:
            endpoint.chat(HELLO)
        assert e.value.again
        assert endpoint.chat(HELLO) == "whole"
        endpoint.close()


def test_a_reply_that_is_too_long_is_refused(server: FakeEndpoint) -> None:
    server.reply = lambda messages: "x" * 10_000
    endpoint = Endpoint(server.url, "default", longest=5000)
    with pytest.raises(EndpointRefused, match="a reply larger than"):
        endpoint.chat(HELLO)
    server.reply = lambda messages: "short"
    assert endpoint.chat(HELLO) == "short"


def test_the_environments_proxy_is_asked_unless_it_is_not_for_this_host(
    server: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Proxy(BaseHTTPRequestHandler):
        seen: ClassVar[list[tuple[str, str]]] = []

        def do_POST(self) -> None:
            self.seen.append((self.path, self.headers.get("Proxy-Authorization", "")))
            body = json.dumps({"choices": [{"message": {"content": "by proxy"}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    with serving(Proxy) as url:
        monkeypatch.setenv("http_proxy", url.replace("http://", "http://me:pass@"))
        monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
        assert Endpoint("http://models.invalid/v1", "m").chat(HELLO) == "by proxy"
        assert Proxy.seen == [("http://models.invalid:80/v1/chat/completions", "Basic bWU6cGFzcw==")]
        assert Endpoint(server.url, "default").chat(HELLO) == "here"


@pytest.mark.parametrize("key", ["sk-first\nsk-second", "sk-schlüssel"])
def test_a_key_that_fits_no_header_is_not_shown(
    server: FakeEndpoint, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("UNBROKEN_MODEL_KEY", key)
    with pytest.raises(DiagnoseError, match="UNBROKEN_MODEL_KEY") as e:
        HttpModel(AssistantConfig(server.url))(HELLO)
    assert "sk-" not in str(e.value)
    monkeypatch.setenv("UNBROKEN_MODEL_KEY", "sk-one\n")
    assert HttpModel(AssistantConfig(server.url))(HELLO) == "here"


class serving:
    """A server of one kind of request, as a context manager that gives its address."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True

    def __enter__(self) -> str:
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
