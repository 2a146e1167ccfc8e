"""What the kernel's log says of a killed process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unbroken.recover.node.ranks import kernel_log
from unbroken.recover.node.ranks.kernel_log import KernelLog

LINES = {
    "6,1,100,-;Out of memory: Killed process 4242 (python) total-vm:1kB, anon-rss:1kB": True,
    "6,1,100,-;Memory cgroup out of memory: Killed process 4242 (python), UID 0": True,
    "6,1,100,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,task=python,pid=4242,uid=0": True,
    "6,1,100,-;Out of memory: Killed process 42421 (python)": False,
    "6,1,100,-;python[4242]: segfault at 0 ip 0": False,
}  # fmt: skip
KILLED = next(iter(LINES)) + "\n"


@pytest.fixture
def kmsg(tmp_path: Path) -> Path:
    path = tmp_path / "kmsg"
    path.write_text("6,0,1,-;Linux version 6\n")
    return path


def say(kmsg: Path, line: str) -> None:
    with kmsg.open("a") as f:
        f.write(line)


@pytest.mark.parametrize("line", LINES)
def test_what_a_line_says(kmsg: Path, line: str) -> None:
    log = KernelLog(str(kmsg), host_pids=True)
    assert log.has_killed(4242) is False
    say(kmsg, f"{line}\n")
    assert log.has_killed(4242) is LINES[line]
    assert log.has_killed(4242) is LINES[line], "asked again"


def test_what_it_said_before_was_of_another_process_with_that_number(kmsg: Path) -> None:
    say(kmsg, KILLED)
    assert KernelLog(str(kmsg), host_pids=True).has_killed(4242) is False


def test_a_log_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    for place in (tmp_path / "none", tmp_path):
        log = KernelLog(str(place), host_pids=True)
        assert log.has_killed(1) is None and "cannot be read" in log.why_not


def test_numbers_of_a_container_are_not_compared_with_those_of_the_host(kmsg: Path) -> None:
    log = KernelLog(str(kmsg), host_pids=False)
    say(kmsg, KILLED)
    assert log.has_killed(4242) is None and "a container's own" in log.why_not


def test_lines_that_were_overwritten_leave_it_open(kmsg: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = KernelLog(str(kmsg), host_pids=True)
    say(kmsg, KILLED)
    lost = [BrokenPipeError()]
    read = os.read

    def torn(fd: int, most: int) -> bytes:
        if lost:
            raise lost.pop()
        return read(fd, most)

    monkeypatch.setattr(kernel_log.os, "read", torn)
    assert log.has_killed(4242) is True, "this one is there"
    assert log.has_killed(1) is None, "it may have been among them"


def test_its_file_is_closed_with_it(kmsg: Path) -> None:
    def is_open() -> bool:  # by its name: another thread may have got the number of a closed file
        return any(
            Path(f"/proc/self/fd/{n}").resolve() == kmsg.resolve() for n in os.listdir("/proc/self/fd")
        )

    log = KernelLog(str(kmsg), host_pids=True)
    assert is_open()
    del log
    assert not is_open()
