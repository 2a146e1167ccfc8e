"""The supervisor's real loop on fake clusters of 8 and 64 nodes: every fault that a cluster can have, in simulated time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unbroken.cluster.clocks import Moment
from unbroken.cluster.contract import Unreachable
from unbroken.progress import Timeouts
from unbroken.progress.records.incident import Incident
from unbroken.progress.records.verdict import Category, Verdict
from unbroken.progress.rundir import WAITING
from unbroken.recover.supervise.nodes.fleet import Fleet
from unbroken.testing.fake_cluster import NetworkTraffic, Script, SimulatedLoop, run_simulated
from unbroken.testing.fake_cluster.simulated_run import SimulatedRun

from .simulating import Simulate, reach

SIZES = pytest.mark.parametrize("nodes", [8, 64])


@SIZES
def test_a_run_starts_trains_and_completes(simulate: Simulate, nodes: int) -> None:
    async def act(run: SimulatedRun) -> None:
        assert await run.task == "completed"
        assert [r["how"] for r in run.journal("ended")] == ["completed"]
        assert run.journal("first_step")[0]["seconds"] == pytest.approx(25, abs=1)
        assert not run.incidents()

    simulate(act, nodes, spares=1, script=Script(start_s=20, step_s=5, save_every=4, steps=30))


@pytest.mark.parametrize(("nodes", "proven"), [(8, False), (64, True)])
def test_a_lost_node_is_replaced_by_the_spare(simulate: Simulate, nodes: int, proven: bool) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 10)
        lost = run.journal("attempt")[0]["slots"][3]
        run.faults.lose(lost, noticed_after_s=40.0, proven=proven)
        await reach(run, 2, 12)
        await run.until(lambda: run.journal("resumed"))
        (incident,) = run.incidents()
        assert incident["kind"] == "node_lost" and incident["nodes"].keys() == {lost}
        assert run.journal("replaced")[0]["old"] == lost
        slots = run.journal("attempt")[1]["slots"]
        assert lost not in slots and slots[3] == f"node-{nodes:05d}" and len(set(slots)) == nodes
        assert bool(run.journal("unproven")) != proven
        assert incident["steps_lost"] <= 8, "every other node still held its snapshots"

    simulate(act, nodes, spares=1)


@SIZES
def test_a_hang_is_found_with_its_rank_and_restarted_in_place(simulate: Simulate, nodes: int) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.hang_rank("node-00005", 11)
        began = run.loop.time()
        await run.until(lambda: run.journal("resumed"))
        (incident,) = run.incidents()
        assert incident["kind"] == "hung" and incident["verdict"]["faulty"]["rank"] == 11
        assert incident["detected"] - run.cluster.wall_offset_s - began < 75
        slots = [r["slots"] for r in run.journal("attempt")]
        assert slots[0] == slots[1]
        stacks = {p.name for p in run.run_dir.evidence(1).iterdir() if p.name != WAITING}
        assert "stacks-rank-11.txt" in stacks and len(stacks) == (16 if nodes == 8 else 65), (
            "of many, 64 and an overview"
        )

    simulate(act, nodes)


@pytest.mark.parametrize("nodes", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_a_node_that_will_be_taken_away_is_left_in_time(simulate: Simulate, nodes: int) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.preempt("node-00002", in_s=200.0)
        noticed = run.loop.time()
        await run.until(lambda: run.journal("resumed"))
        assert run.loop.time() - noticed < 150, "there was a spare: nothing had to be waited for"
        (incident,) = run.incidents()
        assert incident["kind"] == "preempted" and incident["action"] == "restart"
        assert incident["verdict"]["outcome"] == "preempted"
        assert "node-00002" not in run.journal("attempt")[1]["slots"]
        before = run.step()
        await run.until(lambda: run.loop.time() > noticed + 330)
        assert run.step() > before + 15 and len(run.incidents()) == 1, "its end disturbed nobody"

    simulate(act, nodes, spares=1)


def test_without_a_spare_the_run_waits_for_another_node(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.hold("Priority")
        run.faults.lose("node-00001", noticed_after_s=5.0, proven=True)
        await run.until(lambda: any("waiting for nodes: Priority" in line for line in run.screen.lines))
        held = run.loop.time()
        await run.until(lambda: run.loop.time() > held + 1200)
        assert len(run.journal("attempt")) == 1
        run.faults.grant()
        await run.until(lambda: run.journal("resumed"))
        assert run.journal("attempt")[1]["slots"][1] == "node-00008"

    simulate(act, 8, idle=1)


def test_a_stop_withdraws_the_request_for_another_node(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.hold("Priority")
        run.faults.lose("node-00001", proven=True)
        await run.until(lambda: any("waiting for nodes" in line for line in run.screen.lines))
        run.supervisor.request_stop()
        assert await run.task == "interrupted"

    simulate(act, 8, idle=1)


@SIZES
def test_a_killed_supervisor_is_succeeded_and_no_rank_stops(simulate: Simulate, nodes: int) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.kill_supervisor()
        run.restart_supervisor()
        await run.until(lambda: run.journal("adopted"))
        await reach(run, 1, 20)
        assert len(run.journal("attempt")) == 1 and len(run.journal("epoch")) == 2
        (incident,) = run.incidents()
        assert incident["kind"] == "supervisor_lost" and incident["steps_lost"] == 0

    simulate(act, nodes, spares=1)


@pytest.mark.parametrize("steps_first", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_incident_that_outlives_its_supervisor_is_over_all_the_same(
    simulate: Simulate, steps_first: bool
) -> None:
    """The one before had restarted the ranks, and did not live to see them train; its successor does."""

    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.fail_rank("node-00001", 2)
        await run.until(lambda: len(run.journal("attempt")) == 2)
        run.kill_supervisor()
        if steps_first:
            await asyncio.sleep(
                30.0
            )  # beyond the leases: its ranks are gone too, and a third attempt follows
        run.restart_supervisor()
        await run.until(
            lambda: run.journal("resumed") and run.journal("resumed")[-1]["incident"] == 1 + steps_first
        )
        await reach(run, 2 + steps_first, 14)
        first = run.incidents()[0]
        if steps_first:
            assert first["resumed"] is None, "it was cut off by the next one"
        else:
            assert first["resumed"] is not None and first["next_attempt"] == 2

    simulate(act, 8)


def test_a_supervisor_that_comes_after_the_leases_starts_anew_from_the_snapshots(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.kill_supervisor()
        killed = run.loop.time()
        while run.loop.time() < killed + 40:
            await asyncio.sleep(1.0)
        run.restart_supervisor()
        await run.until(lambda: run.journal("resumed"))
        assert len(run.journal("attempt")) == 2
        (incident,) = run.incidents()
        assert incident["kind"] == "supervisor_lost" and incident["verdict"]["decided_by"] == "lapsed-lease"

    simulate(act, 8)


def test_a_killed_agent_costs_no_snapshot(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.crash_agent("node-00003")
        await run.until(lambda: run.journal("resumed"))
        (incident,) = run.incidents()
        assert incident["kind"] == "agent_lost" and incident["steps_lost"] <= 8
        assert run.journal("attempt")[1]["slots"][3] == "node-00003"

    simulate(act, 8)


def test_a_node_that_cannot_be_reached_is_fenced_by_its_lease(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.isolate("node-00004")
        cut = run.loop.time()
        await run.until(lambda: len(run.journal("attempt")) == 2)
        started = run.loop.time() - cut
        assert 15 <= started < 60, "not before its ranks have stopped by themselves"
        (incident,) = run.incidents()
        assert incident["nodes"] == {"node-00004": "unreachable"}
        assert "node-00004" not in run.journal("attempt")[1]["slots"]

    simulate(act, 8, spares=1)


def test_a_deaf_node_does_not_hold_up_the_end_of_an_attempt_that_failed_elsewhere(simulate: Simulate) -> None:
    """It was asked to stop before anybody knew that it does not answer."""

    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.cut("node-00004", to_node=False)
        run.hardware.nodes["node-00004"].state = "unreachable"
        cut = run.loop.time()
        other = run.hardware.nodes["node-00002"].agent
        other.end_rank(min(other.ranks), 1, None)
        await run.until(lambda: run.loop.time() > cut + 1.0)
        at = Moment(run.loop.time(), run.loop.time())
        run.hardware.publish(Unreachable(at, "node-00004", "no answer over ssh"))
        await run.until(lambda: len(run.journal("attempt")) == 2)
        assert run.loop.time() - cut < 15 + 5, "its lease, and no time-outs of questions to it"
        (incident,) = run.incidents()
        assert incident["kind"] == "failed" and incident["nodes"] == {"node-00004": "unreachable"}
        assert "node-00004" not in run.journal("attempt")[1]["slots"]

    simulate(act, 8, spares=1)


@pytest.mark.parametrize("op", ["port", "keeper", "launch"])
def test_a_node_that_goes_deaf_as_it_is_told_of_the_attempt_costs_no_more_than_its_lease(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    ask, cut = Fleet.ask, []

    async def act(run: SimulatedRun) -> None:
        async def then_deaf(self: Fleet, name: str, what: str, **rest: Any) -> Any:
            if what == op and name == deaf and not cut:
                cut.append(run.loop.time())
                run.faults.cut(deaf, to_node=False)
                run.hardware.nodes[deaf].state = "unreachable"
                at = Moment(run.loop.time(), run.loop.time())
                run.hardware.publish(Unreachable(at, deaf, "no answer over ssh"))
            return await ask(self, name, what, **rest)

        await reach(run, 1, 9)
        deaf = run.journal("attempt")[0]["slots"][0]
        monkeypatch.setattr(Fleet, "ask", then_deaf)
        run.faults.fail_rank("node-00002", 5, code=1)
        await run.until(lambda: deaf not in run.journal("attempt")[-1]["slots"])
        assert run.loop.time() - cut[0] < 15 + 5
        await run.until(lambda: run.journal("resumed"))

    simulate(act, 8, spares=1)


@pytest.mark.parametrize(("guilty", "spares"), [("node-00004", 2), ("node-00002", 1)])
def test_a_node_that_is_lost_meanwhile_is_not_the_one_at_fault(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch, guilty: str, spares: int
) -> None:
    """One node is surely at fault, another is lost while the attempt is ended: it has the first right to a spare."""

    async def act(run: SimulatedRun) -> None:
        diagnosis = type(run.supervisor._around.diagnosis)
        asked = diagnosis.__call__

        async def call(self: Any, logs: Any, facts: Any) -> Verdict:
            verdict: Verdict = await asked(self, logs, facts)
            sure = {"cordon": (guilty,), "confidence": 0.99, "category": Category.INFRASTRUCTURE}
            return replace(verdict, **sure, reason="ECCError", faulty=None, root=None)  # type: ignore[arg-type]

        await reach(run, 1, 9)
        monkeypatch.setattr(diagnosis, "__call__", call)
        run.faults.cut("node-00006", to_node=False)
        run.hardware.nodes["node-00006"].state = "unreachable"
        failed = run.hardware.nodes[guilty].agent
        failed.end_rank(min(failed.ranks), 1, None)
        at = run.loop.time()
        await run.until(lambda: run.loop.time() > at + 1.0)
        run.hardware.publish(Unreachable(Moment(at, at), "node-00006", "no answer over ssh"))
        if spares > 1:
            run.faults.lose(guilty, proven=True)
        await run.until(lambda: len(run.journal("attempt")) == 2, 200)
        slots = run.journal("attempt")[1]["slots"]
        assert len(slots) == 8 and "node-00006" not in slots
        assert (guilty in slots) == (spares == 1) and len(run.journal("cordon")) == spares - 1
        reasons = {r["node"]: r["reason"] for r in run.journal("lost")}
        assert reasons["node-00006"] == "unreachable while the attempt was ended"
        (incident,) = run.incidents()
        assert "node-00006" in incident["nodes"] and Incident.from_json(incident).node != "node-00006"

    simulate(act, 8, spares=spares)


def test_an_event_that_cannot_be_taken_is_not_the_last_one(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = Fleet._apply

    def once(self: Fleet, event: object) -> None:
        monkeypatch.setattr(Fleet, "_apply", apply)
        raise ValueError("an event that nobody thought of")

    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        monkeypatch.setattr(Fleet, "_apply", once)
        run.hardware.publish(Unreachable(Moment(1.0, 1.0), "node-00001", "?"))
        run.faults.lose("node-00004", noticed_after_s=2.0, proven=True)
        await run.until(lambda: run.journal("resumed"))
        (incident,) = run.incidents()
        assert incident["nodes"] == {"node-00004": "gone"}

    simulate(act, 8, spares=1)


def test_what_a_lost_node_costs_grows_as_the_number_of_ranks(tmp_path: Path) -> None:
    def count(nodes: int) -> tuple[NetworkTraffic, NetworkTraffic]:
        async def main(loop: SimulatedLoop) -> tuple[NetworkTraffic, NetworkTraffic]:
            script = Script(start_s=20, step_s=5, save_every=4)
            timeouts = Timeouts(suspect=30, hang=60, lease=60)  # type: ignore[arg-type]
            run = SimulatedRun(
                loop, tmp_path / f"run-{nodes}", nodes, nproc=4, spares=1, script=script, timeouts=timeouts
            )
            await reach(run, 1, 5)
            network = run.hardware.network
            before = network.to_supervisor.copy(), network.to_nodes.copy()
            run.faults.lose("node-00003", noticed_after_s=2.0, proven=True)
            await run.until(lambda: run.journal("resumed"))
            return network.to_supervisor.since(before[0]), network.to_nodes.since(before[1])

        return run_simulated(main)

    for few, many in zip(count(8), count(64), strict=True):
        assert few.messages and many.messages / few.messages < 8 * 1.1
        assert many.size / few.size < 8 * 1.25, f"{few.size} bytes at 8 nodes, {many.size} at 64"
