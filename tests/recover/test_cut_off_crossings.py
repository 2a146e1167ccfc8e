"""A supervisor, its nodes or the cluster are cut off from the others, while something else is asked of the run or goes wrong;
and what such a run ends with, and goes on from."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.run_folder import RunFolder
from tests.support.superseded import check_run
from unbroken.checkpoint.convert import origin
from unbroken.cluster.clocks import Moment
from unbroken.cluster.contract import ClusterAway, Request, Unreachable
from unbroken.progress import JournalWriter, RunDir, read_spec
from unbroken.progress.records.decision import Rollback
from unbroken.progress.records.state import RunState
from unbroken.progress.records.verdict import Action
from unbroken.recover.amend import read_progress
from unbroken.recover.record.base import Superseded
from unbroken.recover.supervise.accept import placing
from unbroken.recover.supervise.incident import recovering
from unbroken.testing.fake_cluster import FakeCluster, Script
from unbroken.testing.fake_cluster.keeper import _commit
from unbroken.testing.fake_cluster.simulated_run import SimulatedRun

from .simulating import Simulate, Visitor, reach
from .test_amend import amend

PAIR = ["node-00000", "node-00001"]


@pytest.fixture
def fences(monkeypatch: pytest.MonkeyPatch) -> list[FakeCluster]:
    """By whom nodes were fenced."""
    fence, found = FakeCluster.fence, []

    async def noted(self: FakeCluster, node: str, deadline_s: float) -> Any:
        found.append(self)
        return await fence(self, node, deadline_s)

    monkeypatch.setattr(FakeCluster, "fence", noted)
    return found


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The cluster answers nothing while this holds why."""
    acquire, start, running = FakeCluster.acquire, FakeCluster.start, FakeCluster._running
    why: list[str] = []

    def check() -> None:
        if why:
            raise ClusterAway(why[0])

    async def acquire_now(self: FakeCluster, request: Request) -> Any:
        check()
        return await acquire(self, request)

    async def start_now(self: FakeCluster, *args: Any) -> Any:
        check()
        return await start(self, *args)

    monkeypatch.setattr(FakeCluster, "acquire", acquire_now)
    monkeypatch.setattr(FakeCluster, "start", start_now)
    monkeypatch.setattr(FakeCluster, "_running", lambda self: [] if why else running(self))
    return why


def make_sure(run: SimulatedRun) -> None:
    """A person has looked: nothing runs where that was not proven."""
    for r in run.journal("unproven"):
        path = run.run_dir.made_sure(r["attempt"], r["node"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


async def lose_sight(run: SimulatedRun) -> None:
    """The pair trains and is cut off, its attempt is sealed without what it holds, and another one trains on the spares."""
    await reach(run, 1, 30)
    for name in PAIR:
        run.faults.isolate(name, noticed_after_s=1.0)
    await run.until(lambda: run.journal("waiting") or len(run.journal("attempt")) == 2)
    make_sure(run)
    await run.until(lambda: len(run.journal("attempt")) == 2)


# --- a supervisor that stood still, and was superseded meanwhile


@pytest.mark.parametrize("then", ["its verdict is to stop", "Ctrl-C"])
def test_who_was_superseded_over_a_diagnosis_ends_nothing(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch, fences: list[FakeCluster], then: str
) -> None:
    decide, stops = recovering.decide, []

    def decide_to_stop(*args: Any) -> Any:
        decision = decide(*args)
        return replace(decision, action=Action.STOP, why="a bug in the script") if stops else decision

    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        old, task, cluster = run.supervisor, run.task, run.cluster
        diagnosis = type(old._around.diagnosis)
        judge = diagnosis.__call__

        async def take_a_minute(self: Any, logs: Any, facts: Any) -> Any:
            if self is old._around.diagnosis:
                await asyncio.sleep(60)
                stops.extend([then] if "verdict" in then else [])
            return await judge(self, logs, facts)

        monkeypatch.setattr(diagnosis, "__call__", take_a_minute)
        monkeypatch.setattr(recovering, "decide", decide_to_stop)
        run.faults.fail_rank("node-00001", 2)
        await asyncio.sleep(3)
        run.hardware.network.drop_all()
        run.restart_supervisor()
        await run.until(lambda: len(run.journal("attempt")) == 2 and run.step() > 8)
        fences.clear()
        if then == "Ctrl-C":
            old.request_stop()
        await asyncio.wait({task}, timeout=300)
        stops.clear()
        assert isinstance(task.exception(), Superseded)
        assert cluster not in fences
        assert len(run.journal("incident")) == 1, "what it thinks of that incident is nobody's any more"

    simulate(act, 2)


def test_two_stops_for_one_that_was_superseded_end_nothing(
    simulate: Simulate, fences: list[FakeCluster]
) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        old, task, cluster = run.supervisor, run.task, run.cluster
        run.restart_supervisor()
        while len(run.journal("epoch")) < 2:
            await asyncio.sleep(0.001)
        old.request_stop()
        old.request_stop()
        await asyncio.wait({task}, timeout=300)
        await asyncio.sleep(60)
        assert isinstance(task.exception(), Superseded) and cluster not in fences

    simulate(act, 2)


# --- a stop that reaches nobody


@pytest.mark.parametrize("adopted", [True, False])
@pytest.mark.parametrize("how", ["stop", "kill"])
def test_what_is_saved_after_a_stop_that_reached_no_node_counts(
    simulate: Simulate, away: list[str], how: str, adopted: bool
) -> None:
    """The successor waits for its cluster when the stop comes: the ranks train on, and their keepers save."""

    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        for name in PAIR:
            run.faults.cut(name)
        run.kill_supervisor()
        away.append("no controller")
        run.restart_supervisor()
        await asyncio.sleep(2)
        if how == "kill":
            run.kill_supervisor()
        else:
            run.supervisor.request_stop()
            assert await run.task == "interrupted"
            assert not run.journal("seal") and any(
                "counts when the run goes on" in x for x in run.screen.lines
            )
        away.clear()
        for name in PAIR:
            run.faults.heal(name)
        step = 7
        if adopted:
            step = 19
            run.restart_supervisor()
            await run.until(lambda: run.journal("adopted"), 100)
            await reach(run, 1, 25)
        _commit(run.run_dir.checkpoints, 1, step)
        for name in PAIR:
            run.faults.lose(name, proven=True)
        if not adopted:
            run.restart_supervisor()
        await run.until(lambda: len(run.journal("attempt")) == 2)
        offered = [c["name"] for c in run.journal("attempt")[1]["candidates"]]
        assert offered == [f"step-{step:08d}.a0001"]

    simulate(act, 2, idle=2)


def test_an_attempt_that_was_sealed_is_not_taken_over(simulate: Simulate) -> None:
    """A version before this one sealed it as it was asked to stop, though nobody had reached its nodes."""

    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.kill_supervisor()
        JournalWriter(run.run_dir, 1).append("seal", attempt=1, checkpoints=[], memory=[])
        run.restart_supervisor()
        await run.until(lambda: len(run.journal("attempt")) == 2)
        assert not run.journal("adopted")

    simulate(act, 2)


# --- a cluster that does not answer


@pytest.mark.parametrize("when", ["a node is asked for", "an agent is started"])
def test_a_cluster_that_is_away_for_long_ends_no_run(simulate: Simulate, away: list[str], when: str) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        away.append("Unable to contact slurm controller")
        if when == "a node is asked for":
            run.faults.lose("node-00001", proven=True)
        else:
            run.faults.crash_agent("node-00001")
        await asyncio.sleep(600)
        assert not run.task.done() and len(run.journal("attempt")) == 1
        said = [x for x in run.screen.lines if "Unable to contact" in x]
        assert len(said) == 1 and "goes on as soon as that is over" in said[0]
        away.clear()
        await reach(run, 2, 15)
        if when == "an agent is started":
            assert not run.journal("lost"), "it is no fault of the node's"

    simulate(act, 2, idle=1)


def test_a_stop_ends_the_wait_for_a_cluster_that_is_away(simulate: Simulate, away: list[str]) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        away.append("no controller")
        run.faults.lose("node-00001", proven=True)
        await asyncio.sleep(100)
        run.supervisor.request_stop()
        await run.until(run.task.done, 120)
        assert run.task.result() == "interrupted"

    simulate(act, 2, idle=1)


def test_who_was_superseded_while_the_cluster_is_away_lets_go_of_its_nodes(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch, away: list[str]
) -> None:
    """It is not dead, and nobody reaches it: its links to agents that live stand."""
    monkeypatch.setattr(FakeCluster, "peer_of", lambda self, node: None)

    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 30)
        task = run.task
        away.append("no controller")
        run.faults.crash_agent("node-00001")
        await asyncio.sleep(100)
        run.restart_supervisor()
        await asyncio.sleep(60)
        assert task.done() and isinstance(task.exception(), Superseded)
        away.clear()
        await run.until(lambda: len(run.journal("attempt")) == 2)
        assert run.journal("attempt")[1]["candidates"][0]["step"] >= 27 and not run.journal("lost")

    simulate(act, 2, idle=1)


def test_an_order_that_was_taken_is_a_slow_start_though_another_was_not(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, left = FakeCluster.start, ["node-00001"]

    async def start_now(self: FakeCluster, name: str, *args: Any) -> Any:
        if name in left:
            left.remove(name)
            raise ClusterAway("503")
        return await start(self, name, *args)

    monkeypatch.setattr(FakeCluster, "start", start_now)

    async def act(run: SimulatedRun) -> None:
        run.faults.slow_start("node-00000", 100.0)
        await run.until(lambda: run.journal("attempt"), 400)
        assert not run.journal("lost")

    simulate(act, 2)


# --- nodes that come and go


def test_a_node_that_the_cluster_alone_does_not_reach_is_asked_for_what_it_holds(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that waits on its host was killed, say: agent, keeper and ranks are well."""
    monkeypatch.setattr(FakeCluster, "peer_of", lambda self, node: None)

    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 30)
        at = Moment(run.loop.time(), run.loop.time())
        run.hardware.publish(Unreachable(at, "node-00001", "nothing waits there"))
        await asyncio.sleep(1)
        run.faults.fail_rank("node-00000", 0)
        await run.until(lambda: len(run.journal("attempt")) == 2)
        assert run.journal("seal")[0]["memory"], "all of it is in memory"
        second = run.journal("attempt")[1]
        assert second["slots"] == PAIR and second["candidates"][0]["step"] >= 27 and not run.journal("lost")

    simulate(act, 2)


@pytest.mark.parametrize("back_after", [10.0, 60.0])
@pytest.mark.parametrize("how", ["lost", "cut", "crash"])
def test_a_node_that_is_lost_while_another_comes_up_is_taken_back(
    simulate: Simulate, how: str, back_after: float
) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.slow_start("node-00001", 25.0)
        run.faults.crash_agent("node-00001")
        await run.until(lambda: run.journal("incident"))
        await asyncio.sleep(5.0)
        if how == "lost":
            run.faults.lose("node-00000", proven=True)
        elif how == "cut":
            run.faults.isolate("node-00000", noticed_after_s=1.0)
        else:
            run.faults.crash_agent("node-00000")
        await asyncio.sleep(back_after)
        if how != "crash":
            run.faults.return_node("node-00000")
        await run.until(lambda: len(run.journal("attempt")) >= 2 and run.step() > 12, 600)

    simulate(act, 2)


@pytest.mark.parametrize("saved", [True, False])
def test_snapshots_that_no_seal_lists_count_until_a_later_attempt_has_left_something(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    """The nodes that hold them were cut off as their attempt was sealed, and come back when the others are lost."""
    monkeypatch.setattr(FakeCluster, "peer_of", lambda self, node: None)  # it copies over cut links too

    async def act(run: SimulatedRun) -> None:
        await lose_sight(run)
        if saved:
            await reach(run, 2, 20)
            _commit(run.run_dir.checkpoints, 2, 19)
        for name in PAIR:
            run.faults.return_node(name)
        await asyncio.sleep(0.2)
        for name in run.journal("attempt")[1]["slots"]:
            run.faults.lose(name, proven=True)
        await run.until(lambda: len(run.journal("attempt")) == 3)
        first = run.journal("attempt")[2]["candidates"][0]
        assert (first["attempt"], first["step"]) == ((2, 19) if saved else (1, 27))
        assert check_run(run.run_dir.path) == []

    simulate(act, 2, spares=2)


# --- what a run ends with, and goes on from


def test_a_stop_saves_what_counts_and_not_what_was_rolled_back(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes between the decision to go back to before step 24 and the next attempt."""
    decide, runs = recovering.decide, []

    def go_back(*args: Any) -> Any:
        runs[0].supervisor.request_stop()
        return replace(decide(*args), action=Action.ROLLBACK_SKIP, why="nan", rollback=Rollback(24))

    async def act(run: SimulatedRun) -> None:
        runs.append(run)
        await reach(run, 1, 30)
        monkeypatch.setattr(recovering, "decide", go_back)
        run.faults.fail_rank("node-00000", 0)
        assert await run.task == "interrupted"
        monkeypatch.setattr(recovering, "decide", decide)
        assert any("saving step 23 from memory" in line for line in run.screen.lines)
        run.restart_supervisor()
        await run.until(lambda: len(run.journal("attempt")) == 2)
        assert run.journal("attempt")[1]["candidates"][0]["name"] == "step-00000023.a0001"

    simulate(act, 2)


def test_a_new_run_starts_from_no_checkpoint_that_was_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin.catalogue, "verify_in", lambda *_, **__: SimpleNamespace(ok=True, problems=()))
    run = RunFolder(RunDir(tmp_path / "run"), nodes=1, nproc=1, spares=0)
    run.attempt()
    for step in (7, 27):
        _commit(run.run_dir.checkpoints, 1, step)
    run.record("rollback", incident=1, attempt=1, before=10, skip=[])
    names = ["step-00000007.a0001", "step-00000027.a0001"]
    run.record("seal", attempt=1, checkpoints=names, memory=[])
    assert origin.find_origin(str(run.run_dir.path)).name == names[0]


def test_what_the_end_of_a_run_saves_counts_though_no_seal_listed_it(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeCluster, "peer_of", lambda self, node: None)

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    async def act(run: SimulatedRun) -> None:
        await lose_sight(run)
        for name in PAIR:
            run.faults.return_node(name)
        await asyncio.sleep(0.2)
        survey = placing.survey
        monkeypatch.setattr(placing, "survey", refuse)  # so the third attempt waits
        others = run.journal("attempt")[1]["slots"]
        for name in others:
            run.faults.lose(name, proven=True)
        await asyncio.sleep(100)
        run.supervisor.request_stop()
        assert await run.task == "interrupted"
        monkeypatch.setattr(placing, "survey", survey)
        make_sure(run)
        for name in others:
            run.faults.return_node(name)
        run.restart_supervisor()
        await run.until(lambda: len(run.journal("attempt")) == 3)
        assert run.journal("attempt")[2]["candidates"][0]["name"] == "step-00000027.a0001"
        assert check_run(run.run_dir.path) == []

    simulate(act, 2, spares=2)


@pytest.mark.parametrize("lost_for", [1, 60, 400])
@pytest.mark.parametrize("proven", [False, True])
def test_a_run_goes_on_with_fewer_nodes_by_hand_after_one_has_died(
    simulate: Simulate, proven: bool, lost_for: int
) -> None:
    """At once, or, where the stop came before anybody knew of the loss, as the hint says: the same command, and a stop."""

    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 30)
        run.faults.lose("node-00001", proven=proven)
        await asyncio.sleep(lost_for)
        run.supervisor.request_stop()
        await run.task
        for nodes in (1, 2, 1):
            run.spec = replace(run.spec, nodes=nodes)
            run.restart_supervisor()
            await asyncio.sleep(60)
            if nodes == 1 and not run.task.done():
                break
            assert lost_for == 1, run.task.exception()
            if not run.task.done():
                run.supervisor.request_stop()
            await asyncio.wait([run.task])
        assert not run.task.done() and run.journal("attempt")[-1]["candidates"]

    simulate(act, 2)


# --- a command that made its steps while nobody looked


@pytest.mark.parametrize("adopted", [True, False])
def test_an_amended_command_that_made_steps_unseen_is_kept(simulate: Simulate, adopted: bool) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 10)
        request = await amend(run, Visitor(run), "--lr", "2")
        await run.until(lambda: 2 in run.hardware.gangs)
        run.kill_supervisor()
        await asyncio.sleep(10 if adopted else 14)
        if not adopted:
            run.faults.lose("node-00003", proven=True)
        run.spec = read_spec(run.run_dir.spec)
        run.restart_supervisor()
        if adopted:
            await run.until(lambda: run.journal("adopted"))
            await asyncio.sleep(60)
        else:
            await run.until(lambda: len(run.journal("attempt")) == 3)
        state = RunState.of(run.journal_text())
        assert state.stepped and state.proven_command == ()
        assert "runs with them" in read_progress(run.journal_text(), request).done

    simulate(act, 8, spares=1, script=Script(start_s=4, step_s=1, save_every=1))
