"""A run that goes on waits for a cluster that does not answer; one that begins says so at once."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.run_folder import RunFolder
from unbroken.cluster.contract import ClusterAway, NodeRefuses, Request
from unbroken.cluster.hosts.cluster import HostsCluster
from unbroken.cluster.hosts.options import HostsOptions
from unbroken.cluster.kubernetes.api import ApiUnanswered, ApiUnavailable, Refused, _refusal
from unbroken.cluster.slurm.controller.commands import NoAnswer, NotReached, Slurm, SlurmRefused
from unbroken.errors import RunError, RunInterrupted
from unbroken.progress import ClusterChoice, RunDir
from unbroken.progress.records.state import RunState
from unbroken.recover import start
from unbroken.recover.start import make_spec, run_supervised
from unbroken.recover.supervise.nodes import acquiring
from unbroken.recover.supervise.nodes import away as cluster_away
from unbroken.recover.supervise.record.clock import Clock
from unbroken.recover.supervise.record.stop_request import StopRequest
from unbroken.recover.supervise.screen.view import Lines

COMMAND = ["train.py", "--lr", "3e-4"]
"""That of `RunFolder`."""


class Asked:
    """A cluster that is away twice, in two ways, and then lets nobody in."""

    socket_folder = None

    def __init__(self) -> None:
        self.left: list[RunError] = [RunError("no user there"), ClusterAway("no route"), ClusterAway("no answer"), ClusterAway("no answer")]  # fmt: skip
        self.count = 0

    def check(self, request: Request) -> None:
        self.count += 1
        raise self.left.pop()

    async def acquire(self) -> None:
        self.check(Request(1))


class Said(Lines):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Asked:
    made = Asked()
    monkeypatch.setattr(start, "_open_cluster", lambda *_: made)
    monkeypatch.setattr(start, "AWAY_AGAIN_S", 0.001)
    monkeypatch.setattr(cluster_away, "AWAY_AGAIN_S", 0.001)
    return made


def begun(tmp_path: Path) -> RunFolder:
    run = RunFolder(RunDir(tmp_path / "run"), nodes=1, nproc=1, spares=0)
    run.attempt()
    run.run_dir.token.write_text("0" * 32)
    run.run_dir.token.chmod(0o600)
    return run


def test_a_supervisor_that_follows_waits_and_says_why(tmp_path: Path, away: Asked) -> None:
    run_dir, said = begun(tmp_path).run_dir, Said()
    with pytest.raises(RunError, match="no user there"):
        run_supervised(run_dir, make_spec(COMMAND, cluster=ClusterChoice("hosts")), view=said, cwd=tmp_path)
    assert away.count == 4
    waits = [x for x in said.lines if "goes on as soon as" in x]
    assert [w.split(";")[0] for w in waits] == ["no answer", "no route"], "each once"


def test_it_goes_on_without_a_node_that_refuses(
    tmp_path: Path, away: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    away.left = [NodeRefuses("its key is another one", where="h1")]
    run_dir, said = begun(tmp_path).run_dir, Said()
    beyond = pytest.raises(RunError, match="beyond it")

    def settle(*_: Any, **__: Any) -> None:
        raise RunError("beyond it")

    monkeypatch.setattr(start, "settle_spec", settle)
    with beyond:
        run_supervised(run_dir, make_spec(COMMAND, cluster=ClusterChoice("hosts")), view=said, cwd=tmp_path)
    assert said.lines == ["its key is another one (h1). The run goes on with the others"]


def test_the_first_one_does_not(tmp_path: Path, away: Asked) -> None:
    run_dir = RunDir(tmp_path / "run")
    with pytest.raises(ClusterAway, match="no answer"):
        run_supervised(run_dir, make_spec(COMMAND, cluster=ClusterChoice("hosts")), view=Said(), cwd=tmp_path)
    assert away.count == 1 and not run_dir.spec.exists(), "nothing was written"


@pytest.mark.parametrize("attempt", [0, 1])
def test_nodes_that_are_asked_for_are_waited_for_alike(attempt: int, away: Asked) -> None:
    said: list[str] = []

    async def nothing(*_: Any) -> None:
        return

    async def ask() -> bool:
        teller = SimpleNamespace(read_history=lambda now: None, avoided=set())
        fleet = SimpleNamespace(acquire=away.acquire, runs_on=lambda names: False)
        term = SimpleNamespace(check=lambda: None)
        stop = StopRequest(Clock(), asyncio.Event())
        fields: Any = (fleet, RunState(attempt=attempt), term, stop, teller, None, Clock(), said.append)
        return await acquiring.acquire(*fields)

    with pytest.raises(RunError, match="no user there" if attempt else "no answer"):
        asyncio.run(ask())
    assert away.count == (4 if attempt else 1) and len(said) == (2 if attempt else 0)


def test_hosts_that_cannot_be_reached_are_away(tmp_path: Path) -> None:
    from unbroken.cluster.registry import make_cluster

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    pytest.importorskip("asyncssh")
    (tmp_path / "HOSTS").write_text(f"h0 address=127.0.0.1 port={port}\n")
    cluster = make_cluster("hosts", "0" * 12, {"file": str(tmp_path / "HOSTS")})
    with pytest.raises(ClusterAway, match="no host can be reached"):
        cluster.check(Request(1))


@pytest.mark.parametrize(
    ("said", "kind"),
    [("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", NotReached),
     ("slurm_load_node error: Socket timed out on send/recv operation", NotReached),
     ("slurm_load_jobs error: Slurm backup controller in standby mode", NotReached),
     ("slurm_load_jobs error: Zero Bytes were transmitted or received", NotReached),
     ("scontrol: fatal: Could not establish a configuration source", NotReached),
     ("slurm_load_jobs error: Invalid job id specified", SlurmRefused)],
)  # fmt: skip
def test_what_slurm_says_of_its_controller(said: str, kind: type, tmp_path: Path) -> None:
    (tmp_path / "squeue").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    (tmp_path / "squeue").chmod(0o700)
    with pytest.raises(SlurmRefused) as error:
        asyncio.run(Slurm().call(str(tmp_path / "squeue")))
    assert type(error.value) is kind and isinstance(error.value, ClusterAway) is (kind is NotReached)
    assert issubclass(NoAnswer, ClusterAway)


@pytest.mark.parametrize(
    ("status", "away"), [(503, True), (502, True), (504, True), (500, False), (403, False)]
)
def test_what_stands_before_the_api_of_kubernetes(status: int, away: bool) -> None:
    for body in (b"no upstream", b'{"kind": "Status", "reason": "x", "message": "y"}'):
        found = _refusal(status, body, "https://api")
        assert isinstance(found, Refused) and isinstance(found, ApiUnavailable | ClusterAway) is away
    assert issubclass(ApiUnanswered, ClusterAway)


@pytest.mark.parametrize(
    "sig",
    [signal.SIGUSR1, *(pytest.param(s, marks=pytest.mark.slow) for s in (signal.SIGINT, signal.SIGTERM))],
)
def test_a_stop_ends_the_wait_and_leaves_the_run_as_it_was(sig: signal.Signals, tmp_path: Path) -> None:
    pytest.importorskip("asyncssh")
    run_dir = begun(tmp_path).run_dir
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    (tmp_path / "HOSTS").write_text(f"h0 address=127.0.0.1 port={port}\n")
    before = run_dir.spec.read_text(), [*run_dir.terms.iterdir()]
    options = ["--run-dir", str(run_dir.path), "--nodes", "1", "--nproc", "1", "--cluster", f"hosts,file={tmp_path}/HOSTS"]  # fmt: skip
    waiting = subprocess.Popen(
        [sys.executable, "-m", "unbroken", "run", *options, "--", *COMMAND],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert waiting.stdout is not None
        said = next((line for line in waiting.stdout if "goes on as soon as that is over" in line), "")
        waiting.send_signal(sig)
        said += waiting.communicate(timeout=60)[0]
    finally:
        waiting.kill()
        waiting.wait()
    assert waiting.returncode == RunInterrupted.exit_code, said
    assert "The same command goes on" in said and "Traceback" not in said
    assert (run_dir.spec.read_text(), [*run_dir.terms.iterdir()]) == before


@pytest.mark.parametrize(
    ("hosts", "kind"),
    [
        (["up", "refuses"], NodeRefuses),
        (["refuses", "away"], ClusterAway),
        (["refuses", "refuses"], RunError),
    ],
)
def test_a_host_that_refuses_is_passed_over_only_where_another_is_there(
    hosts: list[str], kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever claimed a run and had no host at all would keep it from those who have."""
    links = {
        f"h{i}": SimpleNamespace(
            up=h == "up", slow=False, refused=h == "refuses", why=f"h{i} {h}", hint="",
            host=SimpleNamespace(name=f"h{i}"), report=None,
        )
        for i, h in enumerate(hosts)
    }  # fmt: skip

    async def nothing(self: HostsCluster, *_: Any) -> None:
        self._links = links  # type: ignore[assignment]

    async def close(self: HostsCluster) -> None:
        return

    monkeypatch.setattr(HostsCluster, "_reach_all", nothing)
    monkeypatch.setattr(HostsCluster, "_check_size", lambda *_: None)
    monkeypatch.setattr(HostsCluster, "close", close)
    cluster = HostsCluster("0" * 12, HostsOptions(hosts=("h0", "h1")))
    with pytest.raises(RunError) as error:
        asyncio.run(cluster._try(Request(1)))
    assert type(error.value) is kind
