"""A spare's keeper has what its rank restores before the rank has started: a whole run, a node lost, the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.keepers import until

from .conftest import RunUnderTest

pytestmark = pytest.mark.integration

TRAINING = """
import os, sys, time
import torch, unbroken

rank = int(os.environ["RANK"])
run = unbroken.attach(total_steps=30)
torch.distributed.init_process_group("gloo")
# Keepers alone move the bytes: no step is on disk, and only a peer has what the lost node's rank restores.
checkpoints = unbroken.Checkpointer("saved", snapshot_every=1, persist_every=1000, memory="64MiB", peer=True)

def make(step):
    return torch.rand(1 << 20, generator=torch.Generator().manual_seed(1000 * rank + step))

state = {"w": torch.zeros(1 << 20)}
restored = checkpoints.restore(state)
if restored:
    assert torch.equal(state["w"], make(restored.step)), "other bits than were saved"
    print("RESTORED", restored.step, restored.source, flush=True)
for step in range(restored.step + 1 if restored else 1, 31):
    state["w"] = make(step)
    saved = checkpoints.save(step, state)
    run.step(step, loss=1.0)
    if not restored and step == 6:
        saved.wait("peer", 30)
        open(f"copied-{rank}", "w").close()
        time.sleep(60)
checkpoints.close()
"""


@pytest.mark.slow
def test_a_spares_keeper_fetches_beside_the_start_of_its_rank(
    new_run: Callable[..., RunUnderTest], tmp_path: Path
) -> None:
    run = new_run("--nodes", "2", "--nproc", "1", "--spares", "1", "--no-warm", script=TRAINING).start()
    run.until_step(6)
    until(lambda: all((tmp_path / f"copied-{r}").exists() for r in range(2)), 30)
    run.faults.kill_node("node-001")
    assert run.wait() == 0, run.story()
    (ahead,) = run.journal("ahead")
    assert (ahead["node"], ahead["attempt"], ahead["step"]) == ("node-002", 2, 6), run.story()
    assert (ahead["fetched"], ahead["missed"], ahead["why"]) == (1, 0, "") and ahead["bytes"] > 4 << 20
    (restored,) = [r for r in run.journal("restored") if r["attempt"] == 2]
    assert restored["step"] == 6 and ahead["t"] < restored["t"]
    assert "RESTORED 6 peer" in run.run_dir.rank_log(2, "node-002", 1).read_text(), run.story()
