"""What a webhook is told: once, without secrets, and never waited for; metrics that Prometheus can read."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from unbroken.diagnose.redact.redact import Redactor
from unbroken.errors import UnsafeFile, UsageError
from unbroken.progress.records.incident import Incident
from unbroken.progress.records.state import RunState
from unbroken.progress.records.verdict import Category, Faulty, Outcome, Root, Verdict
from unbroken.recover.site.store import SiteHistory
from unbroken.recover.telling.messages import describe_end, describe_incident
from unbroken.recover.telling.metrics import render_metrics
from unbroken.recover.telling.teller import Teller
from unbroken.recover.telling.webhook import Webhook, find_address


class Receiver:
    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.answers: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.gate.wait(10)
                body = self.rfile.read(int(self.headers["Content-Length"]))
                code = outer.answers.pop(0) if outer.answers else 200
                if code == 200:
                    outer.got.append(json.loads(body))
                self.send_response(code)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/secret-path"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.gate.set()
    made.server.shutdown()
    made.server.server_close()


def an_incident(text: str = "CUDA error", action: str = "restart") -> Incident:
    verdict = Verdict(
        Outcome.FAILED, Category.INFRASTRUCTURE, "CUDAError", root=Root(text=text), faulty=Faulty("n1", 3, 1), confidence=0.8,
    )  # fmt: skip
    return Incident(2, 1, "failed", 40, 1.0, 2.0, verdict=verdict, action=action, why="restart 1 of 10")


def test_each_incident_and_the_end_are_told_once(receiver: Receiver, tmp_path: Path) -> None:
    history = SiteHistory(tmp_path / "site", "r1")
    teller = Teller("r1", webhook=Webhook(receiver.url, pause_s=0.01), history=history)
    teller.tell_incident(an_incident(), {"n1": ("GPU-a", "GPU-b")})
    teller.tell_end("completed", 100)
    first, last = receiver.got
    assert first["reason"] == "CUDAError" and first["node"] == "n1" and not first["needs_person"]
    assert "incident 2 after step 40" in first["text"] and last["how"] == "completed"
    assert history.score(2.0)["n1"].gpus == {"GPU-b": 0.8}


def test_a_receiver_that_hangs_or_refuses_holds_nothing_up(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.gate.clear()
    hook = Webhook(receiver.url, pause_s=0.01)
    began = time.monotonic()
    for i in range(200):
        hook.post({"text": str(i)})
    assert time.monotonic() - began < 1 and hook.lost > 100
    receiver.gate.set()
    assert hook.drain(10)
    receiver.answers = [503, 200, 404]
    hook.post({"text": "again"})
    hook.post({"text": "gone"})
    assert hook.drain(10) and receiver.got[-1] == {"text": "again"}
    assert "404" in caplog.text and "secret-path" not in caplog.text


def test_slack_gets_its_own_form() -> None:
    hook = Webhook("https://hooks.slack.com/services/x")
    assert hook._slack and not Webhook("https://example.com/x")._slack


def test_no_secret_is_in_a_message() -> None:
    token = "hf_" + "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC1dE3fG"
    message = describe_incident("r", an_incident(f"login failed with token={token}"), Redactor())
    assert token not in json.dumps(message)
    assert token not in json.dumps(describe_end("r", "stopped", 3, f"token={token}", Redactor()))
    assert describe_incident("r", an_incident(action="stop"), Redactor())["needs_person"]


def test_the_address_comes_from_a_file_of_this_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "hook"
    file.write_text("https://example.com/x\n")
    file.chmod(0o600)
    at = {"UNBROKEN_WEBHOOK_FILE": str(file)}
    assert find_address(at) == "https://example.com/x"
    assert find_address({**at, "UNBROKEN_WEBHOOK": "http://other/y"}) == "http://other/y"
    file.chmod(0o644)
    with pytest.raises(UnsafeFile):
        find_address(at)
    with pytest.raises(UsageError, match="no such file"):
        find_address({"UNBROKEN_WEBHOOK_FILE": str(tmp_path / "none")})
    with pytest.raises(UsageError) as e:
        find_address({"UNBROKEN_WEBHOOK": "hunter2"})
    assert "hunter2" not in str(e.value)


def test_metrics_are_in_prometheus_form() -> None:
    state = RunState(attempt=3, incident=2, step=41, durable=[(40, 3)], cordoned={"n1": "x"})
    text = render_metrics('r"1\n', state, 1.8e9, step=44, loss=2.5, step_s=0.25, up=True)
    line = re.compile(r'unbroken_[a-z_]+\{run="r\\"1\\n"(,[a-z]+="[^"]*")?\} -?[0-9.e+-]+')
    lines = text.splitlines()
    assert all(x.startswith("# ") or line.fullmatch(x) for x in lines), text
    assert 'unbroken_step{run="r\\"1\\n"} 44' in lines and "unbroken_updated_seconds" in text
    assert text.count("# TYPE unbroken_step gauge") == 1
