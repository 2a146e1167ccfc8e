"""Two moves over a fake cluster, from incident to return: suspects leave at once, are tested aside, and return or are put out of use."""

from __future__ import annotations

import pytest

from unbroken.progress import Policy
from unbroken.progress.records.state import RunState
from unbroken.progress.records.verdict import Action, Category, Outcome, Verdict
from unbroken.testing.fake_cluster import simulated_run
from unbroken.testing.fake_cluster.simulated_run import SimulatedRun

from .simulating import Simulate, reach


def state_of(run: SimulatedRun) -> RunState:
    return RunState.of(run.journal_text())


def test_an_innocent_leaves_at_once_is_tested_aside_and_is_a_spare_again(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.hang_rank("node-00005", 11)
        await run.until(lambda: run.journal("resumed"))
        (suspect,) = run.journal("suspect")
        slots = run.journal("attempt")[1]["slots"]
        assert suspect["node"] == "node-00005" and "node-00005" not in slots and "node-00008" in slots
        (incident,) = run.incidents()
        assert incident["action"] == "restart_elsewhere" and "is tested aside" in incident["why"]
        await run.until(lambda: run.journal("cleared"))
        (cleared,) = run.journal("cleared")
        assert cleared["innocent"] and cleared["repeats"] >= 10 and 0 < cleared["seconds"] < 600
        state = state_of(run)
        assert not state.cordoned and not state.suspects and state.innocent_s == cleared["seconds"]
        assert any("p below 0.3 after 10 repeats" in line for line in run.screen.lines)
        # It is used again: the next lost node's place is its.
        run.faults.lose(slots[0], noticed_after_s=1.0, proven=True)
        run.faults.lose("node-00009", noticed_after_s=1.0, proven=True)
        await run.until(lambda: len(run.journal("attempt")) == 3)
        assert "node-00005" in run.journal("attempt")[2]["slots"]

    simulate(act, 8, spares=2)


def test_a_successor_goes_on_with_the_suspects_and_puts_the_faulty_one_out(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.fail_pairs("node-00005", 1.0)
        run.faults.hang_rank("node-00005", 11)
        await run.until(lambda: run.journal("suspect"))
        run.kill_supervisor()
        run.restart_supervisor()
        await run.until(lambda: run.journal("cordon"))
        (cordon,) = run.journal("cordon")
        assert cordon["node"] == "node-00005" and "a test of pairs" in cordon["reason"]
        assert not state_of(run).suspects and not run.journal("cleared")

    simulate(act, 8, spares=3)


def test_without_another_node_a_suspect_is_used_again(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.fail_pairs("node-00002", 0.02)
        run.faults.hang_rank("node-00005", 11)
        await run.until(lambda: run.journal("suspect"))
        await reach(run, 2, 10)
        run.faults.lose("node-00001", noticed_after_s=1.0, proven=True)
        await run.until(lambda: len(run.journal("attempt")) == 3)
        assert "node-00005" in run.journal("attempt")[2]["slots"]

    simulate(act, 8, spares=1)


NOBODY = Verdict(
    Outcome.FAILED, Category.INFRASTRUCTURE, "NCCLTimeoutError", None, recoverable=True, action=Action.RESTART, confidence=0.7,
    decided_by="test",
)  # fmt: skip


def test_the_second_incident_that_names_nobody_tests_all_in_pairs(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated_run, "diagnose", lambda logs, facts: NOBODY)

    async def act(run: SimulatedRun) -> None:
        run.faults.fail_pairs("node-00003", 1.0)
        for attempt in (1, 2):
            await reach(run, attempt, 9 * attempt)
            run.faults.fail_rank("node-00001", 2)
            await run.until(lambda attempt=attempt: len(run.journal("attempt")) == attempt + 1)
        (pairs,) = run.journal("pairs")
        assert pairs["incident"] == 2 and pairs["convicted"] == ["node-00003"] and pairs["nodes"] == 10
        first, second, third = (r["slots"] for r in run.journal("attempt"))
        assert first == second and "node-00003" not in third
        assert "all are tested in pairs first" in run.incidents()[1]["why"]
        assert run.loop.time() < 1000

    simulate(act, 8, spares=2)


@pytest.mark.parametrize(("on_doubt", "suspects"), [("auto", 0), ("test", 1)])
def test_virtual_nodes_of_one_machine_are_kept_unless_the_policy_says_test(
    simulate: Simulate, on_doubt: str, suspects: int
) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.hang_rank("node-00003", 7)
        await run.until(lambda: run.journal("resumed"))
        (incident,) = run.incidents()
        assert len(run.journal("suspect")) == suspects
        assert incident["action"] == ("restart_elsewhere" if suspects else "restart")

    simulate(act, 4, spares=2, one_machine=True, policy=Policy(on_doubt=on_doubt))
