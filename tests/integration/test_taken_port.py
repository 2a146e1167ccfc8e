"""Another process takes the port at which the ranks are to meet: the next attempt meets at another, free of charge."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .conftest import RunUnderTest

pytestmark = [pytest.mark.integration, pytest.mark.slow]
SCRIPT = """
import os, socket
import torch.distributed as dist, unbroken
run = unbroken.attach()
if os.environ["RANK"] == "0" and os.environ["UNBROKEN_ATTEMPT"] == "1":
    thief = socket.socket()
    thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    thief.bind(("0.0.0.0", int(os.environ["MASTER_PORT"])))
    thief.listen()
dist.init_process_group("gloo")
for step in range(3):
    dist.barrier()
    run.step(step, loss=1.0)
"""


def test_ranks_meet_at_another_port(new_run: Callable[..., RunUnderTest]) -> None:
    run = new_run("--nodes", "1", "--nproc", "2", script=SCRIPT).start()
    assert run.wait(90) == 0, run.output
    (incident,) = run.incidents()
    assert incident["verdict"]["decided_by"] == "port-taken", incident["verdict"]
    assert "another process took the port" in incident["why"]
    (charged,) = (r for r in run.journal() if r["kind"] == "incident")
    assert charged["cause"] == "port"
