"""A run goes on with other arguments: a live one at a step boundary, an ended one at its next start, in other sizes too."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from unbroken.cli.main import dispatch
from unbroken.errors import RunDirMismatch
from unbroken.progress import RunDir, read_spec
from unbroken.progress.records.amendment import describe_amendment, describe_difference
from unbroken.progress.records.state import RunState
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
