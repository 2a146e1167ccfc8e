"""A run goes on with other arguments: a live one at a step boundary, an ended one at its next start, in other sizes too."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unbroken.cli.main import dispatch
from unbroken.errors import RunDirMismatch, RunStopped
from unbroken.progress import RunDir, read_spec
from unbroken.progress.records.amendment import describe_amendment, describe_difference
from unbroken.progress.records.decision import Decision, PastIncident
from unbroken.progress.records.state import RunState
from unbroken.progress.records.verdict import Action
from unbroken.recover.amend import read_progress
from unbroken.recover.decide.going_back import goes_back
from unbroken.recover.start import amend_running, make_spec, settle_spec
from unbroken.testing.fake_cluster.simulated_run import SimulatedRun

from .simulating import Simulate, Visitor, reach


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("t.py --lr 0.1", "t.py --lr 0.05", "--lr 0.1 -> --lr 0.05"),
        ("t.py --lr 0.1", "t.py --lr 0.1 --clip 'a b'", "+ --clip 'a b'"),
        ("t.py --fast --lr 1", "t.py --lr 1", "- --fast"),
        ("t.py a", "t.py a", ""),
        ("a.py", "b.py", "a.py -> b.py"),
        ("t.py --optimizer -1 --tensor 2", "t.py --pipeline 2", "--optimizer -1 --tensor 2 -> --pipeline 2"),
        ("t.py --lr 1 --seed 3", "t.py --lr 2 --seed 4", "--lr 1 -> --lr 2, --seed 3 -> --seed 4"),
        ("t.py --sizes 1 2 3 --x", "t.py --sizes 1 2 4 --x", "--sizes 1 2 3 -> --sizes 1 2 4"),
        ("t.py --lr=1 --x 2", "t.py --lr=2 --x 2", "--lr=1 -> --lr=2"),
    ],
)
def test_what_changed_is_said_in_words(old: str, new: str, said: str) -> None:
    assert describe_difference(shlex.split(old), shlex.split(new)) == said


def test_an_amendment_says_when_and_what() -> None:
    record = {"before": 3, "step": 1200, "command": ["t.py", "b"], "was": ["t.py", "a"]}
    assert describe_amendment(record) == "from attempt 3 on, after step 1,200: a -> b"
    resized = {**record, "was": ["t.py", "b"], "nodes": 2, "nproc": 8, "had": [4, 8], "step": -1}
    assert describe_amendment(resized) == "from attempt 3 on: 4 nodes x 8 ranks -> 2 x 8"


def test_the_journal_says_with_what_each_attempt_runs() -> None:
    run = {"kind": "run", "t": 1.0, "command": ["t.py"], "nodes": 4, "nproc": 2}
    attempt = {"kind": "attempt", "t": 2.0, "attempt": 3, "slots": ["a", "b", "c", "d"]}
    amended = {"kind": "amended", "t": 3.0, "command": ["t.py", "--x"], "was": ["t.py"]}
    state = RunState.of([run, attempt, amended])
    assert (state.command, state.nodes, state.nproc, state.slots) == (
        ("t.py", "--x"),
        4,
        2,
        ("a", "b", "c", "d"),
    )
    assert state.resized_after == 0
    resized = RunState.of([run, attempt, {**amended, "nodes": 2, "nproc": 4}])
    assert (resized.nodes, resized.nproc, resized.slots, resized.resized_after) == (2, 4, (), 3)
    done = [run, attempt, {"kind": "status", "t": 4.0, "status": "completed"}]
    assert RunState.of([*done, amended]).status == "running", "a run that is done goes on with more steps"


def test_without_amend_other_arguments_are_refused_and_the_hint_names_it(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    first = settle_spec(run_dir, make_spec(["t.py", "--lr", "1"], nodes=2))
    other = make_spec(["t.py", "--lr", "2"], nodes=2)
    with pytest.raises(RunDirMismatch) as refused:
        settle_spec(run_dir, other)
    assert "--amend" in str(refused.value)
    amended = settle_spec(run_dir, other, amend=True)
    assert (amended.command, amended.run_id) == (("t.py", "--lr", "2"), first.run_id)
    assert dispatch(["run", "--run-dir", str(tmp_path / "none"), "--amend", "--", "t.py"]) == 2


@pytest.mark.parametrize("given", ["", "/data/first"])
def test_a_run_that_is_there_does_not_start_from_something_else(tmp_path: Path, given: str) -> None:
    """Neither a live run nor one that has stopped: what was asked for would have no effect."""
    run_dir = RunDir(tmp_path / "run")
    settle_spec(run_dir, make_spec(["t.py"], origin=given))
    other = make_spec(["t.py", "--lr", "2"], origin="/data/other/step-00000020.a0001")
    for ask in (
        lambda: settle_spec(run_dir, other, amend=True),
        lambda: amend_running(run_dir, other, print),
    ):
        with pytest.raises(RunDirMismatch) as refused:
            ask()
        assert f"--from was {given or 'not given'}, now /data/other/step" in str(refused.value)
        assert "Leave --from and --fork-from out" in str(refused.value)
    same = make_spec(["t.py", "--lr", "2"], origin=given)
    assert settle_spec(run_dir, same, amend=True).origin == given
    assert not amend_running(run_dir, same, print), "nobody supervises it"


def test_a_live_run_takes_other_arguments_at_a_step_boundary(simulate: Simulate) -> None:
    """Asked over its link, as `unbroken run --amend` does; nothing is lost, and no incident is made of it."""

    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 10)
        old = read_spec(run.run_dir.spec).command
        new, visitor = [*old, "--lr", "0.05"], Visitor(run)
        for wrong, said in (
            ({"command": new, "nodes": 4, "nproc": 2}, "keeps its 8 nodes"),
            ({"command": "rm", "nodes": 8, "nproc": 2}, "makes no sense"),
        ):
            answer = await visitor.ask("amend", **wrong)
            assert not answer["ok"] and said in answer["what"]
        answer = await visitor.ask("amend", command=new, nodes=8, nproc=2)
        assert answer["ok"] and answer["changes"] == "+ --lr 0.05"
        await reach(run, 2, 11)
        (amended,) = run.journal("amended")
        assert (amended["command"], amended["was"], amended["before"]) == (new, list(old), 2)
        assert [r["how"] for r in run.journal("ended")] == ["amended"]
        assert not run.incidents()
        assert list(read_spec(run.run_dir.spec).command) == new
        await run.until(lambda: len(run.journal("first_step")) == 2)
        # (These ranks save every fourth step, and not when they stop.)
        stopped, first = run.journal("ended")[0]["step"], run.journal("first_step")[1]["step"]
        assert stopped - 3 <= first <= stopped + 1
        # Its successor knows with what the ranks run, and takes them over as they are.
        run.kill_supervisor()
        run.spec = replace(run.spec, command=tuple(new))
        run.restart_supervisor()
        await run.until(lambda: run.journal("adopted"))
        assert not run.journal("amended")[1:] and run.journal("attempt")[-1]["attempt"] == 2

    simulate(act, 8)


ARGPARSE = """usage: train.py [-h] [--lr LR]
train.py: error: unrecognized arguments: --lrr 1
"""


async def amend(run: SimulatedRun, visitor: Visitor, *more: str) -> str:
    """Asks for other arguments; returns the request's number."""
    answer = await visitor.ask("amend", command=["train.py", *more], nodes=8, nproc=2)
    assert answer["ok"] and answer["changes"], answer
    return str(answer["request"])


async def refuse_arguments(run: SimulatedRun, attempt: int) -> None:
    """The ranks of an attempt end before their first step, as argparse ends a script."""
    await run.until(lambda: attempt in run.hardware.gangs and run.hardware.gangs[attempt].began)
    log = run.run_dir.rank_log(attempt, "node-00000", 0)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(ARGPARSE)
    run.faults.fail_rank("node-00000", 0, code=2)


def test_a_live_run_goes_back_once_where_the_script_refuses_its_arguments(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 10)
        visitor = Visitor(run)
        request = await amend(run, visitor, "--lrr", "1")
        await refuse_arguments(run, 2)
        await reach(run, 3, 11)
        await run.until(lambda: len(run.journal("first_step")) == 2)
        there, back = run.journal("amended")
        assert (back["command"], back["was"], back["back"]) == (["train.py"], there["command"], True)
        assert (there["live"], back["before"]) == (True, 3) and "unrecognized arguments" in back["why"]
        assert list(read_spec(run.run_dir.spec).command) == ["train.py"]
        (incident,) = run.incidents()
        assert incident["action"] == "restart" and "goes back to the command before" in incident["why"]
        assert "from attempt 3 on: - --lrr 1" in "\n".join(run.screen.lines)
        found = read_progress(run.journal_text(), request)
        assert found.failed.startswith("attempt 2 failed before its first step, and the run goes back")
        assert "(- --lrr 1)" in found.failed and "unrecognized arguments" in found.failed
        assert "(back: that command failed before its first step)" in describe_amendment(back)
        # A successor knows which command it is, too; the next wrong one is gone back from again.
        run.kill_supervisor()
        run.restart_supervisor()
        await run.until(lambda: run.journal("adopted"))
        await amend(run, Visitor(run), "--lrr", "2")
        await refuse_arguments(run, 4)
        await reach(run, 5, 14)
        assert [r.get("back", False) for r in run.journal("amended")] == [False, True, False, True]

    simulate(act, 8)


def test_where_the_command_before_fails_too_the_run_stops_as_ever(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 10)
        await amend(run, Visitor(run), "--lrr", "1")
        await refuse_arguments(run, 2)
        await refuse_arguments(run, 3)
        with pytest.raises(RunStopped):
            await run.task
        assert len(run.journal("amended")) == 2 and run.journal("attempt")[-1]["attempt"] == 3
        assert [i["action"] for i in run.incidents()] == ["restart", "stop"]

    simulate(act, 8)


def test_a_successor_goes_back_too_and_what_made_a_step_is_kept(simulate: Simulate) -> None:
    """The way back is in the journal. An amended command that made a step stays the run's, whatever comes."""

    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 10)
        await amend(run, Visitor(run), "--lrr", "1")
        await run.until(lambda: 2 in run.hardware.gangs)
        run.kill_supervisor()
        run.spec = replace(run.spec, command=("train.py", "--lrr", "1"))
        run.restart_supervisor()
        await run.until(lambda: run.journal("adopted"))
        await refuse_arguments(run, 2)
        await reach(run, 3, 11)
        assert run.journal("amended")[-1]["command"] == ["train.py"]
        await amend(run, Visitor(run), "--lr", "2")
        await reach(run, 4, 14)
        await run.until(lambda: run.journal("first_step")[-1]["attempt"] == 4)
        run.faults.fail_rank("node-00000", 0, code=1)
        await refuse_arguments(run, 5)
        with pytest.raises(RunStopped):
            await run.task
        assert run.journal("amended")[-1]["command"] == ["train.py", "--lr", "2"]

    simulate(act, 8)


def test_of_two_amendments_at_once_the_first_is_told_that_it_was_replaced(simulate: Simulate) -> None:
    async def act(run: SimulatedRun) -> None:
        await reach(run, 1, 10)
        visitor = Visitor(run)
        first = await amend(run, visitor, "--lr", "2")
        second = await amend(run, visitor, "--lr", "3")
        assert await amend(run, visitor, "--lr", "3") == second, (
            "whoever asks for the same waits for the same"
        )
        await run.until(lambda: run.journal("amend_replaced"))
        replaced = read_progress(run.journal_text(), first)
        assert replaced.failed == "replaced by another --amend, before any attempt ran with it"
        await run.until(lambda: run.journal("attempt")[-1]["attempt"] == 2)
        waits = read_progress(run.journal_text(), second)
        assert not waits.done and waits.news.startswith(
            "attempt 2 starts with them; waiting for its first step"
        )
        # Another one, while the attempt of the second starts.
        third = await amend(run, visitor, "--lr", "4")
        await run.until(lambda: read_progress(run.journal_text(), third).done, 300)
        told = read_progress(run.journal_text(), second)
        assert told.failed == "replaced by another --amend, before its first step"
        assert [r["command"][-1] for r in run.journal("amended")] == ["3", "4"]
        # Back to what runs, before anything came of it: nothing is to be waited for.
        fifth = await amend(run, visitor, "--lr", "5")
        answer = await visitor.ask("amend", command=["train.py", "--lr", "4"], nodes=8, nproc=2)
        assert answer["changes"] == ""
        await run.until(lambda: read_progress(run.journal_text(), fifth).failed)

    simulate(act, 8)


RECORDS: list[dict[str, Any]] = [
    {"kind": "run", "t": 1.0, "command": ["t.py"], "nodes": 1, "nproc": 1},
    {"kind": "attempt", "t": 2.0, "attempt": 1, "slots": ["a"]},
    {"kind": "ended", "t": 3.0, "attempt": 1, "how": "amended", "step": 81},
    {"kind": "amended", "t": 4.0, "command": ["t.py", "x"], "was": ["t.py"], "before": 2, "step": 81, "live": True, "request": "q"},
    {"kind": "attempt", "t": 5.0, "attempt": 2, "slots": ["a"]},
]  # fmt: skip
FIRST = {"kind": "first_step", "t": 9.0, "attempt": 2, "step": 82}


@pytest.mark.parametrize(
    ("more", "done"),
    [
        ([], ""),
        ([FIRST], "attempt 2 runs with them: its first step is 82"),
        (
            [{"kind": "restored", "t": 6.0, "attempt": 2, "of": 1, "step": 80}, FIRST],
            "attempt 2 runs with them, from step 80, which it restored: its first step is 82",
        ),
        (
            [{"kind": "restored", "t": 6.0, "attempt": 2, "of": None, "step": None}, {**FIRST, "step": 0}],
            "attempt 2 runs with them, from the beginning: its first step is 0",
        ),
        (
            [
                {"kind": "ended", "t": 6.0, "attempt": 2, "how": "completed", "step": -1},
                {"kind": "status", "t": 6.0, "status": "completed"},
            ],
            "attempt 2 ran with them, and the run is completed",
        ),
    ],
)
def test_whoever_amended_is_told_from_where_the_run_goes_on(more: list[dict[str, Any]], done: str) -> None:
    assert read_progress([*RECORDS, *more], "q", now=9999.0).done == done
    assert read_progress([*RECORDS, *more], "", 0, now=9999.0).done == done, "an earlier version's supervisor"


def test_before_the_first_step_the_run_goes_on_from_the_beginning() -> None:
    early = [{**r, "step": -1} if "step" in r else r for r in RECORDS]
    first = {**FIRST, "step": 0}
    assert (
        read_progress([*early, first], "q").done
        == "attempt 2 runs with them, from the beginning: its first step is 0"
    )
    assert not read_progress(early, "q", now=60.0).done
    assert "told no step so far" in read_progress(early, "q", now=200.0).done, (
        "not every script tells its steps"
    )


def test_whoever_amended_is_told_why_no_step_will_come() -> None:
    incident = {"kind": "incident", "t": 6.0, "incident": 1, "attempt": 2, "cause": "unknown", "fingerprint": "f", "step": 81,
                "reached": False, "why": "exit code 3"}  # fmt: skip
    again = read_progress([*RECORDS, incident, {**RECORDS[-1], "attempt": 3}], "q")
    assert again.news.startswith(
        "attempt 3 starts with them again, since it failed before its first step (exit code 3)"
    )
    stopped = {"kind": "status", "t": 7.0, "status": "stopped", "why": "a restart cannot help"}
    told = read_progress([*RECORDS, incident, stopped], "q").failed
    assert told == "the run is stopped before the first step with them: a restart cannot help"
    early = read_progress([*RECORDS[:3], stopped], "q").failed
    assert early == "the run is stopped before it could be amended: a restart cannot help"


def test_budgets_stay_as_they_are_where_a_run_goes_back() -> None:
    incident = {
        "kind": "incident",
        "t": 3.0,
        "incident": 1,
        "attempt": 1,
        "cause": "failure",
        "fingerprint": "f",
        "step": 9,
    }
    ended = {"kind": "ended", "t": 3.0, "attempt": 1, "how": "failed", "step": 9}
    records = [*RECORDS[:2], ended, incident, *RECORDS[2:]]
    amended = RunState.of(records)
    assert amended.proven_command == ("t.py",) and not amended.history
    back = {**RECORDS[3], "command": ["t.py"], "was": ["t.py", "x"], "back": True, "why": "w", "before": 3}
    back = {k: v for k, v in back.items() if k not in ("live", "request")}
    script = {**incident, "attempt": 2, "cause": "script", "step": 81, "reached": False}
    state = RunState.of([*records, script, back])
    assert [p.cause for p in state.history] == ["failure", "script"] and state.proven_command == ()
    # The one that is gone back to has made its steps, so that another amendment leads back to it as well.
    assert RunState.of([*records, script, back, {**RECORDS[3], "before": 3}]).proven_command == ("t.py",)
    # Of two amendments the first made no step: it is nothing to go back to.
    assert RunState.of(
        [*records, {**RECORDS[3], "was": ["t.py", "x"], "command": ["t.py", "y"]}]
    ).proven_command == ("t.py",)
    # Given by hand, it is for whoever gave it to see what is wrong.
    by_hand = {k: v for k, v in RECORDS[3].items() if k not in ("live", "request")}
    for more in (
        [FIRST],
        [by_hand],
        [{"kind": "status", "t": 7.0, "status": "interrupted"}, {"kind": "epoch", "t": 8.0}],
    ):
        assert RunState.of([*records, *more]).proven_command == ()


@pytest.mark.parametrize(
    ("action", "cause", "reached", "proven", "back"),
    [
        (Action.STOP, "script", False, ("t.py",), True),
        (Action.STOP, "unknown", False, ("t.py",), True),
        (Action.STOP, "script", False, (), False),
        (Action.STOP, "script", True, ("t.py",), False),
        (Action.STOP, "node_loss", False, ("t.py",), False),
        (Action.RESTART, "unknown", False, ("t.py",), False),
    ],
)
def test_only_what_stops_an_unproven_command_by_itself_leads_back(
    action: Action, cause: str, reached: bool, proven: tuple[str, ...], back: bool
) -> None:
    assert goes_back(Decision(action, "w", PastIncident(cause, "f", 9, reached)), proven) is back
