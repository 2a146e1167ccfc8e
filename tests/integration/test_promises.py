"""A run whose directory goes, whose supervisor was stopped, or whose old processes are not proven gone."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable

import pytest

from .conftest import RunUnderTest, run_json

pytestmark = [pytest.mark.breakers, pytest.mark.integration]
NewRun = Callable[..., RunUnderTest]

SAVES = """
import sys, time, torch, unbroken
run = unbroken.attach()
c = unbroken.Checkpointer(snapshot_every=5, persist_every=100000)
state = {"w": torch.zeros(4)}
r = c.restore(state)
for step in range(r.step + 1 if r else 1, 3000):
    state["w"] += 1
    if c.due(step):
        c.save(step, state)
    run.step(step, loss=1.0)
    time.sleep(0.05)
    if run.should_stop(step):
        c.save(step, state, persist=True)
        c.close()
        sys.exit(unbroken.EXIT_STOPPED)
"""

OWN = """
import os, sys, time, unbroken
run = unbroken.attach()
if sys.argv[1] == "output":
    open(os.environ["UNBROKEN_OUTPUT"] + "/model.pt", "w").write("x")
for step in range(1, 40):
    time.sleep(0.05)
    run.step(step, loss=1.0)
    if run.should_stop(step):
        sys.exit(unbroken.EXIT_STOPPED)
"""


def read_until(run: RunUnderTest, words: str, within: float = 30) -> float:
    """Seconds until the run has said `words`."""
    assert run.process is not None and run.process.stdout is not None
    began = time.monotonic()
    while words not in run.output:
        assert time.monotonic() - began < within, run.output
        line = run.process.stdout.readline()
        assert line, run.output
        run.output += line
    return time.monotonic() - began


@pytest.mark.parametrize("how", ["deleted", pytest.param("moved and made again", marks=pytest.mark.slow)])
def test_a_run_directory_that_goes_is_noticed_and_what_is_in_memory_is_saved(
    new_run: NewRun, how: str
) -> None:
    run = new_run("--stop-within", "10s", script=SAVES, args=[]).start()
    step = run.until_step(12)
    faults = run.faults
    if how == "deleted":
        # From one moment to the next: what is written meanwhile would keep a folder from being removed.
        run.run_dir.path.rename(gone := run.folder / "gone")
        shutil.rmtree(gone, ignore_errors=True)
    else:
        run.run_dir.path.rename(run.folder / "moved")
        run.run_dir.path.mkdir()
    assert read_until(run, "nothing can be recorded any more") < 5
    assert run.wait(within=40) == 17, run.output
    saved = sorted(p.parent.name for p in run.run_dir.checkpoints.glob("*/COMMITTED"))
    assert saved and int(saved[-1][5:13]) >= step
    assert f"saved: {saved[-1]}" in run.output
    assert "Traceback" not in run.output
    assert faults.left_over() == []


@pytest.mark.slow
def test_a_supervisor_that_was_stopped_leaves_in_one_line_and_its_successor_keeps_the_memory(
    new_run: NewRun, eventually: Callable[..., None]
) -> None:
    run = new_run("--lease", "20s", script=SAVES, args=[]).start()
    run.until_step(12)
    first = run.process
    assert first is not None
    ranks = {r: p.pid for r, p in run.faults.ranks().items()}
    keepers = {p.pid for p in run.faults.processes("keeper")}
    os.kill(first.pid, signal.SIGSTOP)
    run.start()
    second = run.process
    assert second is not None and second is not first
    try:
        read_until(run, "took over attempt 1")
        assert {r: p.pid for r, p in run.faults.ranks().items()} == ranks, "no rank was touched"
    finally:
        os.kill(first.pid, signal.SIGCONT)
    said = first.communicate(timeout=20)[0]
    assert first.returncode == 13, said
    assert said.count("another supervisor took over") == 1
    assert "socket.send" not in said and "Traceback" not in said and "WARNING" not in said
    assert {p.pid for p in run.faults.processes("keeper")} == keepers, "their memory was not given away"
    second.send_signal(signal.SIGTERM)
    assert run.wait() == 11, run.output
    assert run.attempts() == 1


@pytest.mark.parametrize("way", ["confirmed", pytest.param("stopped", marks=pytest.mark.slow)])
def test_an_own_save_waits_for_a_person_where_the_end_of_the_old_process_is_not_proven(
    new_run: NewRun, eventually: Callable[..., None], way: str
) -> None:
    run = new_run("--ownership", "marks", script=OWN, args=["elsewhere"]).start()
    run.until_step(5)
    run.faults.kill_agent("node-000")
    read_until(run, "the next attempt waits for a person")
    assert run.attempts() == 1 and run.journal("waiting")
    told = run_json("status", str(run.run_dir.path), cwd=run.folder)
    assert "waits for a person" in told["why"] and "touch" in told["todo"]
    if way == "stopped":
        assert run.process is not None
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 11, run.output
        return
    sure = run.run_dir.made_sure(1, "node-000")
    assert f"touch {sure}" in run.output
    sure.touch()
    assert run.wait() == 0, run.output
    assert run.attempts() == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "saves"), [("marks", "output"), ("cgroup", "elsewhere"), ("parent", "elsewhere")]
)
def test_with_proof_or_a_folder_of_its_own_it_goes_on(new_run: NewRun, kind: str, saves: str) -> None:
    run = new_run("--ownership", kind, script=OWN, args=[saves]).start()
    run.until_step(5)
    run.faults.kill_agent("node-000")
    assert run.wait() == 0, run.output
    assert run.attempts() == 2 and run.journal("waiting") == []
