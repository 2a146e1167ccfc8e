"""A run loses a node, goes on with fewer, gets it back and ends with the samples and the weights of an undisturbed one."""

from __future__ import annotations

import json
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unbroken.data import journal
from unbroken.progress import RunDir
from unbroken.status import gather

from .conftest import RunUnderTest, run_json

pytestmark = [pytest.mark.integration, pytest.mark.slow]
NewRun = Callable[..., RunUnderTest]
PROGRAM = str(Path(__file__).with_name("plain_cluster.py"))
GLOBAL_BATCH, EPOCHS = 12, 10
SCRIPT = f"""
import json, os, sys, time
import torch, torch.distributed as dist, unbroken, unbroken.data
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

draw = torch.Generator().manual_seed(0)
X = torch.randn(101, 4, generator=draw)
Y = X @ torch.tensor([1.0, -2.0, 3.0, 0.5]) + 0.1 * torch.randn(101, generator=draw)
PAUSE = float(os.environ.get("PAUSE", "0.05"))

def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    loader = DataLoader(range(101), batch_size=4, shuffle=True)
    return model, torch.optim.AdamW(model.parameters(), lr=0.02), unbroken.data.wrap(loader, global_batch={GLOBAL_BATCH})

def steps(model, optimizer, loader, rank, given):
    for _ in loader.epochs({EPOCHS}):
        for batch in loader:
            loss = (model(X[batch]).squeeze(1) - Y[batch]).pow(2).mean() * loader.weight
            loss.backward()
            number = loader.step if loader.step_ends else loader.step + 1
            given(number, batch.tolist() if loader.weight else [])
            if loader.step_ends:
                optimizer.step()
                optimizer.zero_grad()
                # While it is smaller it is slow, so that the node comes back before the end, however busy the machine is.
                time.sleep(PAUSE * (8 if dist.is_initialized() and dist.get_world_size() < 2 else 1))
                yield loader.step, float(loss.detach())

def main():
    dist.init_process_group("gloo")
    run = unbroken.attach()
    model, optimizer, loader = make()
    c = unbroken.Checkpointer(snapshot_every=1, persist_every=4, memory="64MiB")
    state = {{"model": model, "optimizer": optimizer, "loader": loader}}
    c.restore(state)
    log = open(f"given-{{run.attempt:02d}}-{{run.rank}}", "w")
    def given(step, samples):
        print(json.dumps([step, samples]), file=log, flush=True)
    for step, loss in steps(model, optimizer, loader, run.rank, given):
        run.step(step, loss=loss)
        c.save(step, state)
        if run.should_stop(step):
            c.close()
            sys.exit(unbroken.EXIT_STOPPED)
    c.close()
    if run.rank == 0:
        torch.save(model.module.state_dict(), "weights.pt")

if __name__ == "__main__":
    main()
"""


def read_given(folder: Path) -> dict[int, list[int]]:
    """The samples of each step's last execution, all ranks'."""
    found: dict[int, dict[int, list[int]]] = {}
    for log in sorted(folder.glob("given-*")):
        attempt = int(log.name.split("-")[1])
        for line in log.read_text().splitlines():
            step, samples = json.loads(line)
            found.setdefault(step, {}).setdefault(attempt, []).extend(samples)
    return {step: sorted(of[max(of)]) for step, of in found.items()}


def train_alone(script: Path) -> tuple[dict[int, list[int]], Any]:
    """The same training undisturbed, on one rank in this process."""
    names = runpy.run_path(str(script), run_name="alone")
    names["make"].__globals__["PAUSE"] = 0.0
    model, optimizer, loader = names["make"]()
    given: dict[int, list[int]] = {}
    for _ in names["steps"](
        model, optimizer, loader, 0, lambda step, s: given.setdefault(step, []).extend(s)
    ):
        pass
    return {step: sorted(samples) for step, samples in given.items()}, model.state_dict()


def wait_for(run: RunUnderTest, condition: Callable[[], object], within: float = 60.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert run.process is not None and run.process.poll() is None, "it ended before"
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)


def start(new_run: NewRun, folder: Path, nodes: int, script: str, args: list[str]) -> RunUnderTest:
    """A run that may go on with one node less, on a cluster whose nodes go away by a note."""
    (folder / "notes").mkdir()
    policy = folder / "policy.toml"
    policy.write_text('[policy]\nshrink_after = "1s"\ngrow_after = "1s"\n')
    options = ["--nodes", str(nodes), "--min-nodes", str(nodes - 1), "--policy", str(policy), "--no-warm"]
    cluster = f"plain,notes={folder / 'notes'},size={nodes}"
    return new_run(*options, "--cluster", cluster, script=script, args=args)


def take_away_and_give_back(run: RunUnderTest, node: str, at_step: int) -> None:
    """The node is lost at this step, and back a few steps after the run went on without it."""
    note = run.folder / "notes" / f"away-{node}"
    run.until_step(at_step)
    note.touch()
    wait_for(run, lambda: [r for r in run.journal("first_step") if r["attempt"] == 2])
    run.until_step(run.journal("first_step")[-1]["step"] + 4)
    note.unlink()


def test_it_goes_on_without_a_node_and_ends_as_an_undisturbed_run(new_run: NewRun, tmp_path: Path) -> None:
    import torch

    run = start(new_run, tmp_path, 2, SCRIPT, []).start(program=PROGRAM)
    take_away_and_give_back(run, "plain-1", 9)
    assert run.wait() == 0, run.output
    assert [len(a["slots"]) for a in run.journal("attempt")] == [2, 1, 2]
    assert [r["how"] for r in run.journal("ended")] == ["node_lost", "resized", "completed"]
    (incident,) = run.incidents()
    assert "1 of 2 nodes, without plain-1" in incident["resized"] and incident["steps_lost"] <= 8

    expected, weights = train_alone(tmp_path / "script.py")
    assert read_given(tmp_path) == expected, "each sample once, in its step"
    for name, value in torch.load(tmp_path / "weights.pt").items():
        torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5)

    size = gather(run.run_dir).size
    assert (size.nodes, size.asked, len(size.changes)) == (2, 2, 2) and size.reduced_s > 0
    assert run_json("status", str(run.run_dir.path), cwd=tmp_path)["size"]["reduced_s"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("plan", [[], ["--parameters", "-1"]], ids=["reference", "sharded"])
def test_the_trainer_goes_on_without_a_node_and_gives_each_step_the_same(
    new_run: NewRun, tmp_path: Path, plan: list[str]
) -> None:
    run = start(new_run, tmp_path, 3, "", [])
    options = [
        "--steps",
        "400",
        "--global-batch",
        "12",
        "--device",
        "cpu",
        "--persist-every",
        "10",
        "--lr",
        "1e-3",
        *plan,
    ]
    run.command = ["-m", "unbroken.train", *options]
    run.start(program=PROGRAM)
    take_away_and_give_back(run, "plain-1", 25)
    assert run.wait(250) == 0, run.output
    assert [len(a["slots"]) for a in run.journal("attempt")] == [3, 2, 3]
    alone = RunUnderTest(tmp_path, run.command, [])
    alone.run_dir = RunDir(tmp_path / "alone")
    assert alone.start().wait(250) == 0, alone.output
    given, expected = (journal.read(r.run_dir.path / "data") for r in (run, alone))
    assert {n: b.digest for n, b in given.items()} == {n: b.digest for n, b in expected.items()}
    loss, undisturbed = gather(run.run_dir).loss, gather(alone.run_dir).loss
    assert loss == pytest.approx(undisturbed, rel=0.01)
