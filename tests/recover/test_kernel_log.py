"""What the kernel's log says of a killed process."""

from __future__ import annotations

from pathlib import Path

import pytest

from unbroken.recover.node.ranks.kernel_log import killed_for_memory

LINES = {
    "6,1,100,-;Out of memory: Killed process 4242 (python) total-vm:1kB, anon-rss:1kB": True,
    "6,1,100,-;Memory cgroup out of memory: Killed process 4242 (python), UID 0": True,
    "6,1,100,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,task=python,pid=4242,uid=0": True,
    "6,1,100,-;Out of memory: Killed process 42421 (python)": False,
    "6,1,100,-;python[4242]: segfault at 0 ip 0": False,
}  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_what_a_line_says(tmp_path: Path, line: str) -> None:
    log = tmp_path / "kmsg"
    log.write_text(f"6,0,1,-;Linux version 6\n{line}\n")
    assert killed_for_memory(4242, str(log)) is LINES[line]


def test_a_log_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    assert killed_for_memory(1, str(tmp_path / "none")) is None
    assert killed_for_memory(1, str(tmp_path)) is None
