"""How ranks end and what is made of it: floods of logs, early exits, kills, hangs, agents that stand still."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from unbroken.recover.node.ranks.kernel_log import KernelLog

from ..support.memory_limit import join, memory_group
from .conftest import RunUnderTest

pytestmark = [pytest.mark.breakers, pytest.mark.integration]
NewRun = Callable[..., RunUnderTest]

FLOOD = """
import os, sys, time
line = "WARNING: tokens beyond 4096 are cut, this message repeats for every sample 254\\n"
for _ in range(int(sys.argv[1])):
    sys.stdout.write(line * 12500)
for step in range(1, 10):
    print(f"step {step} loss {1 / step:.4f}", flush=True)
    time.sleep(0.05)
if sys.argv[2] == "fail":
    raise KeyError("labels")
if sys.argv[2] == "stay":
    time.sleep(300)
"""

COLLECTIVE = """
import os, sys, time, torch, unbroken
import torch.distributed as dist
dist.init_process_group("gloo")
run = unbroken.attach()

def elsewhere():
    time.sleep(600)

for step in range(1, 200):
    if step == 20 and dist.get_rank() == 1:
        if sys.argv[1] == "exit":
            os._exit(0)
        if sys.argv[1] == "hang":
            elsewhere()
    x = torch.ones(4)
    dist.all_reduce(x)
    run.step(step, loss=float(x[0]))
dist.destroy_process_group()
"""

APART = """
import os, sys, time, unbroken
run = unbroken.attach()
steps = 10 if os.environ["RANK"] == "1" else 60
for step in range(1, steps + 1):
    time.sleep(0.1)
    run.step(step, loss=1.0)
"""


@pytest.mark.parametrize("how", ["well", pytest.param("fail", marks=pytest.mark.slow)])
def test_a_log_of_120_mb_holds_nothing_up(new_run: NewRun, how: str) -> None:
    run = new_run(script=FLOOD, args=["120", how]).start()
    assert run.wait(within=80) == (0 if how == "well" else 10), run.output
    assert {e["step"] for e in run.journal("ended")} == {9}
    if how == "fail":
        # On a machine that hardly runs a diagnosis may be cut short; then the second one names it.
        incident = run.incidents()[-1]
        assert incident["verdict"]["reason"] == "KeyError" and run.attempts() <= 2
        assert incident["phases"]["diagnose"] < 45


@pytest.mark.parametrize("when", ["in the flood", pytest.param("in the diagnosis", marks=pytest.mark.slow)])
def test_a_stop_is_answered_while_a_log_floods(
    new_run: NewRun, eventually: Callable[..., None], when: str
) -> None:
    args = ["400", "stay"] if when == "in the flood" else ["120", "fail"]
    run = new_run("--stop-within", "3s", script=FLOOD, args=args).start()
    log = run.run_dir.rank_log(1, "node-000", 0)
    if when == "in the flood":
        eventually(lambda: log.exists() and log.stat().st_size > 50_000_000, within=60)
    else:
        eventually(lambda: log.exists() and b"KeyError" in log.read_bytes()[-2000:], within=60)
    assert run.process is not None and run.process.stdout is not None
    began = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    said = ""
    while "stop" not in said.rpartition("attempt 1:")[2] and (line := run.process.stdout.readline()):
        said += line
    took = time.monotonic() - began
    code = run.wait(within=60)
    run.output = said + run.output
    assert took < 5, run.output
    assert code in ((11,) if when == "in the flood" else (10, 11)), run.output


@pytest.mark.slow
def test_a_rank_that_leaves_while_others_train_is_the_root_and_stops_the_run_the_second_time(
    new_run: NewRun,
) -> None:
    run = new_run("--nproc", "2", script=COLLECTIVE, args=["exit"]).start()
    assert run.wait(within=120) == 10, run.output
    first, second = run.incidents()
    for incident in (first, second):
        verdict = incident["verdict"]
        assert "rank 1 ended with exit code 0 while others went on" in verdict["root"]["text"]
        assert verdict["faulty"]["rank"] == 1 and verdict["decided_by"] == "early-exit"
    assert (first["action"], second["action"]) == ("restart", "stop")
    assert "came twice at step 19 without progress between" in second["why"]
    assert run.attempts() == 2
    assert "no step is known" not in run.output


@pytest.mark.slow
def test_ranks_that_end_well_long_apart_are_no_incident(new_run: NewRun) -> None:
    run = new_run("--nproc", "2", "--suspect-after", "1s", script=APART, args=[]).start()
    assert run.wait() == 0, run.output
    assert run.incidents() == [] and run.attempts() == 1
    assert "suspected" not in run.output


@pytest.mark.slow
def test_of_two_ranks_the_one_that_hangs_is_named_by_its_stack(new_run: NewRun) -> None:
    run = new_run(
        "--nproc", "2", "--hang-after", "8s", "--suspect-after", "3s", script=COLLECTIVE, args=["hang"]
    ).start()
    assert run.wait(within=150) == 10, run.output
    first, second = run.incidents()
    assert first["verdict"]["reason"] == "Hang"
    assert first["verdict"]["faulty"]["rank"] == 1
    assert "in elsewhere (" in first["verdict"]["root"]["text"]
    assert second["action"] == "stop" and "came twice at step 19" in second["why"], (
        "it hangs in the same place again"
    )


def test_what_is_known_of_a_kill_is_said(new_run: NewRun) -> None:
    run = new_run("--nproc", "2").start()
    run.until_step(5)
    run.faults.kill_rank(1)
    assert run.wait() == 0, run.output
    (incident,) = run.incidents()
    assert "rank 1 was killed by signal 9 (SIGKILL)" in run.output
    assert "kernel's log" in run.output and "Unknown, " not in run.output
    notes = " ".join(incident["verdict"]["notes"])
    assert (
        "killed by signal 9; no out-of-memory kill in the kernel's log" in notes or "cannot be read" in notes
    )


GROWS = """
import os, time, unbroken
run = unbroken.attach(total_steps=20)
for step in range(1, 21):
    run.step(step, loss=1.0 / step)
    if step == 5 and os.environ["RANK"] == "1" and not os.path.exists("grown"):
        while not os.path.exists("limited"):
            time.sleep(0.01)
        open("grown", "w").close()
        held = [b"x" * (1 << 20) for _ in range(500)]
    time.sleep(0.01)
"""


def test_a_rank_that_the_kernel_kills_for_memory_is_said_to(new_run: NewRun) -> None:
    if why_not := KernelLog().why_not:
        pytest.skip(why_not)
    with memory_group(64 << 20) as group:
        run = new_run("--nproc", "2", script=GROWS, args=[]).start()
        run.until_step(5)
        join(group, run.faults.ranks()[1].pid)
        (run.folder / "limited").touch()
        assert run.wait() == 0, run.output
        (incident,) = run.incidents()
    assert incident["verdict"]["reason"] == "OutOfMemoryError", incident
    assert "rank 1 on node-000 ended by SIGKILL (memory ran out, says the kernel)" in run.output
    assert incident["verdict"]["confidence"] == 0.9, "its log names the process"


@pytest.mark.slow
def test_an_agent_that_stands_still_is_said_to(new_run: NewRun) -> None:
    run = new_run("--nodes", "2", "--lease", "2s", steps=200).start()
    run.until_step(5)
    (agent,) = run.faults.processes("agent", node="node-001")
    os.kill(agent.pid, signal.SIGSTOP)
    assert run.wait() == 0, run.output
    incident = run.incidents()[0]
    assert f"its agent (process {agent.pid}) is stopped by a signal" in incident["verdict"]["root"]["text"]
    assert "nothing is left" not in run.output
