"""Processes of a run: found by their mark and never by name, ended until none is left."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unbroken.cluster.holding.processes import Marked, end, marked, read_stat, still_there


@pytest.fixture
def run_id() -> Iterator[str]:
    name = f"test{secrets.token_hex(6)}"
    yield name
    assert end(lambda: marked(name)) == []


def start(
    run_id: str, code: str = "input()", *, node: str = "node-000", role: str = "rank", **env: str
) -> subprocess.Popen[bytes]:
    marks = {"UNBROKEN_RUN_ID": run_id, "UNBROKEN_NODE": node, "UNBROKEN_ROLE": role}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], env={**os.environ, **marks, **env}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    until_marked(process, run_id)
    return process


def until_marked(process: subprocess.Popen[bytes], run_id: str) -> None:
    """Popen returns in the middle of the exec, a moment before the kernel shows the new environment."""
    deadline = time.monotonic() + 10
    while run_id.encode() not in Path(f"/proc/{process.pid}/environ").read_bytes():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)


def ready(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == b"go\n"


def reap(*processes: subprocess.Popen[bytes]) -> None:
    for p in processes:
        p.kill()
        p.wait()
        for pipe in (p.stdin, p.stdout):
            if pipe is not None:
                pipe.close()


def test_found_by_mark(run_id: str) -> None:
    a = start(run_id, UNBROKEN_ATTEMPT="3", RANK="5")
    b = start(run_id, node="node-001", role="agent", RANK="9")
    other = start(run_id + "x")
    try:
        found = {p.pid: p for p in marked(run_id)}
        assert set(found) == {a.pid, b.pid}
        assert (found[a.pid].node, found[a.pid].role, found[a.pid].attempt, found[a.pid].rank) == (
            "node-000",
            "rank",
            3,
            5,
        )
        assert found[b.pid].rank == -1, "only ranks have a rank"
        assert [p.pid for p in marked(run_id, node="node-001")] == [b.pid]
        assert marked(run_id, node="node-002") == [] and marked("no-such-run") == []
        assert marked(run_id[:-1]) == [], "a run whose name begins alike is another run"
    finally:
        reap(a, b, other)


def test_marks_that_a_script_has_spoilt_do_no_harm(run_id: str) -> None:
    a = start(run_id, UNBROKEN_ATTEMPT="x", RANK="")
    b = subprocess.Popen(
        ["sleep", "60"],
        env={
            b"UNBROKEN_RUN_ID": run_id.encode(),
            b"UNBROKEN_NODE": b"\xff",
            b"UNBROKEN_ROLE": b"rank",
            b"RANK": b"1e3",
        },
    )
    try:
        until_marked(b, run_id)
        found = {p.pid: p for p in marked(run_id)}
        assert (found[a.pid].attempt, found[a.pid].rank, found[b.pid].rank) == (0, -1, -1)
    finally:
        reap(a, b)


def test_zombies_and_recycled_numbers_are_not_there(run_id: str) -> None:
    a = start(run_id)
    (process,) = marked(run_id)
    assert still_there(process)
    assert not still_there(Marked(**{**vars(process), "started": process.started + 1}))
    a.kill()
    os.waitid(os.P_PID, a.pid, os.WEXITED | os.WNOWAIT)
    assert read_stat(a.pid)[0] == "Z"
    assert marked(run_id) == [] and not still_there(process)
    reap(a)
    assert not still_there(process)


def test_children_that_ignore_sigterm_and_double_forks_are_ended(
    run_id: str, eventually: Callable[..., None]
) -> None:
    """A shell's child, a data loader that ignores every signal, and a daemon that left its session."""
    code = """
        import os, signal, subprocess, sys, time
        for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(s, signal.SIG_IGN)
        subprocess.Popen(["sh", "-c", "sleep 300; true"])
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(300)
            os._exit(0)
        os.wait()
        print("go", flush=True)
        time.sleep(300)
    """
    a = start(run_id, code)
    ready(a)
    eventually(lambda: len(marked(run_id)) == 4)
    began = time.monotonic()
    assert end(lambda: marked(run_id)) == []
    assert time.monotonic() - began < 9
    assert marked(run_id) == []
    reap(a)


def test_a_process_that_forks_without_end_is_ended(run_id: str) -> None:
    """New children appear while the first signals are on their way: asking once would miss them."""
    code = """
        import os, time
        print("go", flush=True)
        end = time.monotonic() + 30
        while time.monotonic() < end:
            if os.fork() == 0:
                time.sleep(0.01)      # the child goes on in its parent's place
            else:
                os._exit(0)
    """
    a = start(run_id, code)
    ready(a)
    assert end(lambda: marked(run_id)) == []
    for _ in range(5):
        assert marked(run_id) == []
        time.sleep(0.02)
    reap(a)


def test_stopped_processes_are_ended(run_id: str) -> None:
    a = start(run_id)
    os.kill(a.pid, signal.SIGSTOP)
    assert end(lambda: marked(run_id)) == []
    reap(a)


def test_survivors_are_named_after_the_deadline() -> None:
    """This very process stands for one in D state: the signals are caught by the test and reach nobody."""
    me = read_stat(os.getpid())
    stuck = Marked(os.getpid(), me[1], "D", "node-000", "rank", 1)
    killed: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "kill", lambda pid, sig: killed.append(pid))
        assert end(lambda: [stuck], within=0.2) == [stuck]
    assert killed and set(killed) == {os.getpid()}
