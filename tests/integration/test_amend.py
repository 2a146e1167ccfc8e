"""A run goes on with other arguments, nodes or ranks, or a new one begins at a step of its past."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import RunUnderTest

pytestmark = [pytest.mark.integration, pytest.mark.slow]
NewRun = Callable[..., RunUnderTest]
SCRIPT = """
import argparse, sys, time
import torch, torch.distributed as dist, unbroken
steps, lr = int(sys.argv[1]), sys.argv[2]
if lr == "wrong":
    argparse.ArgumentParser().error("unrecognized arguments: wrong")
run = unbroken.attach()
dist.init_process_group("gloo")
c = unbroken.Checkpointer(snapshot_every=1, persist_every=10, memory="64MiB")
state = {"w": torch.zeros(2), "history": []}
restored = c.restore(state)
first = restored.step + 1 if restored else 1
for step in range(first, steps + 1):
    time.sleep(0.05)
    state["w"] += 1
    state["history"].append((step, lr, dist.get_world_size()))
    run.step(step, loss=1.0 / step)
    c.save(step, state)
    if run.should_stop(step):
        break
c.close()
if dist.get_rank() == 0:
    print("HISTORY", state["history"])
if step < steps:
    sys.exit(75)
"""


def amend(
    run: RunUnderTest, *command: str, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """`unbroken run --amend` beside the run, from a shell of its own."""
    argv = [sys.executable, "-m", "unbroken", "run", "--run-dir", str(run.run_dir.path), "--amend", *options]
    return subprocess.run(
        [*argv, "--", *command], cwd=run.folder, capture_output=True, text=True, timeout=120, check=False
    )


def history(run: RunUnderTest) -> list[tuple[int, str, int]]:
    """(step, learning rate, ranks) of each step in the line that the last attempt ended with."""
    said = [
        line
        for log in sorted(run.run_dir.attempts.glob("*/*/rank-0.log"))
        for line in log.read_text().splitlines()
        if line.startswith("HISTORY ")
    ]
    found: list[tuple[int, str, int]] = eval(said[-1].removeprefix("HISTORY "))  # our own script printed it
    return found


def test_a_live_run_takes_another_argument_and_loses_no_step(new_run: NewRun) -> None:
    run = new_run("--nodes", "2", "--nproc", "1", script=SCRIPT, args=["300", "0.1"]).start()
    run.until_step(15)
    refused = amend(run, "missing.py", "300", "0.1")
    assert refused.returncode == 10 and "the script does not exist" in refused.stderr, refused
    changed = amend(run, "script.py", "300", "0.05")
    assert changed.returncode == 0, changed
    assert "0.1 -> 0.05" in changed.stdout and "attempt 2 runs with them, from step" in changed.stdout, (
        changed
    )
    assert run.wait() == 0, run.output
    steps = history(run)
    assert [s for s, *_ in steps] == list(range(1, 301)), "each step once"
    turn = next(s for s, lr, _ in steps if lr == "0.05")
    assert 15 < turn < 300 and all(lr == ("0.1" if s < turn else "0.05") for s, lr, _ in steps)
    assert run.incidents() == []
    assert [r["was"] for r in run.journal("amended")] == [["script.py", "300", "0.1"]]
    # Now those are its arguments: the old ones are another command line's.
    old = new_run("--nodes", "2", "--nproc", "1", script=SCRIPT, args=["300", "0.1"]).start()
    assert old.wait() == 12, old.output


def test_a_live_run_goes_back_from_arguments_that_the_script_refuses(new_run: NewRun) -> None:
    run = new_run("--nodes", "2", "--nproc", "1", script=SCRIPT, args=["200", "0.1"]).start()
    run.until_step(15)
    wrong = amend(run, "script.py", "200", "wrong")
    assert wrong.returncode == 10 and "waiting for its first step" in wrong.stdout, wrong
    assert "failed before its first step, and the run goes back" in wrong.stderr, wrong
    assert "wrong -> 0.1" in wrong.stderr and "unrecognized arguments" in wrong.stderr, wrong
    assert run.wait() == 0, run.output
    assert [(s, lr) for s, lr, _ in history(run)] == [(s, "0.1") for s in range(1, 201)]
    assert [r.get("back", False) for r in run.journal("amended")] == [False, True]


def test_a_stopped_run_goes_on_with_fewer_ranks_and_a_completed_one_with_more_steps(new_run: NewRun) -> None:
    run = new_run("--nodes", "2", "--nproc", "2", script=SCRIPT, args=["60", "a"]).start()
    run.until_step(12)
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 11, run.output
    smaller = amend(run, "script.py", "40", "b", options=("--nodes", "1"))
    assert smaller.returncode == 0, smaller
    assert "from 2 nodes x 2 ranks to 1 x 2" in smaller.stdout and "not bit for bit" in smaller.stdout, (
        smaller
    )
    longer = amend(run, "script.py", "50", "c")
    assert longer.returncode == 0, longer
    steps = history(run)
    assert [s for s, *_ in steps] == list(range(1, 51)), "each step once"
    assert {(lr, ranks) for _, lr, ranks in steps} == {("a", 4), ("b", 2), ("c", 2)}


def test_a_fork_shares_the_past_and_leaves_the_first_run_alone(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run("--nodes", "1", "--nproc", "1", script=SCRIPT, args=["40", "a"]).start()
    assert run.wait() == 0, run.output
    before = sorted(p.name for p in run.run_dir.checkpoints.iterdir())

    def fork(step: str, *more: str) -> subprocess.CompletedProcess[str]:
        argv = [
            sys.executable,
            "-m",
            "unbroken",
            "run",
            "--run-dir",
            str(tmp_path / "fork"),
            *more,
            "--fork-from",
            step,
        ]
        return subprocess.run(
            [*argv, "--", "script.py", "30", "b"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    assert fork("20").returncode == 2, "of which run?"
    none = fork("7", "--from", str(run.run_dir.path))
    assert none.returncode == 30 and "20" in none.stderr and not (tmp_path / "fork" / "run.toml").exists(), (
        none
    )
    done = fork("20", "--from", str(run.run_dir.path))
    assert done.returncode == 0, done
    (log,) = (tmp_path / "fork").glob("attempts/*/*/rank-0.log")
    steps = eval(log.read_text().split("HISTORY ")[1])  # our own script printed it
    assert [lr for _, lr, _ in steps] == ["a"] * 20 + ["b"] * 10
    assert sorted(p.name for p in run.run_dir.checkpoints.iterdir()) == before
