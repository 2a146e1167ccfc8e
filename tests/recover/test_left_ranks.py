"""Ranks that an agent still has of an attempt that the supervisor has gone past."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unbroken.cluster import EndedProcesses
from unbroken.progress import RunDir
from unbroken.recover.node import census
from unbroken.recover.node.agent import Agent

UNPROVEN = EndedProcesses(proven=False, why="the small parent was killed")


def make_agent(tmp_path: Path, ended: EndedProcesses) -> tuple[Agent, list[str]]:
    """One with a rank of attempt 9; what is done to that."""
    done: list[str] = []

    def end_ranks(node: str, keep: object = ()) -> EndedProcesses:
        done.append("ended")
        return ended

    rank: Any = SimpleNamespace(
        rank=0, running=False, work=None, send=lambda sig: None, expire=lambda since: None, describe=dict,
        just_ended=lambda: False, sample=lambda now: None, close=lambda: done.append("closed"),
    )  # fmt: skip
    owner: Any = SimpleNamespace(end_ranks=end_ranks)
    agent = Agent(RunDir(tmp_path / "run"), "r", "n0", tmp_path / "scratch", 10.0, 1 << 20, owner)
    agent.attempt, agent.ranks = 9, {0: rank}
    return agent, done


@pytest.mark.parametrize(("asked", "ends"), [(8, False), (9, True), (10, True)])
def test_ranks_of_the_attempt_or_of_an_older_one_are_ended(tmp_path: Path, asked: int, ends: bool) -> None:
    """An agent that kept them for a stop of a later attempt refused every launch after it, and said that all was gone."""
    agent, done = make_agent(tmp_path, UNPROVEN)
    said = asyncio.run(agent._stop(asked, None, 0.0))
    assert (done == ["ended", "closed"]) == ends and bool(agent.ranks) != ends
    assert bool(said.get("proven", True)) != ends, "nothing was proven by ending them"


@pytest.mark.parametrize("survivors", [(), (77,)])
def test_ranks_ended_for_their_lease_are_in_no_ones_way(tmp_path: Path, survivors: tuple[int, ...]) -> None:
    ended = EndedProcesses(survivors, proven=False, why="the small parent was killed")
    agent, _ = make_agent(tmp_path, ended)
    agent._expire(time.monotonic())
    assert bool(agent.ranks) == bool(survivors)
    if not survivors:
        assert agent._cleared.why == "the small parent was killed", "the next hello says it"


def test_a_census_that_fails_is_logged_once_and_the_next_one_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(census, "_EVERY_S", 0.0)
    taken: list[str] = []

    def take_census(node: str) -> None:
        taken.append(node)
        if len(taken) < 4:
            raise RuntimeError("odd")

    async def work() -> None:
        task = asyncio.create_task(census.take_censuses(SimpleNamespace(take_census=take_census), "n0"))  # type: ignore[arg-type]
        async with asyncio.timeout(10):
            while len(taken) < 5 and not task.done():
                await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(work())
    assert len(taken) >= 5 and caplog.text.count("odd") == 1
