"""Runs on pods, over a fake API whose nodes start what pods ask for: what happens to nodes, containers and supervisors, and
what becomes of the run."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip(
    "kubernetes_asyncio", reason="needs kubernetes_asyncio: pip install -r requirements/all.txt"
)
pytest.importorskip("kmock", reason="needs kmock: pip install -r requirements/all.txt")
pytest.importorskip(
    "kubernetes_validate", reason="needs kubernetes-validate: pip install -r requirements/all.txt"
)

from unbroken.cluster.holding.processes import marked
from unbroken.progress import read_spec

from ..cluster.kubernetes.bench import clear_memory
from ..support.kubernetes.site import IMAGE, KubernetesSite
from ..support.slurm import wait_for
from .conftest import RunUnderTest

pytestmark = [pytest.mark.integration, pytest.mark.slow]
NewRun = Callable[..., RunUnderTest]
# Snapshots are in the keepers' memory alone, but for every 1000th: what is restored has come through their container.
SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist, unbroken
steps, every = int(sys.argv[1]), int(sys.argv[2])
run = unbroken.attach(total_steps=steps)
dist.init_process_group("gloo")
c = unbroken.Checkpointer(snapshot_every=1, persist_every=every, memory="64MiB")
state = {"w": torch.zeros(2), "steps": []}
restored = c.restore(state)
for step in range(restored.step + 1 if restored else 1, steps + 1):
    time.sleep(0.05)
    state["w"] += 1
    state["steps"].append(step)
    run.step(step, loss=1.0 / step)
    c.save(step, state)
    if run.should_stop(step):
        break
c.close()
print("STEPS", state["steps"] == list(range(1, step + 1)), float(state["w"][0]) == step, os.environ["CUDA_VISIBLE_DEVICES"])
if step < steps:
    sys.exit(75)
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[KubernetesSite]:
    with KubernetesSite(tmp_path / "site", [f"k{i}" for i in range(4)], gpus=1) as made:
        yield made


@pytest.fixture
def start(site: KubernetesSite, new_run: NewRun) -> Iterator[Callable[..., RunUnderTest]]:
    made: list[RunUnderTest] = []

    def make(*options: str, more: str = "", **given: object) -> RunUnderTest:
        cluster = f"kubernetes,image={IMAGE},kubeconfig={site.kubeconfig},python={sys.executable},gpus=1,grace=20s{more}"
        made.append(new_run("--cluster", cluster, *options, **given).start())
        return made[-1]

    yield make
    for run in made:
        run.end()
        if run.run_dir.spec.exists():
            clear_memory(read_spec(run.run_dir.spec).run_id)


def find_processes(run: RunUnderTest, *roles: str) -> set[int]:
    return {p.pid for p in marked(read_spec(run.run_dir.spec).run_id) if p.role in roles}


def until_attempt(run: RunUnderTest, number: int, step: int = 5) -> None:
    file = run.run_dir.steps(number)
    wait_for(
        lambda: file.exists() and len(file.read_text().splitlines()) >= step,
        f"step {step} of attempt {number}",
        60,
    )


def test_a_node_that_goes_is_replaced_by_the_spare_and_the_run_ends(
    start: Callable[..., RunUnderTest], site: KubernetesSite
) -> None:
    """Nobody can say what runs on a node that is not heard of: its lease is waited for. At the end the pods are gone with the run."""
    run = start("--nodes", "2", "--spares", "1", "--lease", "5s", script=SCRIPT, args=["60", "10"])
    until_attempt(run, 1, step=15)
    first, lost = run.journal("attempt")[0]["slots"]
    site.power_off(lost)
    assert run.wait(120) == 0, run.output
    assert lost not in run.journal("attempt")[1]["slots"] and first in run.journal("attempt")[1]["slots"]
    (incident,) = run.incidents()
    assert incident["kind"] == "node_lost" and incident["nodes"] == {lost: "unreachable"}
    said = [x for x in run.run_dir.rank_log(2, first, 0).read_text().splitlines() if x.startswith("STEPS")]
    assert said == [f"STEPS True True GPU-{first}-0"], "each step once, on the GPU of its own pod"
    assert "stopped posting node status" in run.story()
    left = [p["metadata"]["name"] for p in site.pods() if p["spec"].get("nodeName") != lost]
    assert left == [], "the pods go with the run"


def test_ranks_that_run_out_of_memory_take_no_snapshot_with_them_and_an_evicted_node_is_left_at_a_step(
    start: Callable[..., RunUnderTest], site: KubernetesSite
) -> None:
    run = start("--nodes", "2", "--spares", "1", script=SCRIPT, args=["2000", "1000"])
    until_attempt(run, 1, step=15)
    first, second = run.journal("attempt")[0]["slots"]
    kept = find_processes(run, "agent", "keeper")
    site.kill_for_memory(second, "ranks")
    until_attempt(run, 2)
    assert find_processes(run, "agent", "keeper") == kept, "the container of agent and keeper is another one"
    assert run.journal("attempt")[1]["slots"] == [first, second]
    resumed = run.journal("first_step")[1]["step"]
    assert resumed >= 15, "from the keepers' memory: nothing is on disk yet"
    site.evict(second, 20)
    until_attempt(run, 3)
    assert second not in run.journal("attempt")[2]["slots"]
    assert [i["kind"] for i in run.incidents()] == ["failed", "preempted"]
    assert run.journal("first_step")[2]["step"] == run.journal("ended")[1]["step"] + 1, (
        "the last step was saved"
    )
    assert "evicted" in run.story()
    wait_for(
        lambda: not any(p["spec"].get("nodeName") == second for p in site.pods()),
        "the evicted pod to be gone",
    )


def test_a_supervisor_is_succeeded_and_finds_its_pods(
    start: Callable[..., RunUnderTest], site: KubernetesSite
) -> None:
    run = start("--nodes", "2", "--lease", "60s", steps=2000)
    until_attempt(run, 1)
    ranks, pods = find_processes(run, "rank"), {p["metadata"]["name"] for p in site.pods()}
    assert run.process is not None
    run.process.send_signal(signal.SIGKILL)
    run.process.wait(10)
    run.start()
    wait_for(lambda: run.journal("adopted") or run.attempts() > 1, "the takeover", 60)
    assert find_processes(run, "rank") == ranks and run.attempts() == 1
    assert {p["metadata"]["name"] for p in site.pods()} == pods
    agent = min(find_processes(run, "agent"))  # a child of it has its marks until its exec
    os.kill(agent, signal.SIGKILL)
    until_attempt(run, 2, step=2)
    assert run.incidents()[-1]["kind"] == "agent_lost"
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 11, run.output
    assert not find_processes(run, "agent", "keeper", "rank") and site.pods() == []
