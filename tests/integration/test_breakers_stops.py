"""The breaker's list, stops and storages that refuse: what is whole in memory at an end becomes durable and is gone on from."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from unbroken.testing.http_faults import Fault
from unbroken.testing.keepers import keeper_pid

from .breakers import Stage, combinations

pytestmark = [pytest.mark.breakers, pytest.mark.integration]


def _fill(folder: Path) -> Path:
    filler = folder / "filler"
    with open(filler, "wb", buffering=0) as f:
        try:
            while True:
                f.write(b"x" * 4096)
        except OSError:
            pass
    return filler


@contextmanager
def small_place(stage: Stage) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """Puts the checkpoints where there is little room; (take all of it, give it back)."""
    if stage.place == "store":

        def refuse() -> None:
            stage.server.fault = lambda r: (
                Fault(403, "QuotaExceeded") if r.method in ("PUT", "POST") else None
            )

        def allow() -> None:
            stage.server.fault = lambda r: None

        yield refuse, allow
        return
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = stage.folder / ("checkpoints" if stage.place == "own" else "run/checkpoints")
    folder.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("this machine does not let us mount a small file system")
    try:
        yield lambda: (_fill(folder), None)[1], lambda: (folder / "filler").unlink()
    finally:
        stage.end()
        subprocess.run(["umount", "-l", str(folder)], check=False)


@combinations(thin=(("own", "alone"),))
def test_a_storage_that_refuses_at_the_end_is_waited_for(stage: Stage) -> None:
    with small_place(stage) as (refuse, allow):
        stage.start().until_durable(10)
        refuse()
        before = stage.step()
        stage.until_step(before + 12)
        assert stage.process is not None
        if stage.launcher == "run":
            stage.process.send_signal(signal.SIGTERM)
        else:
            (stage.folder / "stop").touch()
        stage.until(
            lambda: "cannot be saved yet" in stage.output or "waits for the storage" in stage.output,
            "that it waits is said",
        )
        last = stage.step()
        allow()
        assert stage.wait() == (11 if stage.launcher == "run" else 0), stage.story()
        assert max(stage.durable()) == last, (stage.durable(), stage.story())
        starts = len(stage.restored())
        stage.start()
        stage.until(lambda: len(stage.restored()) > starts, "the next start")
        assert stage.restored()[starts][0] == last, stage.story()


@combinations(launchers=("run",), thin=(("run", "run"),))
def test_a_stop_while_an_attempt_starts_loses_nothing(stage: Stage) -> None:
    stage.start().until_step(25)
    stage.kill_ranks()
    stage.until(lambda: "attempt 2:" in stage.output, "the second attempt")
    assert stage.process is not None
    stage.process.send_signal(signal.SIGTERM)
    assert stage.wait() == 11, stage.story()
    starts = len(stage.restored())
    stage.start()
    stage.until(lambda: len(stage.restored()) > starts, "the next start")
    assert stage.restored()[starts][0] >= 24, stage.story()


@combinations(places=("own", "run"), thin=())
def test_a_stopped_keeper_at_the_end_loses_nothing(stage: Stage) -> None:
    stage.start().until_durable(10)
    found = stage.faults.processes("keeper")[0].pid if stage.launcher == "run" else keeper_pid(stage.scratch)
    os.kill(found, signal.SIGSTOP)
    assert stage.stop(180) == (11 if stage.launcher == "run" else 0), stage.story()
    last = stage.step()
    assert max(stage.durable()) == last, (stage.durable(), stage.story())
    starts = len(stage.restored())
    stage.start()
    stage.until(lambda: len(stage.restored()) > starts, "the next start")
    assert stage.restored()[starts][0] == last, stage.story()
