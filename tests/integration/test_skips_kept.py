"""What a rollback skipped stays skipped, and every other sample comes once: over an amended command, a stop from outside and other ranks."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from unbroken.checkpoint.catalogue.contents import listing, read_committed
from unbroken.checkpoint.storage import open_storage
from unbroken.data.position import count

from .conftest import RunUnderTest
from .test_amend import amend

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.soak]
BATCH, STEPS = 12, 320
SCRIPT = f"""
import sys, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
import unbroken, unbroken.data

class Numbers(Dataset):
    def __len__(self):
        return 1200
    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        x = torch.randn(8, generator=g)
        return x, x.sum().view(1) + 0.3 * torch.randn(1, generator=g), i

run = unbroken.attach(total_steps={STEPS})
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
world = dist.get_world_size()
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
loader = unbroken.data.wrap(DataLoader(Numbers(), batch_size={BATCH} // world, shuffle=True))
c = unbroken.Checkpointer(snapshot_every=1, persist_every=10, keep=40, memory="64MiB")
state = {{"model": model, "loader": loader, "spoilt": False}}
c.restore(state)
done = False
for epoch in loader.epochs(10):
    for x, y, i in loader:
        # Weights that met this sample stay bad.
        spoilt = torch.tensor(float(state["spoilt"] or (epoch == 0 and 700 in i.tolist())))
        dist.all_reduce(spoilt)
        state["spoilt"] = bool(spoilt)
        loss = ((model(x) - y) ** 2).mean() + 30 * float(spoilt > 0)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
        time.sleep(0.03)
        run.step(loader.step, loss=loss.item())
        stop = run.should_stop(loader.step)
        done = stop or loader.step >= {STEPS}
        c.save(loader.step, state, persist=True if done else None)
        if done:
            break
    if done:
        break
c.close()
dist.destroy_process_group()
sys.exit(unbroken.EXIT_STOPPED if stop else 0)
"""


def until_step(run: RunUnderTest, attempt: int, step: int, within: float = 120) -> None:
    """Waits for a step of an attempt; `wait_for_step` takes one of any."""
    deadline = time.monotonic() + within
    while run.attempts() < attempt and time.monotonic() < deadline:
        assert run.process is not None and run.process.poll() is None
        time.sleep(0.05)
    run.until_step(step, within=within)


def test_what_was_skipped_stays_so_over_an_amendment_a_stop_and_other_ranks(
    new_run: Callable[..., RunUnderTest],
) -> None:
    run = new_run("--nproc", "2", script=SCRIPT, args=["0.02"]).start()
    until_step(run, 2, 40)
    changed = amend(run, "script.py", "0.01")
    assert changed.returncode == 0, changed
    until_step(run, 3, run.faults.wait_for_step(0, within=60) + 10)
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(120) == 11, run.output
    more = amend(run, "script.py", "0.01", options=("--nproc", "3"))
    assert more.returncode == 0, more
    (rollback,) = run.journal("rollback")
    ((begin, end),) = rollback["skip"]
    storage = open_storage(str(run.run_dir.checkpoints))
    newest = max((f for f in listing(storage) if f.committed), key=lambda f: (f.attempt, f.step))
    position = read_committed(storage, newest.name).position
    assert newest.step == STEPS and position is not None
    assert position.samples == ((0, begin), (end, STEPS * BATCH + end - begin)), "each of the others once"
    assert position.skips == ((begin, end),) and count(position.samples) == STEPS * BATCH
    assert [i["kind"] for i in run.incidents()] == ["loss_spike"]
