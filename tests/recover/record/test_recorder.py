"""What a supervisor writes down where that takes the time of a network."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from unbroken.progress import RunDir
from unbroken.progress.records.state import RunState
from unbroken.recover.supervise.record.clock import Clock
from unbroken.recover.supervise.record.recorder import Recorder
from unbroken.recover.supervise.record.stop_request import StopRequest


class SlowJournal:
    """Takes a record only once it is `let`."""

    slow = True

    def __init__(self, refuses: bool = False) -> None:
        self.begun, self.let, self.kinds, self._refuses = (
            threading.Event(),
            threading.Event(),
            list[str](),
            refuses,
        )

    def append(self, kind: str, **fields: Any) -> dict[str, Any]:
        if self._refuses:
            raise OSError(5, "it refuses")
        self.kinds.append(kind)
        self.begun.set()
        assert kind != "first" or self.kinds.count(kind) > 1 or self.let.wait(20)
        return {"kind": kind, "t": 0.0, **fields}

    def close(self) -> None: ...


def make_recorder(folder: Path, journal: SlowJournal) -> Recorder:
    clock = Clock()
    stop = StopRequest(clock, asyncio.Event())
    return Recorder(RunDir(folder), journal, RunState(), stop, lambda _: None, clock, 1.0)


def test_news_that_is_being_written_at_the_end_is_there_once(tmp_path: Path) -> None:
    async def end_meanwhile() -> list[str]:
        journal = SlowJournal()
        recorder = make_recorder(tmp_path, journal)
        await recorder.record_soft("first")
        await recorder.record_soft("second")
        await asyncio.to_thread(journal.begun.wait, 20)
        recorder.close()
        journal.let.set()
        return journal.kinds

    assert asyncio.run(end_meanwhile()) == ["first", "second"]


def test_news_that_is_lost_at_the_end_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def end() -> None:
        recorder = make_recorder(tmp_path, SlowJournal(refuses=True))
        await recorder.record_soft("first")
        recorder.close()

    asyncio.run(end())
    assert "the last 1 pieces of news are not in the run's record" in caplog.text
