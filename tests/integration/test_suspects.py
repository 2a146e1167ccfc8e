"""A whole run that is told of: a hang whose node is not certain (two moves, with real probes), a lost node, webhook, metrics, node history."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
NewRun = Any
Told = list[dict[str, Any]]


@pytest.fixture
def webhook() -> Iterator[tuple[str, Told]]:
    """(address, what it was told)."""
    told: Told = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook", told
    server.shutdown()
    server.server_close()


def until(condition: Callable[[], object], within: float) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.1)


@pytest.mark.timeout(400)
def test_a_run_with_suspects_tells_the_webhook_the_metrics_and_the_history(
    new_run: NewRun, webhook: tuple[str, Told], tmp_path: Path
) -> None:
    address, told = webhook
    history = tmp_path / "history"
    (tmp_path / "policy.toml").write_text(f'[policy]\nhistory = "{history}"\non_doubt = "test"\n')
    run = new_run(
        "--nodes", "2", "--spares", "2", "--hang-after", "4s", "--suspect-after", "1s", "--no-warm", "--policy", "policy.toml",
        steps=6000, seconds=0.1,
    ).start(UNBROKEN_WEBHOOK=address)  # fmt: skip
    run.until_step(10)
    first = run.journal("attempt")[0]["slots"]
    run.faults.stop_rank(1)

    # The first move: its node leaves at once, and the run goes on on a spare.
    until(lambda: run.journal("resumed"), 120)
    (suspect,) = run.journal("suspect")
    assert suspect["node"] == first[1] and first[1] not in run.journal("attempt")[1]["slots"]
    # The second: tested aside by real probes, nothing is found, and it is a spare again.
    until(lambda: run.journal("cleared"), 600)
    (cleared,) = run.journal("cleared")
    assert cleared["node"] == first[1] and cleared["innocent"] and cleared["repeats"] >= 10
    assert not run.journal("cordon")

    run.faults.kill_node(run.journal("attempt")[1]["slots"][0])
    until(lambda: len(run.journal("resumed")) == 2, 120)
    until(lambda: _metrics(run).get("unbroken_innocent_node_seconds_total", 0) > 0, 30)
    metrics = _metrics(run)
    assert metrics["unbroken_incidents_total"] == 2 and metrics["unbroken_node_faults_total"] == 1
    assert metrics["unbroken_suspect_nodes"] == 0 and metrics["unbroken_up"] == 1
    run.process.send_signal(signal.SIGINT)
    assert run.wait(120) == 11
    assert _metrics(run)["unbroken_up"] == 0

    assert [m["kind"] for m in told] == ["incident", "incident", "end"] and told[2]["how"] == "interrupted"
    assert [m["incident"] for m in told[:2]] == [1, 2] and "is tested aside" in told[0]["why"]
    assert address not in run.output
    shown = _unbroken("nodes", "history", str(history), "--json")
    assert run.journal("lost")[0]["node"] in shown
    report = json.loads(_unbroken("report", str(run.run_dir.path), "--json"))
    assert report["node_faults"] == 1 and report["interventions_avoided"] == 2
    assert report["innocent_node_hours"] == pytest.approx(cleared["seconds"] / 3600, abs=1e-5)


def _metrics(run: Any) -> dict[str, float]:
    lines = run.run_dir.metrics.read_text().splitlines() if run.run_dir.metrics.exists() else []
    return {x.partition("{")[0]: float(x.rpartition(" ")[2]) for x in lines if not x.startswith("#")}


def _unbroken(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "unbroken", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
