"""Processes that try to escape: each way of holding them against each fault; none is left, none runs beside the next."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.keepers import until
from unbroken.cluster.holding.cgroups import Cgroups

from .conftest import RunUnderTest

pytestmark = [pytest.mark.breakers, pytest.mark.integration]
NewRun = Callable[..., RunUnderTest]

SCRIPT = """
import ctypes, os, subprocess, sys, time
import unbroken
steps, place = int(sys.argv[1]), sys.argv[2]
attempt, rank = os.environ["UNBROKEN_ATTEMPT"], os.environ["RANK"]

def alive(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

for name in os.listdir(place):
    before, who, pid = name.split("-")
    if before != attempt and who == rank and alive(pid):
        print("BESIDE", name, flush=True)

def note(pid=None):
    open(f"{place}/{attempt}-{rank}-{pid or os.getpid()}", "w").close()

def renamed():
    note()
    libc = ctypes.CDLL(None)
    stat = open("/proc/self/stat").read().rpartition(")")[2].split()
    low, high = int(stat[47]), int(stat[48])
    ctypes.memset(low, 0, high - low)          # what setproctitle comes to
    time.sleep(300)

def daemon():
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 100)
        note()
        os.execve("/bin/sleep", ["sleep", "300"], {})
    os._exit(0)

def deaf():
    import signal
    for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(s, signal.SIG_IGN)
    note()
    os.execve("/bin/sleep", ["sleep", "300"], {})

for child in (renamed, daemon, deaf):
    if os.fork() == 0:
        child()
note(subprocess.Popen(["env", "-i", "sleep", "300"]).pid)
while len([n for n in os.listdir(place) if n.startswith(f"{attempt}-{rank}-")]) < 4:
    time.sleep(0.01)
run = unbroken.attach(total_steps=steps)
for step in range(1, steps + 1):
    time.sleep(0.05)
    run.step(step, loss=1.0)
    if run.should_stop(step):
        sys.exit(unbroken.EXIT_STOPPED)
"""
TWO = ("--nodes", "2", "--nproc", "1")


class Escaping:
    """A run whose ranks start children that shed every mark, and the list of those children."""

    def __init__(self, run: RunUnderTest, place: Path) -> None:
        self.run, self.place = run, place

    def children(self) -> list[int]:
        """All that ever started and still live."""
        found = []
        for name in os.listdir(self.place):
            pid = int(name.split("-")[2])
            try:
                stat = Path(f"/proc/{pid}/stat").read_text()
            except OSError:
                continue
            if stat.rpartition(")")[2].split()[0] not in "ZX":
                found.append(pid)
        return found

    def logs(self) -> str:
        return "".join(p.read_text(errors="replace") for p in self.run.run_dir.attempts.rglob("rank-*.log"))


@pytest.fixture
def escaping(new_run: NewRun, tmp_path: Path) -> Iterator[Callable[..., Escaping]]:
    made: list[Escaping] = []

    def make(kind: str, *options: str, steps: int = 40) -> Escaping:
        if kind == "cgroup" and Cgroups.find("testnone")[0] is None:
            pytest.skip("this machine cannot hold processes by a cgroup")
        place = tmp_path / "children"
        place.mkdir()
        run = new_run(*TWO, "--ownership", kind, *options, script=SCRIPT, args=[str(steps), str(place)])
        made.append(Escaping(run, place))
        return made[-1]

    yield make
    for e in made:
        e.run.end()
        for pid in e.children():
            os.kill(pid, signal.SIGKILL)


def ends_clean(e: Escaping) -> None:
    assert e.run.wait() == 0, e.run.output
    assert e.children() == [], "a process outlived the run"
    assert "BESIDE" not in e.logs(), "a process of an attempt lived beside the next"
    assert e.run.faults.left_over() == []


HELD_BY = {"cgroup": "a cgroup", "parent": "a small parent", "marks": "marks in their environment only"}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k == "cgroup" else pytest.mark.slow) for k in HELD_BY]
)
def test_nothing_is_left_at_the_end(escaping: Callable[..., Escaping], kind: str) -> None:
    e = escaping(kind, steps=40)
    e.run.start()
    e.run.until_step(3)
    until(lambda: len(e.children()) == 8)  # else nothing tried to escape, and this test shows nothing
    if kind != "marks":
        ends_clean(e)
    assert e.run.wait() == 0
    assert f"processes are held by {HELD_BY[kind]}" in e.run.output
    # What forks twice and sheds its marks is lost to marks: then that is said, of each node.
    assert e.run.output.count("it is not proven that nothing of the run is left") == 2 * (kind == "marks")


FAULTS: dict[str, Callable[[Escaping], object]] = {
    "rank": lambda e: e.run.faults.kill_rank(1),
    "agent": lambda e: e.run.faults.kill_agent("node-001"),
    "keeper": lambda e: (e.run.faults.kill_keeper("node-001"), e.run.faults.kill_rank(1)),
    "node": lambda e: e.run.faults.kill_node("node-001"),
}


@pytest.mark.parametrize("kind", ["cgroup", pytest.param("parent", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "fault", ["agent", *(pytest.param(f, marks=pytest.mark.slow) for f in FAULTS if f != "agent")]
)
def test_nothing_runs_beside_the_next_attempt(
    escaping: Callable[..., Escaping], kind: str, fault: str
) -> None:
    e = escaping(kind)
    e.run.start()
    e.run.until_step(5)
    FAULTS[fault](e)
    ends_clean(e)
    assert e.run.attempts() == 2
    assert e.run.journal("unproven") == [] and "not proven" not in e.run.output


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cgroup", "parent"])
def test_nothing_is_left_after_ctrl_c(escaping: Callable[..., Escaping], kind: str) -> None:
    e = escaping(kind, steps=2000)
    e.run.start()
    e.run.until_step(5)
    assert e.run.process is not None
    e.run.process.send_signal(signal.SIGINT)
    assert e.run.wait() == 11, e.run.output
    assert e.children() == []
    assert e.run.faults.left_over() == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cgroup", "parent"])
@pytest.mark.parametrize("what", ["supervisor", "supervisor and agents", "everything"])
def test_the_same_command_after_kill_9_finds_what_was_left(
    escaping: Callable[..., Escaping], kind: str, what: str
) -> None:
    e = escaping(kind, steps=80)
    e.run.start()
    e.run.until_step(5)
    faults = e.run.faults
    faults.kill_supervisor()
    e.run.wait()
    if what != "supervisor":
        for role in ("agent",) if what == "supervisor and agents" else ("agent", "keeper", "rank"):
            for p in faults.processes(role):
                os.kill(p.pid, signal.SIGKILL)
    assert e.children()
    e.run.start()
    ends_clean(e)
    assert e.run.attempts() == (1 if what == "supervisor" else 2)


@pytest.mark.slow
def test_a_killed_parent_leaves_its_node_unproven_and_that_is_said(
    escaping: Callable[..., Escaping], eventually: Callable[..., None]
) -> None:
    e = escaping("parent")
    e.run.start()
    e.run.until_step(5)
    time.sleep(1.5)  # one census
    assert len(e.run.faults.kill_parents()) == 2
    e.run.faults.kill_agent("node-001")
    eventually(lambda: e.run.journal("unproven"), within=30)
    assert "was killed, and with it the list" in e.run.journal("unproven")[0]["why"]
