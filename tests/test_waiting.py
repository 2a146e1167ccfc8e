"""Waits with an end: cancelled, they end in time too."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

import unbroken
from unbroken.waiting import keep_following, run_beside, wait_within


def test_what_is_done_in_time_is_given() -> None:

    async def scenario() -> None:
        assert await wait_within(asyncio.sleep(0, "done"), 5) == "done"

    asyncio.run(scenario())


def test_following_begins_again_after_an_error_and_ends_when_there_is_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    left = [None, ValueError("torn"), OSError("away")]

    async def follow() -> None:
        if (error := left.pop()) is not None:
            raise error

    asyncio.run(keep_following(follow, 0.001, logging.getLogger("unbroken.test"), "what it says"))
    assert (
        not left
        and [r.getMessage() for r in caplog.records]
        == ["what it says could not be read; it is read again"] * 2
    )
    assert "torn" in caplog.text and "away" in caplog.text


def test_following_ends_where_it_is_cancelled() -> None:

    async def scenario() -> None:
        task = asyncio.ensure_future(
            keep_following(asyncio.Event().wait, 0.001, logging.getLogger("unbroken.test"), "")
        )
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())


def test_what_is_not_is_cancelled() -> None:

    async def scenario() -> None:
        future = asyncio.get_running_loop().create_future()
        with pytest.raises(TimeoutError):
            await wait_within(future, 0.01)
        assert future.cancelled()

    asyncio.run(scenario())


def test_a_cancellation_counts_that_comes_while_it_is_just_done() -> None:
    """`asyncio.wait_for` of Python 3.11 gives the result instead, and a loop of such waits goes on for ever."""

    async def scenario() -> None:
        moved = asyncio.Event()

        async def ask() -> None:
            while True:
                moved.clear()
                await wait_within(moved.wait(), 60)

        asking = asyncio.ensure_future(ask())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        moved.set()
        await asyncio.sleep(0)
        asking.cancel()
        done, _ = await asyncio.wait({asking}, timeout=1)
        assert done and asking.cancelled()

    asyncio.run(scenario())


def test_a_watch_that_fails_ends_what_relies_on_it() -> None:
    ended: list[str] = []

    async def wait(name: str) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(name)

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("a page that makes no sense")

    with pytest.raises(ValueError, match="makes no sense"):
        asyncio.run(run_beside(wait("work"), wait("another watch"), fail()))
    assert sorted(ended) == ["another watch", "work"]


def test_a_watch_that_is_done_ends_nothing_and_one_that_is_not_ends_with_the_work() -> None:
    ended: list[str] = []

    async def watch(seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            ended.append("watch")

    async def work() -> str:
        await asyncio.sleep(0.01)
        return "done"

    assert asyncio.run(run_beside(work(), watch(0.0), watch(60.0))) == "done"
    assert ended == ["watch", "watch"]


def test_nobody_waits_in_another_way() -> None:
    package = Path(unbroken.__file__).parent
    used = [p for p in package.rglob("*.py") if "asyncio.wait_for(" in p.read_text()]
    assert not used, "use unbroken.waiting.wait_within"
