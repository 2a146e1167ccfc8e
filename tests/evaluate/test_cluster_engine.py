"""Workers on the nodes of a cluster by its contract: here virtual nodes of this machine, with real processes."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from pathlib import Path

import pytest

from unbroken.cluster.contract import AgentCommand
from unbroken.cluster.holding.processes import marked
from unbroken.cluster.local import find_root
from unbroken.cluster.registry import make_cluster
from unbroken.errors import EvaluationError
from unbroken.evaluate.engines import Slot
from unbroken.evaluate.engines.cluster.engine import ClusterEngine
from unbroken.evaluate.engines.cluster.node import name_slot, name_worker
from unbroken.evaluate.result.folder import EvalDir
from unbroken.evaluate.result.journal import events
from unbroken.evaluate.run.job import Launchers
from unbroken.testing.evaluation import ThreadScoring

from .evaluating import coordinator, evaluate, fake_suite, fake_task, numbers


def test_a_worker_is_named_after_its_slot() -> None:
    assert name_slot(name_worker("n0.2", 3)) == "n0.2" and name_slot("n0-w3.2") == "n0"
    assert name_slot("n0") == "n0" and name_slot("my-way") == "my-way"


def make(run_id: str, nodes: int, workers: int) -> Launchers:
    engine = ClusterEngine(make_cluster("local", run_id), nodes=nodes, workers=workers, width=0)
    return Launchers(engine, ThreadScoring)


@pytest.mark.slow
def test_two_nodes_score_as_one_machine_does_though_a_worker_and_a_node_are_lost(tmp_path: Path) -> None:
    def suite(marker: str) -> list[object]:
        kill = {"11": str(tmp_path / marker)}
        return [fake_task("a", samples=96, seconds=0.03, kill=kill), fake_task("b", samples=96, seconds=0.03)]

    (tmp_path / "done").touch()
    alone = numbers(evaluate(tmp_path, fake_suite(*suite("done")), out="alone"))  # type: ignore[arg-type]
    run_id = f"eval{secrets.token_hex(5)}"
    run = coordinator(
        tmp_path, fake_suite(*suite("killed")), out="cluster", slots=(Slot("n0"), Slot("n1")), launchers=make(run_id, 2, 2)
    )  # type: ignore[arg-type]  # fmt: skip
    lost: list[str] = []

    def lose_one() -> None:
        deadline = time.monotonic() + 60
        while len(run.links) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        lost.append(node := max(p.node for p in marked(run_id)))
        for p in marked(run_id, node=node):
            os.kill(p.pid, signal.SIGKILL)

    losing = threading.Thread(target=lose_one)
    losing.start()
    report = run.run()
    losing.join()
    assert numbers(report) == alone and lost
    seen = events(EvalDir(tmp_path / "cluster").journal)
    joined = {str(e["worker"]) for e in seen if "worker" in e}
    assert {name_slot(n) for n in joined} >= {"n0", "n1"} or any(".2" in n for n in joined), joined
    assert not marked(run_id) and not find_root(run_id).exists()


@pytest.mark.slow
def test_a_cluster_that_starts_no_worker_ends_the_evaluation_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = f"eval{secrets.token_hex(5)}"
    launchers = make(run_id, 1, 1)
    command = AgentCommand("unbroken.no_such_module")
    monkeypatch.setattr("unbroken.evaluate.engines.cluster.engine.AgentCommand", lambda *_, **__: command)
    run = coordinator(
        tmp_path, fake_suite(fake_task("t", samples=8)), slots=(Slot("n0"),), launchers=launchers
    )
    with pytest.raises(EvaluationError, match="no worker is left"):
        run.run()
    assert not marked(run_id) and not find_root(run_id).exists()
