"""A file system without room for another file, as an attempt starts: journal and steps still fit, its logs do not."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.slurm import wait_for
from unbroken.cluster.holding.processes import marked
from unbroken.progress import read_spec
from unbroken.recover.ask import ask_waits

from .conftest import RunUnderTest, run_json

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture
def fill() -> Iterator[Callable[[Path], Callable[[], None]]]:
    """Lays a file system without room over a folder; what it gives takes that away."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    filled: list[Path] = []

    def lay(folder: Path) -> Callable[[], None]:
        options = "size=4k,nr_inodes=1"
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=False
        ).returncode:
            pytest.skip("this machine does not let us mount a small file system")
        filled.append(folder)
        return lambda: subprocess.run(["umount", "-l", str(filled.pop())], check=True) and None

    yield lay
    for folder in filled:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def test_an_attempt_waits_until_its_logs_find_room(
    new_run: Callable[..., RunUnderTest], fill: Callable[[Path], Callable[[], None]]
) -> None:
    """Where nothing fits at all, the claim of a place for checkpoints waits before; here it is the logs alone."""
    run = new_run(steps=60).start()
    run.until_step(20)
    free = fill(run.run_dir.attempts)
    run_id = read_spec(run.run_dir.spec).run_id
    os.kill(next(p.pid for p in marked(run_id) if p.role == "rank"), signal.SIGKILL)
    wait_for(lambda: any(r["how"] == "no_room" for r in run.journal("ended")), "the wait for room", 30)
    before = run.attempts()
    assert not [p for p in marked(run_id) if p.role == "rank"], "nothing runs meanwhile"
    told = run_json("status", str(run.run_dir.path), "--json", cwd=run.folder)
    assert "no room for its logs" in told["why"] and "Free space there" in told["todo"]
    assert "the next one waits for room" in ask_waits(run.run_dir), "the supervisor says it too"
    free()
    assert run.wait() == 0, run.output
    assert run.attempts() == before + 1 == 3, run.output
    assert "no room for its logs" in run.output and "there is room again" in run.output
    assert [i["kind"] for i in run.incidents()] == ["failed"]
