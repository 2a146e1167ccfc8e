"""What the processes of a run cannot shake off: each way of holding them against each way of escaping."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unbroken.cluster import Kind
from unbroken.cluster.holding.cgroups import Cgroups
from unbroken.cluster.holding.choice import choose, from_text
from unbroken.cluster.holding.descent import Marks, Parents
from unbroken.cluster.holding.processes import end, marked, read_stat
from unbroken.errors import RunError

from .owned_nodes import OwnedNodes

NODE = "node-000"
HELD = [Kind.CGROUP, Kind.PARENT]

AGENT = """
    import os, subprocess, sys, time
    from pathlib import Path
    from unbroken.cluster.holding.choice import from_text
    text, run_id, scratch, pids, rank = sys.argv[1:]
    owner = from_text(text, run_id, Path(scratch))
    marks = {**os.environ, "PIDS": pids}
    keeper = "import os, time; open(os.environ['PIDS'], 'a').write(f'keeper {os.getpid()}\\\\n'); time.sleep(300)"
    subprocess.Popen([sys.executable, "-c", keeper], env={**marks, "UNBROKEN_ROLE": "keeper"})
    start = owner.start_rank("node-000", 1, (sys.executable, "-c", rank))
    subprocess.Popen(start.argv, preexec_fn=start.enter, env={**marks, "UNBROKEN_ROLE": "rank"})
    start.close()
    while True:
        owner.take_census("node-000")
        time.sleep(0.1)
"""

NOTE = """
import ctypes, os, subprocess, sys, time
def note(what):
    with open(os.environ["PIDS"], "a") as f:
        f.write(f"{what} {os.getpid()}\\n")
"""

SLEEPS = """
note("rank")
time.sleep(300)
"""

ESCAPES = {
    "a process that overwrites its environment": """
if os.fork() == 0:
    note("child")
    # As setproctitle does: the kernel is told of another place for the environment.
    libc = ctypes.CDLL(None)
    empty = ctypes.create_string_buffer(4096)
    at = ctypes.addressof(empty)
    libc.prctl(35, 10, ctypes.c_ulong(at), 0, 0)
    libc.prctl(35, 11, ctypes.c_ulong(at + 1), 0, 0)
    stat = open("/proc/self/stat").read().rpartition(")")[2].split()
    lo, hi = int(stat[47]), int(stat[48])
    if hi > lo > 0:
        ctypes.memset(lo, 0, hi - lo)
    note("escaped")
    time.sleep(300)
""",
    "env -i": """
subprocess.Popen(["env", "-i", "sh", "-c", f"echo escaped $$ >> {os.environ['PIDS']}; exec sleep 300"])
""",
    "env -i, double fork and setsid": """
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.execve("/bin/sh", ["sh", "-c", f"echo escaped $$ >> {os.environ['PIDS']}; exec sleep 300"], {})
os.wait()
""",
    "respawning without end": """
if os.fork() == 0:
    os.setsid()
    note("escaped")
    until = time.monotonic() + 120
    program = (
        "import os, sys, time\\n"
        "while time.monotonic() < float(sys.argv[1]):\\n"
        "    if os.fork(): os._exit(0)\\n"
        "    time.sleep(0.005)\\n"
    )
    os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", program, str(until), "@" + os.environ["PIDS"]], {})
""",
}


class Held:
    """A node whose agent, keeper and rank run, and what they have written of themselves."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        self.pids = folder / f"pids-{secrets.token_hex(3)}"
        self.backend = OwnedNodes(f"test{secrets.token_hex(6)}", kind)
        self.folder = folder

    def launch(self, rank: str = SLEEPS) -> int:
        argv = [
            sys.executable, "-c", textwrap.dedent(AGENT), self.backend.ownership(), self.backend.run_id,
            str(self.backend.scratch(NODE).parent), str(self.pids), NOTE + rank,
        ]  # fmt: skip
        env = {"UNBROKEN_RUN_ID": self.backend.run_id, "UNBROKEN_NODE": NODE, "UNBROKEN_ROLE": "agent"}
        self.backend.launch(NODE, argv, env, self.folder / "agent.log")
        return self.agent

    @property
    def agent(self) -> int:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            found = [p.pid for p in marked(self.backend.run_id) if p.role == "agent"]
            if found:
                return found[0]
            time.sleep(0.01)
        raise AssertionError("no agent came up")

    def said(self, what: str) -> list[int]:
        if not self.pids.exists():
            return []
        words = [line.split() for line in self.pids.read_text().splitlines()]
        return [int(w[1]) for w in words if len(w) == 2 and w[0] == what]

    def tagged(self) -> list[int]:
        """Living processes that carry this test's own tag in their command line: respawners change their number."""
        tag = f"@{self.pids}".encode()
        found = set()
        for _ in range(5):  # they slip between the entries of one listing
            for name in os.listdir("/proc"):
                try:
                    if (
                        name.isdigit()
                        and tag in Path(f"/proc/{name}/cmdline").read_bytes()
                        and lives(int(name))
                    ):
                        found.add(int(name))
                except OSError:
                    continue
        return sorted(found)

    def parents(self) -> list[int]:
        owner = self.backend.owner
        assert isinstance(owner, Parents)
        return [pid for _, (pid, _) in owner._records(NODE)]

    def left(self) -> list[int]:
        known = [p for what in ("keeper", "rank", "child", "escaped") for p in self.said(what)]
        return sorted({p for p in known if lives(p)} | set(self.tagged()))


def lives(pid: int) -> bool:
    try:
        return read_stat(pid)[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[[Kind], Held]]:
    made: list[Held] = []

    def make(kind: Kind) -> Held:
        if kind is Kind.CGROUP:
            found, why = Cgroups.find(f"test{secrets.token_hex(6)}")
            if found is None:
                pytest.skip(f"this machine cannot hold processes by a cgroup: {why}")
        made.append(Held(tmp_path, kind))
        return made[-1]

    yield make
    for held in made:
        held.backend.clear(NODE)
        end(lambda held=held: marked(held.backend.run_id))
        for pid in held.left():
            os.kill(pid, signal.SIGKILL)
        held.backend.forget(NODE)
        held.backend.clear(NODE)
        assert not held.backend.scratch(NODE).parent.exists()
        assert Cgroups.left_by(held.backend.run_id) == []


@pytest.mark.parametrize("how", ESCAPES)
@pytest.mark.parametrize("kind", HELD)
def test_nothing_escapes_whose_agent_was_killed(
    hold: Callable[[Kind], Held], eventually: Callable[..., None], kind: Kind, how: str
) -> None:
    """The hardest order: the rank is gone already, then its agent: only what holds the node knows of the rest."""
    held = hold(kind)
    agent = held.launch(ESCAPES[how])
    eventually(lambda: held.said("escaped") and held.said("keeper"))
    os.kill(agent, signal.SIGKILL)
    eventually(lambda: "keeper" in (there := held.backend.roles(NODE)) and "agent" not in there)
    # Else this test shows nothing. One look may miss a process that changes its number all the time.
    eventually(lambda: [p for p in held.left() if p not in held.said("keeper")])
    eventually(lambda: held.backend.owner.left(NODE))
    ended = held.backend.owner.end_ranks(NODE)
    assert ended.gone and ended.proven
    assert held.left() == held.said("keeper"), "ending the ranks touches no snapshot"
    assert held.backend.clear(NODE).gone
    assert held.left() == []


@pytest.mark.parametrize("kind", HELD)
def test_the_next_agent_ends_what_the_ranks_of_the_one_before_have_left(
    hold: Callable[[Kind], Held], eventually: Callable[..., None], kind: Kind
) -> None:
    held = hold(kind)
    first = held.launch(ESCAPES["env -i"])
    eventually(lambda: held.said("escaped") and held.said("keeper"))
    os.kill(first, signal.SIGKILL)
    eventually(lambda: not lives(first))
    second = held.launch(ESCAPES["env -i"])
    eventually(lambda: len(held.said("escaped")) == 2)
    again = from_text(held.backend.ownership(), held.backend.run_id, held.backend.scratch(NODE).parent)
    assert again.end_ranks(NODE).gone
    assert not any(lives(p) for p in held.said("escaped")) and lives(second)


def test_marks_find_what_descends_from_a_living_rank_and_never_call_it_proven(
    hold: Callable[[Kind], Held], eventually: Callable[..., None]
) -> None:
    held = hold(Kind.MARKS)
    held.launch(ESCAPES["env -i"] + SLEEPS)
    eventually(lambda: held.said("escaped") and held.said("rank"))
    ended = held.backend.owner.end_ranks(NODE)
    assert not ended.survivors and not ended.proven and not ended.gone
    assert "marks in their environment only" in ended.why
    assert held.left() == held.said("keeper")


def test_a_killed_parent_is_said_and_the_last_census_ends_what_it_held(
    hold: Callable[[Kind], Held], eventually: Callable[..., None]
) -> None:
    held = hold(Kind.PARENT)
    agent = held.launch(ESCAPES["env -i, double fork and setsid"])
    eventually(lambda: held.said("escaped") and held.said("keeper"))
    (escaped,) = held.said("escaped")
    census = held.backend.scratch(NODE).parent / "owned" / NODE / "census.json"
    eventually(lambda: census.exists() and str(escaped) in census.read_text())
    (parent,) = held.parents()
    os.kill(parent, signal.SIGKILL)
    eventually(lambda: not lives(parent))
    assert "agent" in held.backend.roles(NODE), "training goes on without it"
    os.kill(agent, signal.SIGKILL)
    ended = held.backend.clear(NODE)
    assert not ended.survivors and not ended.proven
    assert "was killed, and with it the list" in ended.why and str(parent) in ended.why
    assert held.left() == []
    assert not held.backend.clear(NODE).proven, "what is not proven does not become so by asking again"
    held.backend.forget(NODE)
    assert held.backend.clear(NODE).gone


@pytest.mark.parametrize("kind", HELD)
def test_what_an_earlier_supervisor_held_in_another_way_is_ended_too(
    hold: Callable[[Kind], Held], eventually: Callable[..., None], kind: Kind
) -> None:
    """kill -9 of everything; the same command again, which holds processes in another way."""
    held = hold(kind)
    agent = held.launch(ESCAPES["env -i"])
    eventually(lambda: held.said("escaped") and held.said("keeper"))
    for pid in (agent, *held.said("keeper")):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not held.backend.roles(NODE) & {"agent", "keeper"})
    other = Kind.PARENT if kind is Kind.CGROUP else Kind.MARKS
    later = OwnedNodes(held.backend.run_id, other)
    assert any(lives(p) for p in held.said("escaped"))
    assert not later.sweep().survivors
    assert held.left() == []


def test_what_is_not_ours_is_left_alone(
    hold: Callable[[Kind], Held], eventually: Callable[..., None]
) -> None:
    """Two runs on one machine, and a process beside them, in each way of holding."""
    kinds = [Kind.PARENT, Kind.MARKS] + [Kind.CGROUP] * (Cgroups.find("testnone")[0] is not None)
    runs = [hold(k) for k in (*kinds, *kinds)]
    for held in runs:
        held.launch(ESCAPES["env -i"] + SLEEPS)
    eventually(lambda: all(h.said("escaped") and h.said("rank") and h.said("keeper") for h in runs))
    ended = runs[: len(kinds)]
    for held in ended:
        assert not held.backend.clear(NODE).survivors
        assert held.left() == []
    for held in runs[len(kinds) :]:
        assert len(held.left()) == 3 and lives(held.agent)


def test_the_first_way_that_works_is_taken_and_why_it_is_not_a_surer_one_is_said(tmp_path: Path) -> None:
    run_id = f"test{secrets.token_hex(6)}"
    mounts, own = tmp_path / "mountinfo", tmp_path / "cgroup"
    (tmp_path / "tree").mkdir()
    own.write_text("1:name=systemd:/\n0::/mine\n")
    mounts.write_text("31 23 0:28 / /proc rw - proc proc rw\n")
    assert Cgroups.find(run_id, mounts, own) == (None, "this machine has no cgroup v2"), "cgroup v1 only"
    mounts.write_text("41 31 0:38 / /proc rw,relatime - cgroup2 cgroup2 rw\n")
    assert Cgroups.find(run_id, mounts, own)[0] is None, "its own cgroup is not in this tree"
    own.write_text("0::/\n")
    found, why = Cgroups.find(run_id, mounts, own)
    assert found is None and "/proc cannot be used" in why
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cgroups, "find", classmethod(lambda cls, run_id: (None, "it is read-only")))
        taken, why = choose(run_id, tmp_path)
        assert isinstance(taken, Parents) and why == "it is read-only"
        patch.setattr(Parents, "missing", staticmethod(lambda: "no Linux"))
        taken, why = choose(run_id, tmp_path)
        assert type(taken) is Marks and why == "it is read-only; no Linux"
        with pytest.raises(RunError, match="cannot be held by a cgroup here: it is read-only"):
            choose(run_id, tmp_path, Kind.CGROUP)


@pytest.mark.parametrize("kind", Kind)
def test_an_ownership_is_the_same_in_another_process(tmp_path: Path, kind: Kind) -> None:
    text = {Kind.CGROUP: "cgroup:/sys/fs/cgroup/a:b/unbroken-x"}.get(kind, str(kind))
    made = from_text(text, "x", tmp_path)
    assert made.kind is kind and made.as_text() == text
    with pytest.raises(ValueError, match="sheet"):
        from_text("sheet:1", "x", tmp_path)


def test_an_agent_that_leaves_by_itself_takes_its_cgroup_with_it(
    hold: Callable[[Kind], Held], eventually: Callable[..., None]
) -> None:
    held = hold(Kind.CGROUP)
    code = """
        import sys
        from pathlib import Path
        from unbroken.cluster.holding.choice import from_text
        from_text(sys.argv[1], sys.argv[2], Path(sys.argv[3])).leave("node-000")
    """
    argv = [
        sys.executable, "-c", textwrap.dedent(code), held.backend.ownership(), held.backend.run_id, str(held.folder),
    ]  # fmt: skip
    held.backend.launch(NODE, argv, {}, held.folder / "agent.log")
    eventually(lambda: Cgroups.left_by(held.backend.run_id) == [])


def test_a_parent_that_was_stopped_and_takes_no_zombie_away_leaves_a_proof(
    hold: Callable[[Kind], Held], eventually: Callable[..., None]
) -> None:
    held = hold(Kind.PARENT)
    agent = held.launch()
    eventually(lambda: held.said("rank") and held.said("keeper"))
    (parent,) = held.parents()
    os.kill(parent, signal.SIGSTOP)
    try:
        os.kill(agent, signal.SIGKILL)
        ended = held.backend.owner.end_ranks(NODE, within=5)
        assert ended.gone and held.left() == held.said("keeper")
    finally:
        os.kill(parent, signal.SIGCONT)
