"""The breaker's list, stops and storages that refuse: what is whole in memory at an end becomes durable and is gone on from."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.keepers import keeper_pid
from unbroken.testing.http_faults import Fault

from .breakers import Stage, combinations
from .conftest import run_json

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


@combinations(thin=())
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


@combinations(launchers=("run",), thin=())
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


@combinations(places=("own", "run"))
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


@combinations(places=("own",), launchers=("run",))
def test_a_stop_as_a_script_changes_its_folder_writes_the_snapshot_where_it_belongs(stage: Stage) -> None:
    """The second attempt names another folder, and is stopped before it has made anything there."""
    stage.alter("places = [] if", 'folder += os.environ["UNBROKEN_ATTEMPT"]\nplaces = [] if')
    stage.alter("restored = check", "checkpoints.due(1)\ncheckpoints._open()\n"
                "time.sleep(60 if folder[-1] == '2' else 0)\nrestored = check")  # fmt: skip
    stage.options = ["--stop-within", "3s"]
    stage.start().until_step(25)
    stage.kill_ranks()
    stage.until_said("checkpoints2, as the script says")
    assert stage.process is not None
    stage.process.send_signal(signal.SIGTERM)
    assert stage.wait() == 11, stage.story()
    written = [p.parent for p in stage.folder.glob("checkpoints*/step-*/COMMITTED")]
    last = max(written, key=lambda p: p.name)
    assert last.parent.name == "checkpoints1" and int(last.name[5:13]) >= 24, (written, stage.story())
    assert all(p.parent.name == "checkpoints1" for p in written), "an attempt's checkpoints lie in one folder"
    starts = len(stage.restored())
    stage.start().until(lambda: len(stage.restored()) > starts, "the next start")
    assert stage.restored()[starts][0] == int(last.name[5:13]), stage.story()
    stage.until(
        lambda: list(stage.folder.glob("checkpoints3/step-*/COMMITTED")), "it writes to its own folder"
    )


@combinations(places=("own", "run", "store"), launchers=("run",))
@pytest.mark.parametrize("end", ["stop", "completion"])
def test_after_the_wait_for_room_the_last_checkpoint_goes_elsewhere(stage: Stage, end: str) -> None:
    """Where it was named; the next command finds it there, and goes on from it."""
    stage.options = ["--wait-for-room", "2s", "--room-elsewhere", str(stage.folder / "spare")]
    stage.steps = 40 if end == "completion" else 600
    with small_place(stage) as (refuse, allow):
        stage.start().until_durable(10)
        refuse()
        if end == "stop":
            stage.until_step(stage.step() + 12)
            stage.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]
        assert stage.wait() == (11 if end == "stop" else 0), stage.story()
        last = stage.step()
        assert "because its own place refused it" in stage.output and f"step-{last:08d}" in stage.output
        assert list((stage.folder / "spare").glob(f"*/step-{last:08d}.a0001/COMMITTED")), stage.story()
        status = run_json("status", "run", cwd=stage.folder)
        assert status["status"] == ("interrupted" if end == "stop" else "completed")
        if end == "stop":
            allow()
            stage.goes_on(last)
            assert stage.restored()[-1][0] == last
            stage.stop()
            assert max(stage.durable()) > last
            stage.goes_on(max(stage.durable()))


@combinations(places=("own", "run", "store"), launchers=("run",))
def test_a_completion_without_its_last_checkpoint_does_not_read_completed(stage: Stage) -> None:
    stage.options, stage.steps = ["--wait-for-room", "2s"], 40
    with small_place(stage) as (refuse, allow):
        stage.start().until_durable(10)
        refuse()
        assert stage.wait() == 35, stage.story()
        assert "all ranks are done, but step 40, the last checkpoint, is not saved" in stage.output
        assert "the run is completed" not in stage.output
        status = run_json("status", "run", cwd=stage.folder)
        assert status["status"] == "interrupted" and "is not saved" in status["why"]
        allow()
        stage.start()
        assert stage.wait() == 0, stage.story()
        assert max(stage.durable()) == 40 and "the run is completed" in stage.output
        assert stage.said("DONE")[-1] == ["40.0"]
