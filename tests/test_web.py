"""No client of ours takes a redirect: neither a key nor a log goes to a host that the user did not name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from unbroken.checkpoint.storage.s3 import S3Storage
from unbroken.diagnose.assist.model import AssistantConfig, HttpModel
from unbroken.errors import DiagnoseError, InputError, UnbrokenError
from unbroken.evaluate.model.sources import open_source
from unbroken.link.openai import Endpoint, EndpointRefused
from unbroken.link.web import points_elsewhere
from unbroken.telemetry.readers import prometheus

KEY = "key-that-stays"


class Servers:
    """One that redirects everything with `code`, and the one that it points to."""

    def __init__(self) -> None:
        self.code = 302
        self.reached: list[str] = []
        self.asked = 0
        outer = self

        class Elsewhere(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.reached.append(f"{self.command} {self.path} {dict(self.headers)}")
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            do_POST = do_PUT = do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None: ...

        class Here(Elsewhere):
            def do_GET(self) -> None:
                outer.asked += 1
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(outer.code)
                self.send_header(
                    "Location", f"http://localhost:{outer.elsewhere.server_address[1]}{self.path}"
                )
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_POST = do_PUT = do_HEAD = do_GET

        self.elsewhere = ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
        self.here = ThreadingHTTPServer(("127.0.0.1", 0), Here)
        for s in (self.here, self.elsewhere):
            threading.Thread(target=s.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.here.server_address[1]}"

    def close(self) -> None:
        for s in (self.here, self.elsewhere):
            s.shutdown()
            s.server_close()


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    for name in ("UNBROKEN_MODEL_KEY", "OPENAI_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):  # fmt: skip
        monkeypatch.setenv(name, KEY)
    s = Servers()
    yield s
    s.close()


def ask_model(s: Servers, tmp: Path) -> None:
    HttpModel(AssistantConfig(s.url + "/v1"))([{"role": "user", "content": "the log"}])


def ask_embedding(s: Servers, tmp: Path) -> None:
    HttpModel(AssistantConfig(s.url + "/v1", embedding="e")).embed(["the log"])


def ask_endpoint(s: Servers, tmp: Path) -> None:
    Endpoint(s.url + "/v1", "m").chat([{"role": "user", "content": "x"}])


def ask_prometheus(s: Servers, tmp: Path) -> None:
    list(prometheus.fetch(s.url, "up", 0.0, 60.0, 15.0))


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("ask", [ask_model, ask_embedding, ask_endpoint, ask_prometheus])
def test_a_redirect_is_an_error_and_reaches_nobody(
    servers: Servers, tmp_path: Path, ask: Callable[[Servers, Path], None], code: int
) -> None:
    servers.code = code
    with pytest.raises((UnbrokenError, EndpointRefused)) as said:
        ask(servers, tmp_path)
    assert servers.asked and not servers.reached
    assert KEY not in str(said.value)
    if isinstance(said.value, DiagnoseError | InputError):
        assert "redirects to http://localhost" in str(said.value)


def check_checkpoints(s: Servers) -> None:
    S3Storage.from_url("s3://bucket/x", options={"endpoint": s.url}, retries=0, request_timeout=5).check()


def list_a_model(s: Servers) -> None:
    open_source("s3://bucket/model").files()


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("use", [check_checkpoints, list_a_model])
def test_an_endpoint_that_points_elsewhere_is_refused_before_it_has_our_token(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, use: Callable[[Servers], None], code: int
) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setenv("AWS_ENDPOINT_URL", servers.url)
    servers.code = code
    with pytest.raises(UnbrokenError, match="sends readers on to http://localhost"):
        use(servers)
    assert servers.asked == 1 and not servers.reached, "one question, without credentials"


def test_an_endpoint_that_stays_or_says_nothing_is_left_to_its_client(servers: Servers) -> None:
    port = servers.elsewhere.server_address[1]
    assert points_elsewhere(f"http://127.0.0.1:{port}/bucket") is None
    assert points_elsewhere("http://127.0.0.1:1/bucket", timeout=2) is None
    assert points_elsewhere(servers.url + "/bucket") == "http://localhost"
