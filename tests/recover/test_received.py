"""What an agent says: each message that ours send is let through, what the supervisor cannot read is not."""

from __future__ import annotations

from typing import Any

import pytest

from unbroken.link.bounds import Malformed
from unbroken.progress.records.state import RunState
from unbroken.recover.supervise.nodes.received import check, hello


def keeper(**event: Any) -> dict[str, Any]:
    return {"op": "keeper", **event}


@pytest.mark.parametrize(
    "event",
    [
        keeper(event="restored", attempt=1, step=None, of=None, skipped=[["step-00000041.a0001", "damaged"]]),
        keeper(event="restored", attempt=2, step=40, of=1, skipped=[]),
        keeper(event="host", attempt=1, step=5, rank=1),
        keeper(event="durable", attempt=1, step=5, seconds=0.1),
        keeper(event="failed", attempt=1, step=5, rank=-1, why="no room"),
        keeper(event="remote_failed", attempt=1, step=5, rank=-1, why="no bucket"),
        keeper(event="waiting", attempt=1, step=5, why="no room", seconds=3.0),
        keeper(event="keeper_lost"),
        keeper(event="of a later version", attempt=None, step=None, rank=None),
    ],
    ids=lambda e: e["event"],
)
def test_what_a_keeper_says_is_let_through(event: dict[str, Any]) -> None:
    assert check(event, 2) == event


@pytest.mark.parametrize(
    "event",
    [
        keeper(event="host", attempt=1, step=5),
        keeper(event="host", attempt=1, step=5, rank=2),
        keeper(event="durable", attempt=1, step=None),
        keeper(event="failed", attempt=1, step=-1, rank=0),
        keeper(event="restored", attempt=None, step=4),
        keeper(event="waiting", attempt=1),
        keeper(event="place"),
    ],
)
def test_what_the_supervisor_could_not_read_is_not(event: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        check(event, 2)


def test_a_node_that_was_cut_off_may_tell_of_ranks_that_are_no_more() -> None:
    """The run went on with fewer nodes meanwhile; its agent is to come in all the same."""
    running = {"pid": 1, "running": True}
    message = {"op": "hello", "node": "n3", "attempt": 1, "ranks": {"2": running}}
    assert hello(message) is message
    with pytest.raises(Malformed):
        hello(message | {"ranks": {"-2": running}})


def test_the_most_ranks_of_a_run_are_known_from_its_journal() -> None:
    run = {"kind": "run", "t": 0.0, "command": ["a"], "nodes": 3, "nproc": 2}
    fewer = {"kind": "amended", "command": ["a"], "nodes": 2, "nproc": 2}
    state = RunState.of([run, fewer])
    assert (state.nodes, state.most_ranks) == (2, 6)


def test_whether_the_kernel_killed_a_rank_is_said_by_yes_or_no() -> None:
    end = {"op": "exited", "attempt": 1, "rank": 0, "code": None, "signal": 9, "time": 1.0, "ours": False}
    for told in ({}, {"oom": None}, {"oom": True, "oom_counted": True}, {"oom": False, "oom_counted": False}):
        assert check(end | told, 2)
    for told in ({"oom": 1}, {"oom": "yes"}, {"oom": True, "oom_counted": None}):
        with pytest.raises(Malformed):
            check(end | told, 2)
