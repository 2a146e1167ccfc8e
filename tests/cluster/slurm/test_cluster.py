"""The cluster over a fake set of Slurm's commands: what it asks, what it reports, what it refuses and why."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cluster.contract import Watch, eventually
from tests.support.slurm import REPO
from unbroken.cluster.contract import (
    AgentCommand,
    Cordon,
    EndingAt,
    Exited,
    Lost,
    PreemptingAt,
    Request,
    Returned,
    Started,
    Unreachable,
)
from unbroken.cluster.holding.processes import end, marked
from unbroken.cluster.slurm.cluster import SlurmCluster
from unbroken.cluster.slurm.controller import draining
from unbroken.cluster.slurm.options import SlurmOptions
from unbroken.cluster.survey import find_address
from unbroken.errors import DoesNotFit, RunError, UsageError
from unbroken.units import Duration

from .fake import FakeNode, FakeSlurm, on_path


class FakeBench:
    """Four nodes and a job on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.slurm = FakeSlurm(folder, {f"n{i}": FakeNode() for i in range(1, 5)})
        self.run_id = f"test{secrets.token_hex(6)}"

    def open(self, **options: Any) -> SlurmCluster:
        wanted = SlurmOptions(job="7", poll=Duration("200ms"), **options)
        return SlurmCluster(self.run_id, wanted, log_of=lambda n: self.folder / f"{n}.log", slurm=self.slurm)

    def command(self) -> AgentCommand:
        return AgentCommand(
            "tests.cluster.agent_program", ("--folder", str(self.folder)), {"PYTHONPATH": str(REPO)}, b"x"
        )


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBench]:
    bench = FakeBench(tmp_path)
    monkeypatch.setenv("PATH", on_path(bench.slurm))
    yield bench
    cluster = bench.open()
    for launch in cluster._launches.live.values():
        launch.kill()
    for _, _, pid in bench.slurm.steps():
        bench.slurm.kill(pid)
    assert end(lambda: marked(bench.run_id)) == []
    cluster._launches.find_running()
    cluster._memory.give([])
    cluster._memory.put({})
    cluster._launches.tidy()
    assert not cluster._launches.folder.exists()


def test_an_agent_is_started_followed_fenced_and_known_to_a_successor(bench: FakeBench) -> None:
    async def scenario() -> None:
        cluster = bench.open()
        a = await cluster.acquire(Request(2, 1))
        assert (a.name, a.nodes, a.spares) == ("7", ("n1", "n2"), ("n3",))
        watch = Watch(cluster)
        launch = await cluster.start("n1", bench.command())
        assert (await watch.next(Started, "n1")).launch == launch
        await eventually(lambda: (bench.folder / "n1.report").exists())
        await cluster.close()
        second = bench.open()
        assert await second.acquire(Request(2, 1)) == a
        watch = Watch(second)
        assert (await watch.next(Started, "n1")).launch == launch
        fenced = await second.fence("n1", 10)
        assert fenced.proven and not marked(bench.run_id)
        assert (await watch.next(Exited, "n1")).launch == launch
        await second.give_back(a.everything)
        await second.close()

    asyncio.run(scenario())


def test_what_becomes_of_job_and_nodes_is_reported(bench: FakeBench) -> None:
    async def scenario() -> None:
        cluster, nodes = bench.open(), bench.slurm.nodes
        await cluster.acquire(Request(4))
        watch = Watch(cluster)
        nodes["n1"].states = "MIXED+NOT_RESPONDING"
        assert "not_responding" in (await watch.next(Unreachable, "n1")).why
        fenced = await cluster.fence("n1", 0.3)
        assert not fenced.proven and "cannot be reached" in fenced.why
        nodes["n1"].states = "MIXED"
        await watch.next(Returned, "n1")
        assert (await cluster.fence("n1", 5)).proven
        nodes["n2"].states, nodes["n2"].reason = "MIXED+DRAIN", "new cables"
        preempting = await watch.next(PreemptingAt, "n2")
        assert preempting.deadline == math.inf and "new cables" in preempting.why
        nodes["n2"].states, nodes["n2"].reason = "MIXED", ""
        await watch.next(Returned, "n2")
        nodes["n3"].states, nodes["n3"].reason = "DOWN", "smoke"
        bench.slurm.job_nodes = ["n1", "n2", "n4"]
        assert "smoke" in (await watch.next(Lost, "n3")).why
        assert (await cluster.fence("n3", 5)).proven, (
            "its daemon answers, and has no step of the run any more"
        )
        with pytest.raises(RunError, match="lost"):
            await cluster.start("n3", bench.command())
        nodes["n4"].states = "DOWN+NOT_RESPONDING"
        await watch.next(Lost, "n4")
        assert not (await cluster.fence("n4", 0.3)).proven
        bench.slurm.ends = str(int(time.time()) + 100)
        ending = await watch.next(EndingAt)
        assert 95 < ending.deadline - time.monotonic() < 101
        assert (await cluster.acquire(Request(2))).ends == ending.deadline
        bench.slurm.state = "COMPLETING"
        assert "over" in (await watch.next(Lost, "n1")).why
        await cluster.close()
        await watch.end()
        assert not watch.all(Exited) and len(watch.all(Lost, "n3")) == 1

    asyncio.run(scenario())


def test_an_error_of_ours_does_not_end_the_watch(
    bench: FakeBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without it the run would wait for ever for what nobody tells it."""
    lines = FakeSlurm._show

    def once(self: FakeSlurm, name: str, node: FakeNode) -> str:
        monkeypatch.setattr(FakeSlurm, "_show", lines)
        raise ValueError("a line that nobody thought of")

    async def scenario() -> None:
        cluster = bench.open()
        await cluster.acquire(Request(2))
        watch = Watch(cluster)
        monkeypatch.setattr(FakeSlurm, "_show", once)
        await eventually(lambda: "nobody thought of" in caplog.text)
        bench.slurm.nodes["n1"].states = "DOWN"
        await watch.next(Lost, "n1")
        await cluster.close()
        await watch.end()

    asyncio.run(scenario())


def test_the_end_of_a_preempted_job_without_a_time_limit_is_known_by_its_grace(bench: FakeBench) -> None:
    """Slurm shows no end of it before it has come."""

    async def scenario() -> None:
        cluster = bench.open()
        assert (await cluster.acquire(Request(2))).ends is None
        watch = Watch(cluster)
        await eventually(lambda: ("scontrol", "-o", "show", "job", "7") in bench.slurm.calls)
        assert not watch.all(EndingAt)
        bench.slurm.preempted = str(int(time.time()))
        ending = await watch.next(EndingAt)
        assert 18 < ending.deadline - time.monotonic() < 21
        assert (await cluster.acquire(Request(2))).ends == ending.deadline
        await cluster.close()
        await watch.end()
        assert len(watch.all(EndingAt)) == 1

    asyncio.run(scenario())


def test_without_a_cgroup_the_loss_of_a_node_proves_nothing(bench: FakeBench) -> None:
    async def scenario() -> None:
        bench.slurm.contained = False
        cluster = bench.open()
        await cluster.acquire(Request(2))
        watch = Watch(cluster)
        bench.slurm.nodes["n1"].states = "DOWN"
        await watch.next(Lost, "n1")
        fenced = await cluster.fence("n1", 2)
        assert not fenced.proven and "ProctrackType" in fenced.why
        await cluster.close()

    asyncio.run(scenario())


def test_a_node_whose_processes_survive_is_not_proven(bench: FakeBench) -> None:
    async def scenario() -> None:
        cluster = bench.open()
        await cluster.acquire(Request(1))
        bench.slurm.nodes["n1"].states, bench.slurm.nodes["n1"].reason = "MIXED+DRAIN", "Kill task failed"
        fenced = await cluster.fence("n1", 2)
        assert not fenced.proven and "survive kill -9" in fenced.why
        await cluster.close()

    asyncio.run(scenario())


def test_without_an_operators_rights_a_cordon_is_the_runs_own(bench: FakeBench) -> None:
    async def scenario() -> None:
        bench.slurm.operator = False
        cluster = bench.open()
        await cluster.acquire(Request(2, 1))
        mine = Cordon("n1", "unbroken", "XID 79", time.time() + 60)
        await cluster.cordon(mine)
        assert bench.slurm.nodes["n1"].states == "MIXED"
        assert dict(await bench.open().cordons()) == {"n1": mine}
        assert "n1" not in (await cluster.acquire(Request(2, 1))).everything
        await cluster.release("n1", "unbroken")
        assert not await cluster.cordons()
        with pytest.raises(RunError, match="Invalid user id"):
            await bench.open(cordon="drain").cordon(mine)
        await cluster.close()

    asyncio.run(scenario())


def test_what_a_run_should_know_of_its_job_is_said_before_training(
    bench: FakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No right to drain nodes, and a partition that preempts without notice."""
    bench.slurm.grace = 0
    monkeypatch.setattr(draining, "os", SimpleNamespace(geteuid=lambda: 1))
    with pytest.raises(
        RunError, match=r"cannot be drained: daemon is neither root nor slurm.*leave cordon=drain out"
    ):
        asyncio.run(bench.open(cordon="drain").acquire(Request(2)))
    preempted, drain = asyncio.run(bench.open().acquire(Request(2))).notes
    assert "job 7 can be preempted in partition main" in preempted and "kept out of this run alone" in drain
    assert not asyncio.run(bench.open().acquire(Request(2))).notes, "a run that goes on has read it"


@pytest.mark.parametrize(
    ("break_it", "error", "says"),
    [
        (lambda n: setattr(n["n2"], "gpus", 4), RunError, r"n2 4 GPUs, the others have 0.*--exclude=n2"),
        (lambda n: setattr(n["n2"], "version", "0.0.1"), RunError, r"unbroken 0.0.1 is installed there.*\(n2\)"),
        (lambda n: n.pop("n4"), DoesNotFit, r"3 nodes that can be used.*3 nodes and 1 spare.*sbatch -N 4 --no-kill"),
        (lambda n: setattr(n["n2"], "states", "DOWN"), DoesNotFit, r"n2: Slurm says down"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_anything_starts(
    bench: FakeBench, break_it: Any, error: type[Exception], says: str
) -> None:
    break_it(bench.slurm.nodes)
    with pytest.raises(error, match=says):
        asyncio.run(bench.open().acquire(Request(3, 1)))
    assert not bench.slurm.steps()


def test_a_host_without_slurm_or_without_an_allocation_is_told_so(
    bench: FakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"squeue, scontrol, scancel are not on the PATH"):
        monkeypatch.setenv("PATH", str(bench.folder / "bin"))
        bench.open().check(Request(1))
    for name in ("squeue", "scontrol", "scancel"):
        (bench.folder / "bin" / name).symlink_to("srun")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(UsageError, match="submits itself"):
        SlurmCluster("x").check(Request(1))
    bench.open().check(Request(1))
    assert find_address("lo") == "127.0.0.1" == bench.open(interface="lo").door_address
    with pytest.raises(UsageError, match=r"no interface 'ib9'.*It has"):
        bench.open(interface="ib9").check(Request(1))
