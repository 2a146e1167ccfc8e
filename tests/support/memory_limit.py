"""A group of processes whose memory is limited, so that the kernel kills one of them: cgroup v1 or v2, as the machine has it."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOTS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """A cgroup in which that many bytes may be used; write process ids to its `cgroup.procs`. Skips where none can be made."""
    for root, name in _ROOTS:
        group = root / f"unbroken-test-{secrets.token_hex(4)}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / name).write_text(str(limit))
        except OSError:
            group.rmdir()
            continue
        with contextlib.suppress(OSError):
            (group / "memory.swap.max").write_text("0")
        try:
            yield group
        finally:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                try:
                    group.rmdir()
                    break
                except OSError:  # the last process is still being taken apart
                    time.sleep(0.02)
        return
    pytest.skip("no cgroup with limited memory can be made here (it takes root and a writable hierarchy)")


def join(group: Path, pid: int | None = None) -> None:
    """Moves a process into the group, itself by default."""
    (group / "cgroup.procs").write_text(str(os.getpid() if pid is None else pid))
