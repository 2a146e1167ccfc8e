"""The journal of the data never ends a training: what it cannot write is said once, and written when there is room."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from unbroken.data.journal import Journal, read
from unbroken.data.loading.loader import BatchRecord
from unbroken.journal import lines


def test_a_full_disk_costs_nothing_once_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path / "data")
    journal(BatchRecord(1, 0, ((0, 4),), 0, 1, 7))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m, caplog.at_level(logging.WARNING, "unbroken.data"):
        m.setattr(lines.Appender, "append", full)
        for step in (2, 3):
            journal(BatchRecord(step, 0, ((4 * step, 4 * step + 4),), 0, 1, 7))
    journal(BatchRecord(4, 0, ((16, 20),), 0, 1, 7))
    assert sorted(read(tmp_path / "data")) == [1, 2, 3, 4]
    assert [r.getMessage().split(":")[0] for r in caplog.records] == [
        "the journal of the data cannot have step 2 yet, and others maybe"
    ]


def test_what_waited_for_room_is_written_a_little_in_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "data")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(lines.Appender, "append", full)
        for step in range(1, 250):
            journal(BatchRecord(step, 0, ((4 * step, 4 * step + 4),), 0, 1, 7))
    found = []
    for step in range(250, 253):
        journal(BatchRecord(step, 0, ((4 * step, 4 * step + 4),), 0, 1, 7))
        found.append(len(read(tmp_path / "data")))
    assert found == [100, 200, 252]
