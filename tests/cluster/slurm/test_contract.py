"""Nodes of a Slurm job keep the contract: with a real Slurm, which holds steps by a cgroup, and which does not."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from tests.cluster.contract import Bench, ClusterContract, eventually
from tests.support.slurm import REPO, Testbed, testbed, wait_for
from unbroken.cluster.contract import AgentCommand, Cluster
from unbroken.cluster.holding.processes import end, marked
from unbroken.cluster.local import find_root
from unbroken.cluster.slurm.cluster import SlurmCluster
from unbroken.cluster.slurm.options import SlurmOptions
from unbroken.units import Duration

pytestmark = pytest.mark.slow


class SlurmBench(Bench):
    fence_s = 20.0
    tells_how_it_ended = False  # a small parent on the node reaps it
    impossible: ClassVar[Mapping[str, str]] = {
        "hold": "a job has its nodes before a run begins in it",
        "lose": "a job never gets a lost node back",
        "preempt": "Slurm takes whole jobs away, or drains a node without a deadline",
        "end_allocation": "Slurm looks for jobs that are over time twice a minute: test_run.py waits for that",
    }

    def __init__(self, bed: Testbed, folder: Path) -> None:
        self.bed, self.folder = bed, folder
        self.run_id = f"test{secrets.token_hex(6)}"
        self.job = bed.share_job()

    def wall(self) -> float:
        return time.time()

    def open(self) -> Cluster:
        return SlurmCluster(
            self.run_id,
            SlurmOptions(job=self.job, poll=Duration("500ms")),
            log_of=lambda n: self.folder / f"{n}.log",
        )

    def command(self) -> AgentCommand:
        return AgentCommand(
            "tests.cluster.agent_program", ("--folder", str(self.folder)), {"PYTHONPATH": str(REPO)}
        )

    def _report(self, node: str) -> dict[str, object]:
        report: dict[str, object] = json.loads((self.folder / f"{node}.report").read_text())
        return report

    async def seen_by(self, node: str) -> AgentCommand:
        def is_there() -> bool:
            agents = {p.pid for p in marked(self.run_id, node=node) if p.role == "agent"}
            return (self.folder / f"{node}.report").exists() and self._report(node)["pid"] in agents

        await eventually(is_there)
        r = self._report(node)
        assert r["cwd"] == "/", "nothing may rest on where the supervisor stands"
        return AgentCommand("", tuple(r["arguments"]), r["environment"], str(r["secret"]).encode())  # type: ignore[arg-type]

    def end(self, node: str, code: int) -> None:
        (self.folder / f"{node}.exit").write_text(str(code))

    def kill(self, node: str) -> None:
        pid = self._report(node)["pid"]
        assert isinstance(pid, int)
        os.kill(pid, signal.SIGKILL)

    def left(self, node: str) -> bool:
        return bool(marked(self.run_id, node=node))

    def isolate(self, node: str) -> None:
        self.bed.signal_daemon(node, signal.SIGSTOP)

    def return_node(self, node: str) -> None:
        self.bed.signal_daemon(node, signal.SIGCONT)


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    with testbed() as found:
        yield found


@pytest.fixture(scope="module")
def loose_bed() -> Iterator[Testbed]:
    """One that holds processes by parentage alone."""
    with testbed(nodes=2, contain="linuxproc") as found:
        yield found


def begin(bed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmBench]:
    """A run of its own in a job that the tests of a module share, as far as it lasts."""
    monkeypatch.setenv("SLURM_CONF", bed.environment["SLURM_CONF"])
    bench = SlurmBench(bed, tmp_path)
    yield bench
    for node in bed.nodes:
        bench.return_node(node)
    bed.end_steps(bench.run_id)
    wait_for(lambda: end(lambda: marked(bench.run_id)) == [], "nothing of the run to be left")
    bed.undrain()
    for folder in (find_root(bench.run_id), find_root(f"{bench.run_id}-slurm")):
        shutil.rmtree(folder, ignore_errors=True)  # killed nodes leave what they had in memory


@pytest.fixture
def bench(bed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmBench]:
    yield from begin(bed, tmp_path, monkeypatch)


class TestSlurmCluster(ClusterContract):
    """The contract."""


class TestHeldByParentage:
    """Where Slurm contains nothing, a program on the node ends and proves."""

    @pytest.fixture
    def bench(
        self, loose_bed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[SlurmBench]:
        yield from begin(loose_bed, tmp_path, monkeypatch)

    test_a_fence_proves = (
        ClusterContract.test_a_fence_proves_that_nothing_of_the_run_is_left_on_that_node_alone
    )
    test_a_fence_ends_what_is_left = ClusterContract.test_a_fence_ends_what_a_dead_agent_has_left
    test_what_is_given_back = ClusterContract.test_what_is_given_back_is_ended_and_none_of_the_runs_any_more
