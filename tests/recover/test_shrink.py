"""A run goes on with fewer nodes where none is left, and with all again once there are: decided, and on a fake cluster."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.run_folder import RunFolder
from unbroken.diagnose import Facts
from unbroken.errors import UsageError
from unbroken.progress import Budgets, Policy, RunDir, read_spec
from unbroken.progress.records.state import RunState
from unbroken.progress.records.verdict import Action, Category, Outcome, Verdict
from unbroken.recover.decide.policy import decide
from unbroken.recover.decide.resizing import choose_size, choose_slots, decide_growth
from unbroken.recover.start import make_spec, settle_spec
from unbroken.recover.supervise.nodes.fleet import Fleet
from unbroken.status import gather
from unbroken.testing.fake_cluster.simulated_run import SimulatedRun

from .simulating import Simulate, Visitor, reach


@pytest.mark.parametrize(
    ("nodes", "least", "each", "legal"),
    [(4, 2, 1, (4, 3, 2)), (8, 4, 2, (8, 6, 4)), (4, 4, 1, (4,)), (4, 0, 1, (4,)), (6, 3, 3, (6, 3))],
)
def test_a_run_may_go_on_with_whole_replicas(nodes: int, least: int, each: int, legal: Sequence[int]) -> None:
    spec = make_spec(["t.py"], nodes=nodes, min_nodes=least, nodes_per_replica=each)
    assert spec.node_counts == legal


@pytest.mark.parametrize(
    ("nodes", "least", "each", "hint"),
    [(4, 5, 1, "1, 2, 3, 4"), (8, 3, 2, "2, 4, 6, 8"), (8, 4, 3, "multiple of --nodes-per-replica 3")],
)
def test_what_does_not_divide_is_refused_with_what_does(nodes: int, least: int, each: int, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        make_spec(["t.py"], nodes=nodes, min_nodes=least, nodes_per_replica=each)
    assert hint in str(refused.value)


def test_a_later_call_keeps_what_was_asked_for(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    settle_spec(run_dir, make_spec(["t.py"], nodes=8, min_nodes=4, nodes_per_replica=2))
    again = settle_spec(run_dir, make_spec(["t.py"], nodes=8))
    assert (again.min_nodes, again.nodes_per_replica) == (4, 2)
    assert read_spec(run_dir.spec).policy == Policy()


@pytest.mark.parametrize(
    ("found", "each", "slots"),
    [
        (("a", "b", "c", "d"), 1, ("a", "b", "c", "d")),
        (("a", None, "c", "d"), 1, ("a", "c", "d")),
        (("a", None, "c", "d"), 2, ("c", "d")),
        (("a", None, None, "d"), 2, ("a", "d")),
    ],
)
def test_replicas_that_are_whole_stay_together(
    found: Sequence[str | None], each: int, slots: Sequence[str]
) -> None:
    sizes = make_spec(["t.py"], nodes=4, min_nodes=each, nodes_per_replica=each).node_counts
    assert choose_slots(found, sizes, each) == slots
    assert choose_size(1, (4, 2)) == 0


POLICY = Policy(grow_after=60, grows_per_hour=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("since", "grown", "restarts", "nodes", "why"),
    [
        ({}, [], False, (), ""),
        ({"d": 950.0}, [], False, (), "has to answer for"),
        ({"d": 940.0}, [], False, ("d",), ""),
        ({"d": 999.0}, [], True, ("d",), ""),
        ({"d": 900.0}, [-3000.0, 500.0], False, ("d",), ""),
        ({"d": 900.0}, [-3000.0, 100.0, 500.0], True, (), "not for 45 minutes"),
        ({"e": 900.0, "d": 800.0}, [], False, ("d",), ""),
    ],
)
def test_a_node_comes_in_once_it_is_steady_and_not_too_often(
    since: dict[str, float], grown: list[float], restarts: bool, nodes: tuple[str, ...], why: str
) -> None:
    growth = decide_growth(3, (4, 3, 2), since, grown, 1000.0, POLICY, restarts=restarts)
    assert growth.nodes == nodes and why in growth.why and bool(why) == bool(growth.why)
    pair = decide_growth(4, (8, 6, 4), since, [], 1000.0, POLICY, restarts=restarts)
    assert len(pair.nodes) in (0, 2), "a whole replica or nothing"


def test_the_journal_says_with_how_many_nodes_each_attempt_ran() -> None:
    records = [
        {"kind": "run", "t": 1.0, "command": ["t.py"], "nodes": 3, "nproc": 2},
        {"kind": "attempt", "t": 2.0, "attempt": 1, "slots": ["a", "b", "c"]},
        {"kind": "resized", "t": 3.0, "before": 2, "nodes": 2, "had": 3, "without": ["b"]},
        {"kind": "attempt", "t": 3.0, "attempt": 2, "slots": ["a", "c"]},
    ]
    state = RunState.of(records)
    assert (state.nodes, state.without, state.grown, state.resized_after) == (3, ("b",), [], 1)
    for r in (
        {"kind": "attempt", "t": 4.0, "attempt": 3, "slots": ["a", "c"]},
        {"kind": "resized", "t": 5.0, "before": 4, "nodes": 3, "had": 2, "without": []},
        {"kind": "attempt", "t": 5.0, "attempt": 4, "slots": ["a", "c", "b"]},
    ):
        state.apply(r)
    assert (state.without, state.grown, state.resized_after) == ((), [5.0], 3)
    for r in (
        {"kind": "ended", "t": 6.0, "attempt": 4, "how": "resized"},
        {"kind": "resized", "t": 7.0, "before": 5, "nodes": 4, "had": 3, "without": []},
    ):
        state.apply(r)
    assert state.grown == [5.0, 6.0], "a stop for more nodes is counted once, whatever comes of it"
    state.apply({"kind": "attempt", "t": 8.0, "attempt": 5, "slots": ["a", "c", "b"]})
    for t in (9.0, 10.0):  # it could not be launched the first time
        state.apply({"kind": "resized", "t": t, "before": 6, "nodes": 4, "had": 3, "without": []})
    assert state.grown == [5.0, 6.0, 9.0]
    state.apply({"kind": "status", "t": 11.0, "status": "interrupted"})
    state.apply({"kind": "epoch", "t": 12.0})
    assert not state.grown, "whoever gives the command again wants all of its nodes"


def slots(run: SimulatedRun) -> list[int]:
    """How many nodes each attempt had."""
    return [len(a["slots"]) for a in run.journal("attempt")]


def give_back(run: SimulatedRun, name: str) -> None:
    run.hardware.given[name] = None
    run.faults.return_node(name)


def test_a_run_shrinks_at_once_and_grows_when_the_node_is_back(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.lose("node-00001", proven=True)
        lost = run.loop.time()
        await run.until(lambda: len(run.journal("attempt")) == 2)
        assert run.loop.time() - lost < 15, "shrink_after is 10 s"
        assert run.journal("attempt")[1]["slots"] == ["node-00000", "node-00002", "node-00003"]
        (saved,) = run.journal("attempt")[1]["candidates"]
        assert (saved["step"], saved["in_memory"]) == (7, 0), (
            "what is in memory is of another number of ranks"
        )
        await run.until(lambda: run.journal("resumed"))
        (incident,) = run.incidents()
        assert "3 of 4 nodes, without node-00001" in incident["resized"] and incident["schema"] == 3
        # A supervisor that comes meanwhile knows how many there are.
        run.kill_supervisor()
        run.restart_supervisor()
        await run.until(lambda: run.journal("adopted"))
        give_back(run, "node-00001")
        back = run.loop.time()
        await run.until(lambda: len(run.journal("attempt")) == 3)
        assert 30 <= run.loop.time() - back < 60, "it has answered for half a minute"
        assert set(run.journal("attempt")[2]["slots"]) == {f"node-0000{i}" for i in range(4)}
        assert [r["how"] for r in run.journal("ended")] == ["node_lost", "resized"]
        assert [(r["had"], r["nodes"], r["without"]) for r in run.journal("resized")] == [
            (4, 3, ["node-00001"]),
            (3, 4, []),
        ]
        assert run.hardware.gangs[3].world_size == 8 and run.hardware.gangs[2].world_size == 6

    simulate(act, 4, min_nodes=2, policy=Policy(grow_after=30))  # type: ignore[arg-type]


def test_below_the_least_it_waits_and_says_so(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.lose("node-00001", proven=True)
        await run.until(lambda: len(run.journal("attempt")) == 2)
        await run.until(lambda: len(run.journal("resumed")) == 1)
        run.faults.lose("node-00002", proven=True)
        await asyncio.sleep(100)
        assert len(run.journal("attempt")) == 2, "two are the least"
        assert any("needs 2 nodes at least" in line for line in run.screen.lines)
        give_back(run, "node-00002")
        await run.until(lambda: len(run.journal("attempt")) == 3)
        assert slots(run) == [3, 2, 2]
        assert [r["without"] for r in run.journal("resized")] == [["node-00001"]]

    simulate(act, 3, min_nodes=2)


@pytest.mark.slow
def test_a_node_that_comes_and_goes_stops_the_run_only_so_often(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        for _ in range(3):
            attempts = len(run.journal("attempt"))
            run.faults.lose("node-00002", proven=True)
            while len(slots(run)) == attempts:
                await asyncio.sleep(0.5)
            give_back(run, "node-00002")
            await asyncio.sleep(20)
            assert len(slots(run)) == attempts + 1, "it has not answered for long"
            await asyncio.sleep(200)
            if len(slots(run)) == attempts + 1:
                break
        assert slots(run) == [3, 2, 3, 2, 3, 2], "twice within an hour, and not a third time"
        assert any("as often as the policy lets it" in line for line in run.screen.lines)
        assert "2 so far" in run.incidents()[-1]["resized"]

    simulate(act, 3, min_nodes=1, policy=POLICY)


def test_whole_replicas_leave_and_a_new_node_brings_one_back(simulate: Simulate) -> None:
    """Two nodes hold a copy of the model together; the cluster is full for a while and gives another node later."""

    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.hold()
        run.faults.lose("node-00001", proven=True)
        await run.until(lambda: len(run.journal("attempt")) == 2)
        assert run.journal("attempt")[1]["slots"] == ["node-00002", "node-00003"]
        await run.until(lambda: run.journal("resumed"))
        run.faults.grant()
        await run.until(lambda: len(run.journal("attempt")) == 3)
        assert run.journal("attempt")[2]["slots"][:2] == ["node-00002", "node-00003"]
        assert set(run.journal("attempt")[2]["slots"][2:]) == {"node-00000", "node-00004"}
        assert not run.journal("replaced")

    simulate(act, 4, idle=1, min_nodes=2, nodes_per_replica=2, policy=Policy(grow_after=10))  # type: ignore[arg-type]


def test_a_node_that_is_surely_at_fault_is_left_without_another_in_its_place(tmp_path: Path) -> None:
    verdict = Verdict(
        outcome=Outcome.FAILED, category=Category.INFRASTRUCTURE, reason="ECCError", recoverable=True, cordon=("b",),
        action=Action.RESTART_ELSEWHERE, confidence=0.95,
    )  # fmt: skip
    facts = Facts(run_step=9, step=9)
    kept = decide(verdict, facts, [], Budgets(), 0)
    assert not kept.exclude and "no spare is left" in kept.why
    assert decide(verdict, facts, [], Budgets(), 0, smaller_by=1).exclude == ("b",)
    doubtful = dataclasses.replace(verdict, confidence=0.4)
    assert not decide(doubtful, facts, [], Budgets(), 0, smaller_by=1).exclude


@pytest.mark.slow
def test_a_node_that_is_taken_away_in_time_is_no_failure_and_amending_goes_on(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.preempt("node-00001", in_s=200.0)
        await run.until(lambda: len(run.journal("attempt")) == 2)
        assert slots(run) == [3, 2] and not run.journal("lost")
        visitor = Visitor(run)
        new = [*read_spec(run.run_dir.spec).command, "--lr", "0.05"]
        answer = await visitor.ask("amend", command=new, nodes=3, nproc=2)
        assert answer["ok"], "it is a run of three nodes"
        await run.until(lambda: len(run.journal("attempt")) == 3)
        assert slots(run) == [3, 2, 2] and len(run.journal("resized")) == 1
        run.supervisor.request_stop()
        await run.until(run.task.done, 600)
        run.spec = dataclasses.replace(run.spec, command=tuple(new))
        give_back(run, "node-00001")
        run.restart_supervisor()  # the same command, once it has stopped: all of its nodes are there
        await run.until(lambda: len(run.journal("attempt")) == 4)
        assert slots(run) == [3, 2, 2, 3]

    simulate(act, 3, min_nodes=2)


@pytest.mark.parametrize("how", ["lost", "taken away"])
def test_as_many_nodes_are_asked_for_as_are_missing(simulate: Simulate, how: str) -> None:
    """Also in place of one that was taken away in time, and where the policy lets none come in for long."""

    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.hold()
        if how == "lost":
            run.faults.lose("node-00001", proven=True)
        else:
            run.faults.preempt("node-00001", in_s=200.0)
        await run.until(lambda: len(run.journal("attempt")) == 2)
        await asyncio.sleep(300)
        run.faults.grant()
        await asyncio.sleep(300)
        assert slots(run) == [3, 2]
        assert len([n for n in run.hardware.given if n != "node-00001"]) == 3, (
            "not another one each half minute"
        )

    simulate(act, 3, idle=6, min_nodes=2, policy=Policy(grows_per_hour=0))


def test_the_same_command_after_a_stop_begins_with_nodes_that_were_lost_and_are_given_again(
    simulate: Simulate,
) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.lose("node-00001", proven=True)
        await run.until(lambda: len(run.journal("attempt")) == 2)
        await run.until(lambda: run.journal("resumed"))
        run.supervisor.request_stop()
        await run.until(run.task.done, 600)
        node = run.hardware.nodes["node-00001"]
        node.state, node.unfenceable = "up", False  # repaired while nobody listened
        run.restart_supervisor()
        await run.until(lambda: len(run.journal("attempt")) == 3)
        assert slots(run) == [3, 2, 3] and [r["node"] for r in run.journal("returned")] == ["node-00001"]

    simulate(act, 3, min_nodes=2)


def test_a_person_who_gives_the_command_again_has_all_nodes_whatever_the_policy(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.lose("node-00001", proven=True)
        await run.until(lambda: len(run.journal("attempt")) == 2)
        assert any("grows_per_hour = 0" in line for line in run.screen.lines)
        await run.until(lambda: run.journal("resumed"))
        give_back(run, "node-00001")
        await asyncio.sleep(300)
        assert slots(run) == [3, 2], "it does not grow by itself"
        run.supervisor.request_stop()
        await run.until(run.task.done, 600)
        run.restart_supervisor()
        await run.until(lambda: len(run.journal("attempt")) == 3)
        assert slots(run) == [3, 2, 3]

    simulate(act, 3, min_nodes=2, policy=Policy(grows_per_hour=0))


def test_a_node_that_was_given_late_is_no_fault_and_comes_in(simulate: Simulate) -> None:
    """Its agent had no time left to come up before the run went on without it."""

    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 9)
        run.faults.hold()
        run.faults.slow_start("node-00003", 12.0)
        run.faults.lose("node-00001", proven=True)
        await asyncio.sleep(7)
        run.faults.grant()
        await run.until(lambda: len(run.journal("attempt")) == 2)
        await run.until(lambda: len(run.journal("attempt")) == 3, 300)
        assert slots(run) == [3, 2, 3] and "node-00003" in run.journal("attempt")[2]["slots"]
        assert [r["node"] for r in run.journal("lost")] == ["node-00001"]

    simulate(act, 3, idle=1, min_nodes=2, policy=Policy(grow_after=10))  # type: ignore[arg-type]


def test_a_look_at_a_node_that_fails_each_time_keeps_no_other_away(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Fleet.ask
    asked: list[str] = []

    async def ask_badly(self: Fleet, name: str, op: str, **fields: Any) -> Any:
        if op == "check" and name == "node-00001" and run_of["attempts"]() > 1:
            asked.append(name)
            raise ValueError("odd")
        return await ask(self, name, op, **fields)

    run_of: dict[str, Any] = {"attempts": int}
    monkeypatch.setattr(Fleet, "ask", ask_badly)

    async def act(run: SimulatedRun) -> None:
        run_of["attempts"] = lambda: len(slots(run))
        await reach(run, 1, 9)
        run.faults.hold()
        run.faults.lose("node-00001", proven=True)
        await run.until(lambda: len(run.journal("attempt")) == 2)
        give_back(run, "node-00001")
        await asyncio.sleep(120)
        run.faults.grant()
        await run.until(lambda: len(run.journal("attempt")) == 3, 300)
        assert "node-00003" in run.journal("attempt")[2]["slots"]
        assert len(asked) > 2 and sum("odd" in line for line in run.screen.lines) == 1

    simulate(act, 3, idle=1, min_nodes=2, policy=Policy(grow_after=10))  # type: ignore[arg-type]


def test_an_attempt_that_could_not_be_launched_is_one_change_of_size(tmp_path: Path) -> None:
    made = RunFolder(RunDir(tmp_path / "run"), nodes=3, nproc=1, spares=0)
    made.attempt()
    for _ in range(2):
        made.record("resized", before=2, nodes=2, had=3, without=["node-002"], step=9)
    assert gather(made.run_dir).size.changes == (
        "from attempt 2 on, after step 9: 3 nodes -> 2, without node-002",
    )
    made.record("resized", before=2, nodes=3, had=3, without=[], step=9)  # it was back in time
    assert gather(made.run_dir).size.changes == ()
