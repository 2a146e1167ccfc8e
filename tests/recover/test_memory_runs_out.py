"""Where memory runs out the kernel takes ranks, never the keeper, however much larger that is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from unbroken.recover.node.ranks.kernel_log import KernelLog
from unbroken.recover.node.ranks.memory_kills import MemoryKills
from unbroken.recover.node.ranks.process import as_a_rank

from ..support.memory_limit import join, memory_group

_KEEPS = """
import mmap, os, sys, time
fd = os.memfd_create("snapshot")
os.ftruncate(fd, 96 << 20)
held = mmap.mmap(fd, 96 << 20)
for i in range(0, 96 << 20, 4096):
    held[i] = 1
print("holds", flush=True)
time.sleep(60)
"""
_EATS = """
import sys, time
kept = []
while True:
    kept.append(b"x" * (1 << 20))
"""


def test_a_rank_goes_before_a_larger_keeper() -> None:
    with memory_group(160 << 20) as group:
        keeper = subprocess.Popen(
            [sys.executable, "-c", _KEEPS], stdout=subprocess.PIPE, preexec_fn=lambda: join(group)
        )
        try:
            assert keeper.stdout is not None and keeper.stdout.readline() == b"holds\n"

            def enter() -> None:
                join(group)
                as_a_rank()

            rank = subprocess.Popen([sys.executable, "-c", _EATS], preexec_fn=enter)
            assert rank.wait(60) == -signal.SIGKILL
            assert keeper.poll() is None, "it held more, and was not taken"
        finally:
            keeper.kill()
            keeper.wait()


def test_what_a_rank_starts_goes_first_too() -> None:
    code = "import subprocess, sys; print(open('/proc/self/oom_score_adj').read().strip()); sys.stdout.flush(); " \
        "subprocess.run(['cat', '/proc/self/oom_score_adj'])"  # fmt: skip
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, preexec_fn=as_a_rank, check=True
    )
    assert told.stdout.split() == ["1000", "1000"]
    assert Path("/proc/self/oom_score_adj").read_text().strip() != "1000", "whoever started it is not touched"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", ["the kernel", pytest.param("all at once", marks=pytest.mark.soak)])
def test_ranks_that_are_taken_take_no_snapshot_with_them(tmp_path: Path, how: str) -> None:
    """`all at once` is what a kernel does that ends a whole cgroup (memory.oom.group), for machines that allow no limits."""
    from ..integration.conftest import RunUnderTest

    script = """
import os, sys, threading, time
from unbroken.train.__main__ import main

def eat():
    while not os.path.exists("eat"):
        time.sleep(0.01)
    kept = []
    while True:
        kept.append(b"x" * (4 << 20))

if os.environ["UNBROKEN_ATTEMPT"] == "1" and os.environ["RANK"] == "1":
    threading.Thread(target=eat, daemon=True).start()
sys.exit(main())
"""
    (tmp_path / "script.py").write_text(script)
    options = ["--nodes", "2", "--nproc", "1"]
    command = ["script.py", "--steps", "60", "--snapshot-every", "5"]
    run = RunUnderTest(tmp_path, command, options).start()
    try:
        run.until_step(12)
        ranks = run.faults.ranks()
        keepers = {p.pid for p in run.faults.processes("keeper")}
        if how == "the kernel":
            with memory_group(256 << 20) as group:
                join(group, ranks[1].pid)
                (tmp_path / "eat").touch()
                code = run.wait(240)
        else:
            for process in ranks.values():
                os.kill(process.pid, signal.SIGKILL)
            code = run.wait(240)
        assert code == 0, run.output
        first, second = run.journal("attempt")
        assert second["candidates"][0]["in_memory"] == 2, "both keepers still held it"
        (restored,) = [r for r in run.journal("restored") if r["attempt"] == 2]
        assert restored["of"] == 1 and restored["step"] >= 5
        assert (
            first["boots"] == second["boots"] and sum(n for _, n in next(iter(first["boots"].values()))) == 2
        )
        assert keepers
    finally:
        run.end()


@pytest.mark.parametrize("log", ["read", "of a container", "not readable"])
@pytest.mark.parametrize("how", ["by the kernel", "by somebody"])
def test_who_killed_a_rank(how: str, log: str, tmp_path: Path) -> None:
    place, host_pids = (
        ("/dev/kmsg", log == "read") if log != "not readable" else (str(tmp_path / "none"), True)
    )
    kernel_log = KernelLog(place, host_pids=host_pids)
    if log == "read" and (why_not := KernelLog().why_not):
        pytest.skip(why_not)
    with memory_group(48 << 20) as group:
        code = f"input()\n{_EATS}" if how == "by the kernel" else "input()"
        rank = subprocess.Popen(
            [sys.executable, "-c", code], preexec_fn=lambda: join(group), stdin=subprocess.PIPE
        )
        try:
            kills = MemoryKills(rank.pid, kernel_log)
            for now in (0.0, 0.5, 1.0, 2.0):
                kills.look(now)
            if how == "by the kernel":
                rank.communicate(b"\n")
            else:
                rank.kill()
            assert rank.wait() == -signal.SIGKILL
            kills.look(3.0)  # before its end was seen
            oom = {"by the kernel": True, "by somebody": False if log == "read" else None}[how]
            assert kills.was_killed() == (oom, bool(oom) and log != "read"), (
                "the log names it, the count nobody"
            )
        finally:
            rank.kill()
            rank.wait()
