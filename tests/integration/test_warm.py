"""Real runs whose next attempt starts from warm processes: after a kill, on a spare, and where such a start does no good."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.conftest import RunUnderTest

TORCH = """
import os, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset

def main():
    steps, saved = int(sys.argv[1]), "saved.pt"
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    step = 0
    if os.path.exists(saved):
        found = torch.load(saved, weights_only=True)
        step, state, rng = found["step"], found["model"], found["rng"]
        model.load_state_dict(state)
    data = TensorDataset(torch.arange(8.0 * steps).reshape(steps, 8) / steps)
    loader = DataLoader(data, batch_size=1, num_workers=1, multiprocessing_context=sys.argv[2])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = iter(loader)  # which draws a number
    if step:
        torch.set_rng_state(rng)
    for number, (x,) in enumerate(batches, 1):
        if number <= step:
            continue
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.save({"step": number, "model": model.state_dict(), "rng": torch.get_rng_state()}, saved + ".new")
        os.rename(saved + ".new", saved)
        with open("losses", "a") as f:
            f.write(f"{number} {loss.item().hex()}\\n")
        print(f"step {number} loss {loss.item():.4f}", flush=True)
        while number == 20 and not os.path.exists("killed"):
            time.sleep(0.05)

if __name__ == "__main__":
    main()
"""
PLAIN = """
import os, sys, time
print("fractions" in sys.modules, flush=True)
import fractions, decimal, colorsys
import unbroken
if len(sys.argv) > 2 and "COLD" not in os.environ and sys.argv[2] == "strange" and WARM:
    raise AttributeError("nothing but a warm start does this")
run = unbroken.attach(total_steps=int(sys.argv[1]))
for step in range(1, int(sys.argv[1]) + 1):
    time.sleep(0.05)
    run.step(step, loss=1.0)
    if os.path.exists("done"):
        break
    if run.should_stop(step):
        sys.exit(unbroken.EXIT_STOPPED)
""".replace('print("fractions"', 'WARM = "fractions" in sys.modules\nprint("fractions"')


def wait(ready: Callable[[], Any], within: float = 120) -> Any:
    deadline = time.monotonic() + within
    while not (found := ready()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def warm(run: RunUnderTest, node: str = "") -> list[dict[str, Any]]:
    return [r for r in run.journal("warm") if r["node"] == (node or r["node"])]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["spawn", pytest.param("fork", marks=pytest.mark.soak)])
def test_losses_of_a_plain_script_are_those_of_a_run_that_was_never_killed(
    new_run: Callable[..., RunUnderTest], how: str
) -> None:
    run = new_run("--warm-after", "0s", script=TORCH, args=["25", how]).start()
    wait(lambda: warm(run))
    rank = run.faults.kill_rank(0)
    (run.folder / "killed").touch()
    assert run.wait() == 0, run.story()
    (launched,) = run.journal("launched")
    assert (launched["warm"], launched["cold"]) == (1, {}), run.story()
    incident = run.incidents()[0]
    assert (incident["warm"], incident["schema"]) == (1, 2)
    assert (
        incident["phases"]["start"] + incident["phases"]["restore_and_first_step"] < warm(run)[0]["seconds"]
    )
    killed = [x.split() for x in (run.folder / "losses").read_text().splitlines()]
    for name in ("losses", "saved.pt"):
        (run.folder / name).unlink()
    again = new_run("--no-warm", "--run-dir", str(run.folder / "again"), script=TORCH, args=["25", how])
    again.options, again.run_dir = [], type(again.run_dir)(run.folder / "again")
    assert again.start().wait() == 0
    assert (
        killed == [x.split() for x in (run.folder / "losses").read_text().splitlines()] and len(killed) == 25
    )
    assert rank.pid and run.faults.left_over() == []


@pytest.mark.slow
def test_a_spare_has_warm_processes_too(new_run: Callable[..., RunUnderTest]) -> None:
    run = new_run("--warm-after", "0s", "--spares", "1", "--lease", "3s", script=PLAIN, args=["2000"]).start()
    wait(lambda: warm(run, "node-001"))
    run.faults.kill_node("node-000")
    wait(lambda: run.journal("resumed"))
    (launched,) = run.journal("launched")
    assert launched["warm"] == 1, run.story()
    assert run.journal("attempt")[-1]["slots"] == ["node-001"]
    assert run.run_dir.rank_log(2, "node-001", 0).read_text().splitlines()[0] == "True"


@pytest.mark.slow
def test_a_start_that_fails_only_when_it_is_warm_is_made_cold(new_run: Callable[..., RunUnderTest]) -> None:
    run = new_run("--warm-after", "0s", script=PLAIN, args=["2000", "strange"]).start()
    wait(lambda: warm(run))
    run.faults.kill_rank(0)
    wait(lambda: len(run.journal("launched")) == 2)
    (run.folder / "done").touch()
    assert run.wait() == 0, run.story()
    assert [(r["attempt"], r["warm"]) for r in run.journal("launched")] == [(2, 1), (3, 0)]
    assert "once more, cold" in run.incidents()[1]["why"]


@pytest.mark.slow
def test_what_waits_ends_with_its_agent_and_with_its_run(new_run: Callable[..., RunUnderTest]) -> None:
    run = new_run("--warm-after", "0s", script=PLAIN, args=["2000"]).start()
    wait(lambda: warm(run))
    (waiting,) = run.faults.processes("warm")
    run.faults.kill_agent("node-000")
    wait(lambda: waiting.pid not in [p.pid for p in run.faults.processes("warm")], within=10)
    (run.folder / "done").touch()
    assert run.wait() == 0, run.story()
    assert run.faults.processes("warm") == [] and run.faults.left_over() == []
