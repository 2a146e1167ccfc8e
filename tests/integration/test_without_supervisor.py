"""Training goes on without its supervisor's word until the lease expires, and with all its snapshots."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from .conftest import RunUnderTest

pytestmark = [pytest.mark.breakers, pytest.mark.integration]
NewRun = Callable[..., RunUnderTest]

SCRIPT = """
import os, sys, time
import torch, unbroken
last = int(sys.argv[1])
run = unbroken.attach(total_steps=last)
torch.distributed.init_process_group("gloo")
state = {"w": torch.zeros(1000)}
checkpoints = unbroken.Checkpointer(snapshot_every=5, persist_every=1000)
restored = checkpoints.restore(state)
for step in range(restored.step + 1 if restored else 1, last + 1):
    time.sleep(0.02)
    state["w"] += 1
    torch.distributed.all_reduce(torch.ones(1))
    if checkpoints.due(step):
        checkpoints.save(step, state)
    run.step(step)
print("skipped", checkpoints.skipped, flush=True)
checkpoints.close()
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("supervisor stopped", marks=pytest.mark.slow),
        pytest.param("supervisor killed", marks=pytest.mark.slow),
        pytest.param("agent stopped", marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_without_the_supervisors_word(new_run: NewRun, fault: str) -> None:
    run = new_run("--nodes", "2", "--nproc", "1", "--lease", "30s", script=SCRIPT, args=["500"]).start()
    run.until_step(20)
    assert run.process is not None
    agent = run.faults.processes("agent", node="node-001")[0].pid
    victim = agent if fault == "agent stopped" else run.process.pid
    os.kill(victim, signal.SIGKILL if fault == "supervisor killed" else signal.SIGSTOP)
    try:
        began, before = time.monotonic(), run.faults.step()[1]
        # Three buffers, a snapshot every five steps: it stood still after fifteen.
        while run.faults.step()[1] < before + 80 and time.monotonic() < began + 20:
            time.sleep(0.02)
        reached = run.faults.step()[1]
    finally:
        if fault != "supervisor killed":
            os.kill(victim, signal.SIGCONT)
    assert reached >= before + 80, (before, reached)
    if fault == "supervisor killed":
        run.process.communicate()
        run.start()
    assert run.wait(120) == 0, run.output
    assert run.attempts() == 1
    for rank in range(2):
        assert "skipped 0" in run.run_dir.rank_log(1, f"node-00{rank}", rank).read_text()
