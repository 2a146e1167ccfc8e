"""Two things at once, on a fake cluster: a stop, a takeover or a lost folder while something else goes on."""

from __future__ import annotations

import asyncio
import gc

import pytest

from unbroken.errors import RunDirLost
from unbroken.progress import Timeouts
from unbroken.testing.fake_cluster.simulated_run import SimulatedRun

from .simulating import Simulate, reach

LEASE = Timeouts(suspect=30, hang=60, lease=60)  # type: ignore[arg-type]


async def sleep_until(run: SimulatedRun, time: float) -> None:
    while run.loop.time() < time:
        await asyncio.sleep(0.5)


def count(run: SimulatedRun, words: str) -> int:
    return sum(words in line for line in run.screen.lines)


# --- nodes that only seem to be there


def test_a_node_that_the_cluster_reports_lost_is_left_although_its_link_stands(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.lose("node-00003", noticed_after_s=2.0, proven=True)
        began = run.loop.time()
        await run.until(lambda: len(run.journal("attempt")) == 2)
        assert run.loop.time() - began < 15, "its lease is a minute: nobody waited for that"

    simulate(act, 8, spares=1, timeouts=LEASE)


@pytest.mark.slow
def test_a_spare_that_is_silent_takes_no_place(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.isolate("node-00008")
        await sleep_until(run, run.loop.time() + 40)
        run.faults.lose("node-00003", proven=True)
        await run.until(lambda: run.journal("resumed"))
        assert run.journal("attempt")[1]["slots"][3] == "node-00009"
        assert len(run.incidents()) == 1, "no attempt was lost to a spare that did not answer"

    simulate(act, 8, spares=2)


@pytest.mark.slow
def test_a_spare_that_was_taken_away_and_came_back_takes_a_place(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.preempt("node-00008", in_s=20.0)
        await sleep_until(run, run.loop.time() + 30)
        run.faults.return_node("node-00008")
        run.hardware.given["node-00008"] = None
        run.faults.lose("node-00003", proven=True)
        await run.until(lambda: run.journal("resumed"))
        assert run.journal("attempt")[1]["slots"][3] == "node-00008"

    simulate(act, 8, spares=1)


def test_a_node_that_was_given_up_and_is_reached_again_takes_a_place(simulate: Simulate) -> None:
    """Its link was cut for as long as a lease. Nobody reports that it is back, and no other node is left."""

    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.cut("node-00004")
        await run.until(lambda: len(run.journal("attempt")) == 2)
        run.faults.heal("node-00004")
        await run.until(lambda: run.journal("resumed"))
        run.faults.lose("node-00003", proven=True)
        await run.until(lambda: len(run.journal("resumed")) == 2)
        assert run.journal("attempt")[2]["slots"][3] == "node-00004"

    simulate(act, 8, spares=1)


def test_a_lost_node_that_is_back_first_takes_its_own_place_and_no_other(simulate: Simulate) -> None:
    """Two were lost, and no spare is left: the second one came back first, took the place of the first, and kept its own."""

    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        for name in ("node-00003", "node-00005"):
            run.faults.lose(name, proven=True)
        run.faults.return_node("node-00005")
        await run.until(lambda: len(run.journal("lost")) == 2)
        await sleep_until(run, run.loop.time() + 30)
        assert len(run.journal("attempt")) == 1, "one node is missing"
        run.faults.return_node("node-00003")
        run.hardware.given["node-00003"] = None
        await run.until(lambda: run.journal("resumed"))
        assert run.journal("attempt")[-1]["slots"] == run.journal("attempt")[0]["slots"]

    simulate(act, 8)


# --- a supervisor that takes over


@pytest.mark.slow
def test_a_takeover_does_not_wait_for_spares_that_the_cluster_has_not(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.preempt("node-00002", in_s=100.0)
        await run.until(lambda: run.journal("resumed"))
        await sleep_until(run, run.loop.time() + 120)
        run.kill_supervisor()
        run.restart_supervisor()
        await run.until(lambda: run.journal("adopted"), 60)
        before = run.step()
        await sleep_until(run, run.loop.time() + 100)
        assert run.step() > before + 10 and len(run.journal("attempt")) == 2

    simulate(act, 8, spares=1)


@pytest.mark.slow
def test_a_successor_waits_for_leases_that_it_did_not_grant(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.isolate("node-00004")
        cut = run.loop.time()
        run.kill_supervisor()
        run.restart_supervisor()
        await run.until(lambda: len(run.journal("attempt")) == 2)
        assert run.loop.time() - cut >= 100, (
            "its ranks may run for as long as their lease, which the one before granted"
        )
        assert not run.hardware.nodes["node-00004"].agent.ranks or not [
            r for r, s in run.hardware.nodes["node-00004"].agent.ranks.items() if s == "running"
        ]

    simulate(act, 8, spares=1, timeouts=Timeouts(suspect=30, hang=60, lease=100))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("after", [20.0, 45.0, 55.0])
def test_a_supervisor_that_dies_while_it_fences_is_succeeded_by_one_that_fences(
    simulate: Simulate, after: float
) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.isolate("node-00004")
        cut = run.loop.time()
        await sleep_until(run, cut + after)
        assert len(run.journal("attempt")) == 1
        run.kill_supervisor()
        run.restart_supervisor()
        await run.until(lambda: run.journal("resumed"))
        agent = run.hardware.nodes["node-00004"].agent
        assert agent is not None and "running" not in agent.ranks.values(), "no rank outlives its attempt"
        assert run.journal("attempt")[1]["slots"][4] == "node-00008"
        assert [r["node"] for r in run.journal("lost")] == ["node-00004"]
        assert run.journal("unproven")[0]["node"] == "node-00004"

    simulate(act, 8, spares=1, timeouts=LEASE)


# --- a stop while something else goes on


@pytest.mark.slow
@pytest.mark.parametrize("after", [0.0, 0.5, 3.0, 6.0])
def test_a_stop_while_a_node_is_left_ends_the_run_once(simulate: Simulate, after: float) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.preempt("node-00002", in_s=200.0)
        await sleep_until(run, run.loop.time() + after)
        run.supervisor.request_stop()
        assert await run.task == "interrupted"
        assert count(run, "are asked to save and exit") == 1, "they were asked twice"
        assert not count(run, "killing")
        assert run.journal("status")[-1]["status"] == "interrupted"
        left = [t.get_name() for t in asyncio.all_tasks() if "stop_ranks" in str(t.get_coro())]
        assert not left

    simulate(act, 8, spares=1)


@pytest.mark.slow
def test_a_node_lost_while_another_is_left_disturbs_the_next_attempt_no_more(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.preempt("node-00002", in_s=300.0)
        await run.until(lambda: count(run, "are asked to save and exit"))
        run.faults.lose("node-00005", proven=True)
        await run.until(lambda: run.journal("resumed"))
        left = [t.get_name() for t in asyncio.all_tasks() if "stop_ranks" in str(t.get_coro())]
        assert not left, "the ranks of an attempt that is over are asked for nothing"

    simulate(act, 8, spares=2)


@pytest.mark.slow
def test_a_stop_while_a_lease_is_waited_for_ends_the_run(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.isolate("node-00004", noticed_after_s=1.0)
        await run.until(lambda: count(run, "its lease has expired"))
        asked = run.loop.time()
        run.supervisor.request_stop()
        assert await run.task == "interrupted"
        assert run.loop.time() - asked < 120
        assert run.journal("unproven")[-1]["node"] == "node-00004", "whoever comes next knows of it"
        assert not run.journal("resumed") and len(run.journal("attempt")) == 1

    simulate(act, 8, spares=1, timeouts=LEASE)


@pytest.mark.slow
def test_a_run_folder_that_is_lost_while_a_node_is_fenced_ends_the_run(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.isolate("node-00004", noticed_after_s=1.0)
        await run.until(lambda: count(run, "its lease has expired"))
        run.run_dir.path.rename(run.run_dir.path.with_name("elsewhere"))
        lost = run.loop.time()
        with pytest.raises(RunDirLost):
            await run.task
        assert run.loop.time() - lost < 300
        assert len(run.hardware.gangs) == 1

    simulate(act, 8, spares=1, timeouts=LEASE)


def test_an_allocation_that_ends_is_left_in_time(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.end_allocation(600.0)
        ends = run.loop.time() + 600
        assert await run.task == "interrupted"
        assert 10 < ends - run.loop.time() < 300
        assert run.journal("ended")[-1]["how"] == "interrupted" and not run.incidents()
        assert run.journal("seal")

    simulate(act, 8, spares=1)


def test_a_supervisor_that_is_killed_leaves_no_task_of_its_own(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 5)
        found: list[str] = []
        run.loop.set_exception_handler(lambda _, context: found.append(context["message"]))
        run.kill_supervisor()
        run.restart_supervisor()
        await run.until(lambda: run.journal("adopted"))
        gc.collect()
        assert not found

    simulate(act, 3)
