"""A stop at any moment: what is whole in memory becomes durable and counts, or stays in memory for the successor."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unbroken.checkpoint.catalogue.contents import listing
from unbroken.checkpoint.storage.posix import PosixStorage
from unbroken.progress import RunDir
from unbroken.recover.start import STOP_SIGNALS

from .conftest import RunUnderTest

pytestmark = [pytest.mark.breakers, pytest.mark.integration]
NewRun = Callable[..., RunUnderTest]

SCRIPT = """
import os, signal, sys, time
import torch, unbroken
dies, last, attempt = int(sys.argv[1]), int(sys.argv[2]), int(os.environ["UNBROKEN_ATTEMPT"])
run = unbroken.attach(total_steps=last)
state = {"w": torch.zeros(1000)}
checkpoints = unbroken.Checkpointer(snapshot_every=5, persist_every=20)
if attempt > 1:
    time.sleep(float(os.environ.get("SLOW_START", 0)))
restored = checkpoints.restore(state)
first = restored.step + 1 if restored else 1
print(f"goes on after step {first - 1} in attempt {attempt}, w is {state['w'][0]:.0f}", flush=True)
for step in range(first, last + 1):
    time.sleep(0.02)
    state["w"] += 1
    if checkpoints.due(step):
        checkpoints.save(step, state).host.result(30)
    run.step(step)
    if step == dies and attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if run.should_stop(step):
        checkpoints.save(step, state, persist=True)
        checkpoints.close()
        sys.exit(unbroken.EXIT_STOPPED)
checkpoints.close()
"""


def went_on(run: RunUnderTest) -> list[tuple[int, int, int]]:
    """(step, attempt, w) of each start of rank 0, in order."""
    found = []
    for log in sorted(run.run_dir.path.rglob("rank-0.log")):
        for a, b, c in re.findall(r"goes on after step (\d+) in attempt (\d+), w is (\d+)", log.read_text()):
            found.append((int(a), int(b), int(c)))
    return found


def committed(run: RunUnderTest) -> list[str]:
    return [f.name for f in listing(PosixStorage(run.run_dir.checkpoints)) if f.committed]


def when(run: RunUnderTest, moment: str) -> bool:
    """Whether the run has come to this moment of its second start."""
    if moment == "incident":
        return bool(run.journal("incident"))
    if moment == "seal":
        return bool(run.journal("seal"))
    if moment == "attempt":
        return run.attempts() >= 2
    if moment == "launched":
        return run.run_dir.rank_log(2, "node-000", 0).exists()
    return any(attempt == 2 for _, attempt, _ in went_on(run))  # restored


def until_moment(run: RunUnderTest, moment: str, within: float = 60) -> None:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if run.run_dir.spec.exists() and when(run, moment):
            return
        assert run.process is not None and run.process.poll() is None, run.process.communicate()[0]
        time.sleep(0.005)
    raise AssertionError(f"'{moment}' did not come")


MOMENTS = ["incident", "seal", "attempt", "launched", "restored"]


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_stop_while_an_attempt_starts_keeps_what_is_in_memory(new_run: NewRun, moment: str) -> None:
    run = new_run(script=SCRIPT, args=["37", "60"]).start(SLOW_START="1.5")
    until_moment(run, moment)
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 11, run.output
    assert "sealed" not in run.output, run.output
    assert max(int(n[5:13]) for n in committed(run)) >= 35, (committed(run), run.output)
    assert "newest checkpoint step-000000" in run.output
    before = len(went_on(run))
    run.start()
    assert run.wait() == 0, run.output
    step, _, w = went_on(run)[before]
    assert step >= 35 and w == step, went_on(run)
    assert run.faults.left_over() == []


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("how", ["killed", "killed, and nobody comes"])
def test_a_supervisor_killed_while_an_attempt_starts_keeps_what_is_in_memory(
    new_run: NewRun, moment: str, how: str
) -> None:
    run = new_run("--lease", "2s", script=SCRIPT, args=["37", "60"]).start(SLOW_START="1.5")
    until_moment(run, moment)
    assert run.process is not None
    run.process.send_signal(signal.SIGKILL)
    run.process.communicate()
    if how != "killed":  # the agents give up waiting and save what the keepers hold
        deadline = time.monotonic() + 150
        while run.faults.left_over() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert run.faults.left_over() == []
        assert any(n.startswith("step-000000") and int(n[5:13]) >= 35 for n in committed(run)), committed(run)
    before = len(went_on(run))
    run.start()
    assert run.wait(120) == 0, run.output
    starts = went_on(run)[before:]
    assert all(step >= 35 and w == step for step, _, w in starts), (went_on(run), run.output)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 100 MB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", str(small)], check=False
    ).returncode:
        pytest.skip("this machine does not let us mount a small file system")
    yield small
    subprocess.run(["umount", "-l", str(small)], check=False)


def fill(folder: Path) -> Path:
    """Takes all room there is."""
    filler = folder / "filler"
    with open(filler, "wb") as f:
        try:
            while True:
                f.write(b"x" * 65536)
                f.flush()
        except OSError:
            pass
    return filler


FULL = """
import os, signal, sys, time
import torch, unbroken
last, attempt = int(sys.argv[1]), int(os.environ["UNBROKEN_ATTEMPT"])
run = unbroken.attach(total_steps=last)
state = {"w": torch.zeros(1_000_000)}
checkpoints = unbroken.Checkpointer(snapshot_every=5, persist_every=20)
restored = checkpoints.restore(state)
first = restored.step + 1 if restored else 1
print(f"goes on after step {first - 1} in attempt {attempt}, w is {state['w'][0]:.0f}", flush=True)
for step in range(first, last + 1):
    time.sleep(0.05)
    state["w"] += 1
    if checkpoints.due(step):
        checkpoints.save(step, state).host.result(30)
    run.step(step)
    if run.should_stop(step):
        checkpoints.save(step, state, persist=True)
        checkpoints.close()
        sys.exit(unbroken.EXIT_STOPPED)
    while step == 47 and os.path.exists("hold"):
        time.sleep(0.05)
checkpoints.close()
"""


def full_run(new_run: NewRun, small: Path, *options: str) -> RunUnderTest:
    run = new_run(*options, script=FULL, args=["60"])
    run.run_dir = RunDir(small / "run")
    return run


def read_until(run: RunUnderTest, text: str, within: float = 60) -> None:
    """Reads the run's output until a line has this text."""
    assert run.process is not None and run.process.stdout is not None
    deadline = time.monotonic() + within
    while text not in run.output and time.monotonic() < deadline:
        line = run.process.stdout.readline()
        if not line:
            break
        run.output += line
    assert text in run.output, run.output


@pytest.mark.slow
def test_a_full_disk_at_the_end_is_waited_for(new_run: NewRun, small_disk: Path) -> None:
    """The only copy of the last steps is in memory: it is kept until there is room, and that is said."""
    run = full_run(new_run, small_disk).start()
    run.until_step(42)
    filler = fill(small_disk)
    assert run.process is not None
    asked = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    read_until(run, "stopping", 5)
    read_until(run, "cannot be saved yet", 30)
    assert time.monotonic() - asked < 20
    filler.unlink()
    assert run.wait(60) == 11, run.output
    step = max(int(n[5:13]) for n in committed(run))
    assert step > 40, (committed(run), run.output)
    before = len(went_on(run))
    run.start()
    assert run.wait() == 0, run.output
    assert went_on(run)[before][0] == step == went_on(run)[before][2]


@pytest.mark.slow
def test_a_disk_that_stays_full_leaves_the_snapshot_with_keepers_that_go_on(
    new_run: NewRun, small_disk: Path
) -> None:
    """The stop ends within its grace and loses nothing: the same command goes on from memory."""
    run = full_run(new_run, small_disk, "--stop-within", "5s", "--wait-for-room", "60s").start()
    run.until_step(42)
    filler = fill(small_disk)
    assert run.process is not None
    asked = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(60) == 11, run.output
    assert time.monotonic() - asked < 45
    assert "is in memory only" in run.output, run.output
    filler.unlink()
    before = len(went_on(run))
    run.start()
    assert run.wait() == 0, run.output
    step, _, w = went_on(run)[before]
    assert step > 40 and w == step, (went_on(run), run.output)


@pytest.mark.slow
def test_a_full_disk_at_the_completion_is_waited_for(new_run: NewRun, small_disk: Path) -> None:
    run = full_run(new_run, small_disk)
    (run.folder / "hold").touch()
    run.start()
    run.until_step(46)
    filler = fill(small_disk)
    (run.folder / "hold").unlink()
    read_until(run, "cannot be saved yet", 40)
    filler.unlink()
    assert run.wait(60) == 0, run.output
    assert max(int(n[5:13]) for n in committed(run)) == 60, committed(run)
    assert run.attempts() == 1


@pytest.mark.slow
def test_a_stopped_keeper_is_continued_at_the_end(new_run: NewRun) -> None:
    run = new_run(script=FULL, args=["400"]).start()
    run.until_step(12)
    keeper = run.faults.processes("keeper")[0].pid
    os.kill(keeper, signal.SIGSTOP)
    assert run.process is not None
    asked = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    read_until(run, "stopping", 5)
    read_until(run, "was stopped by a signal", 10)
    assert run.wait(60) == 11, run.output
    assert time.monotonic() - asked < 30
    assert max(int(n[5:13]) for n in committed(run)) >= 12, (committed(run), run.output)


@pytest.mark.parametrize(
    "sig",
    [signal.SIGUSR1, *(pytest.param(s, marks=pytest.mark.slow) for s in STOP_SIGNALS if s != signal.SIGUSR1)],
)
def test_every_signal_that_announces_an_end_is_a_graceful_stop(new_run: NewRun, sig: signal.Signals) -> None:
    run = new_run(steps=2000).start()
    run.until_step(5)
    assert run.process is not None
    run.process.send_signal(sig)
    assert run.wait(60) == 11, run.output
    assert [r["status"] for r in run.journal("status")] == ["interrupted"]
    assert run.faults.left_over() == []
