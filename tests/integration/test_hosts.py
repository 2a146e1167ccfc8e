"""Runs over hosts with networks of their own: crashes, cut links, deaf links, lost stores and supervisors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("asyncssh", reason="needs asyncssh: pip install -r requirements/all.txt")

from unbroken.cluster.holding.processes import marked
from unbroken.progress import RunDir, read_journal, read_spec, read_terms
from unbroken.progress.records.incident import read_incidents
from unbroken.testing.faults import RunFaults

from ..support import net_hosts
from ..support.net_hosts import NetHosts

pytestmark = [
    pytest.mark.integration, pytest.mark.slow,
    pytest.mark.skipif(bool(net_hosts.why_not()), reason=net_hosts.why_not() or "it can"),
]  # fmt: skip

# Ranks wait for each other in each step at a hub of rank 0's, as in a collective, where torch's takes seconds to import.
SCRIPT = """
import os, socket, sys, time
from pathlib import Path
import unbroken

steps, rank, world = int(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
here = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
run = unbroken.attach(total_steps=steps)
kept = sorted(Path(os.environ["UNBROKEN_RUN_DIR"]).glob("attempts/*/output/step"))
first = max([int(p.read_text()) for p in kept], default=0) + 1
if rank == 0:
    hub = socket.create_server(here, backlog=world)
    others = [hub.accept()[0] for _ in range(world - 1)]
else:
    while True:
        try:
            link = socket.create_connection(here, 5)
            break
        except OSError:
            time.sleep(0.05)
    link.settimeout(None)
for step in range(first, steps + 1):
    time.sleep(0.1)
    if rank == 0:
        for other in others:
            if not other.recv(1):
                raise ConnectionError("a peer closed its connection")
        for other in others:
            other.sendall(b".")
        aside = Path(os.environ["UNBROKEN_OUTPUT"]) / ".step"
        aside.write_text(str(step))
        aside.rename(aside.with_name("step"))
    else:
        link.sendall(b".")
        if not link.recv(1):
            raise ConnectionError("rank 0 closed its connection")
    run.step(step, loss=1.0 / step, tokens=100)
    if run.should_stop(step):
        sys.exit(unbroken.EXIT_STOPPED)
"""


class HostsRun:
    """One run on three hosts and a spare; its supervisor is on host 0, and on another after that."""

    def __init__(self, folder: Path, hosts: NetHosts, steps: int = 100_000) -> None:
        self.folder, self.hosts, self.steps = folder, hosts, steps
        (folder / "script.py").write_text(SCRIPT)
        self.run_dir = RunDir(folder / "run")
        self.cluster = hosts.cluster([1, 2, 3, 4])
        self.process: subprocess.Popen[str] | None = None
        self.log = folder / "supervisor.log"

    def start(self, host: int = 0, *options: str) -> None:
        command = [
            sys.executable, "-m", "unbroken", "run", "--run-dir", str(self.run_dir.path), "--nodes", "3", "--spares", "1",
            "--cluster", self.cluster, "--lease", "5s", "--hang-after", "6s", "--suspect-after", "2s", *options,
            "--", "script.py", str(self.steps),
        ]  # fmt: skip
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                self.hosts.argv(host, command), cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True,
                env={**os.environ, "XDG_STATE_HOME": str(self.folder / "state")},
            )  # fmt: skip

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def journal(self, kind: str) -> list[dict[str, Any]]:
        return [r for r in read_journal(self.run_dir).records if r["kind"] == kind]

    def until(self, what: Callable[[], Any], within: float = 60) -> Any:
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            if found := what():
                return found
            assert self.process is not None and self.process.poll() is None, self.said()
            time.sleep(0.05)
        raise TimeoutError(
            self.said() + "\n".join(p.read_text()[-2000:] for p in self.run_dir.path.glob("agents/*"))
        )

    def step(self) -> int:
        kept = sorted(self.run_dir.path.glob("attempts/*/output/step"))
        return int(kept[-1].read_text()) if kept else 0

    def attempt(self) -> dict[str, Any]:
        return self.until(lambda: self.journal("attempt"), 120)[-1]  # type: ignore[no-any-return]

    def trains(self) -> dict[str, Any]:
        """Waits until the newest attempt has made steps; that attempt."""
        self.until(lambda: self.journal("attempt"), 120)
        self.until(lambda: self.journal("first_step") and self.journal("first_step")[-1]["attempt"] == self.attempt()["attempt"])  # fmt: skip
        before = self.step()
        self.until(lambda: self.step() > before + 2)
        return self.attempt()

    def survive(self, fault: Callable[[], None], within: float = 60) -> dict[str, Any]:
        """Does it, and waits until training is past it; the incident, with how long it took to be noticed and to train again."""
        before = len(self.journal("resumed"))
        fault()
        at = time.time()
        self.until(lambda: len(self.journal("resumed")) > before, within)
        self.trains()
        incident: dict[str, Any] = read_incidents(self.run_dir)[-1]
        incident["noticed_s"] = incident["detected"] - at
        incident["trains_s"] = time.time() - at
        return incident

    def processes(self, node: str, role: str) -> list[int]:
        return [p.pid for p in marked(read_spec(self.run_dir.spec).run_id, node=node) if p.role == role]

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        if self.run_dir.spec.exists():
            RunFaults(self.run_dir).end_everything()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetHosts]:
    """h0 for the supervisor, three and a spare, and one for a standby supervisor."""
    with net_hosts.net_hosts(tmp_path_factory.mktemp("hosts"), 6) as made:
        (behind := made.folder / "behind").mkdir()
        (behind / "sitecustomize.py").write_text(BEHIND)
        made.serve_ssh(3, PYTHONPATH=str(behind))
        yield made


BEHIND = """
import time
real, real_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: real() - 60, lambda: real_ns() - 60 * 10**9
"""
"""The clock of one host is a minute behind."""


@pytest.fixture
def run(tmp_path: Path, hosts: NetHosts) -> Iterator[HostsRun]:
    for i in range(hosts.count):
        hosts.heal(i)
        if i in (1, 2, 4) and not hosts.pids(i):
            hosts.serve_ssh(i)
    hosts.wait_for_ssh([1, 2, 3, 4])
    made = HostsRun(tmp_path, hosts)
    yield made
    for log in made.run_dir.path.glob("agents/h?.log"):
        print(f"--- {log.name}\n{log.read_text()[-3000:]}")
    made.end()
    print(made.said())


def number_of(node: str) -> int:
    return int(node.removeprefix("h"))


def test_a_run_survives_what_happens_to_hosts_and_links(run: HostsRun, hosts: NetHosts) -> None:
    """One run, the clock of one of its hosts a minute behind: a worker is stopped, an agent killed, a link cut, another slow, and
    the host of rank 0 crashes."""
    run.start(0, "--record", "shared")
    attempt = run.trains()
    assert attempt["slots"] == ["h1", "h2", "h3"]

    (worker,) = run.processes("h2", "rank")
    hang = run.survive(lambda: os.kill(worker, signal.SIGSTOP))
    assert hang["kind"] == "hung" and hang["noticed_s"] < 12
    assert run.attempt()["slots"] == ["h1", "h4", "h3"], "who may be at fault leaves at once"

    (agent,) = run.processes("h3", "agent")
    lost = run.survive(lambda: os.kill(agent, signal.SIGKILL))
    assert lost["kind"] == "agent_lost" and lost["noticed_s"] < 3

    cut = run.survive(lambda: hosts.cut(4))
    assert cut["kind"] == "node_lost" and cut["nodes"] == {"h4": "unreachable"}, cut
    assert cut["noticed_s"] < 5 + 3 and run.attempt()["slots"] == ["h1", "h2", "h3"]
    assert [r["innocent"] for r in run.journal("cleared")] == [False], (
        "no node was left to test the suspect with"
    )
    run.until(lambda: not run.processes("h4", "rank"), 20)  # its lease has ended it
    hosts.heal(4)

    hosts.slow(2)
    before = len(run.journal("incident"))
    at = run.step()
    run.until(lambda: run.step() > at + 30)
    assert len(run.journal("incident")) == before, "a slow link is no failure"

    store = run.survive(lambda: hosts.crash(1), 90)
    assert store["nodes"] == {"h1": "unreachable"} and store["noticed_s"] < 5 + 3
    assert run.attempt()["slots"][0] == "h4", "the one whose link was cut takes the place of rank 0's host"
    run.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]
    assert run.process.wait(60) == 11, run.said()  # type: ignore[union-attr]
    assert not marked(read_spec(run.run_dir.spec).run_id), "nothing is left on any host"
    for name, i in {"stopped": hang, "agent": lost, "cut": cut, "store": store}.items():
        print(f"{name}: noticed after {i['noticed_s']:.1f} s, training after {i['trains_s']:.1f} s")


def test_a_standby_supervisor_takes_over_and_a_deaf_host_is_left(run: HostsRun, hosts: NetHosts) -> None:
    run.start(0, "--record", "shared", "--lease", "40s")
    run.trains()
    hosts.crash(0)
    assert run.process is not None
    run.process.wait(10)
    run.start(5, "--record", "shared", "--lease", "5s")
    run.until(lambda: "took over attempt 1: 3 ranks never stopped" in run.said())
    assert [t.host for t in read_terms(run.run_dir)] == ["h0", "h5"]
    at = run.step()
    run.until(lambda: run.step() > at + 5)
    deaf = run.survive(lambda: hosts.deafen(2, [5]))
    assert deaf["nodes"] == {"h2": "unreachable"} and run.attempt()["slots"] == ["h1", "h4", "h3"]


def test_a_record_on_the_lost_hosts_own_disk_is_no_ones_to_take_over(run: HostsRun, hosts: NetHosts) -> None:
    run.start(0, "--record", "own-disk")
    run.trains()
    assert "losing this host ends the run" in run.said()
    hosts.crash(0)
    assert run.process is not None
    run.process.wait(10)
    run.start(5, "--record", "own-disk")
    assert run.process.wait(60) == 13
    assert "lies on the own disk of h0" in run.said() and "unbroken run --from" in run.said()
