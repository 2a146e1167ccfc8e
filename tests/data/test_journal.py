"""The journal of the data never ends a training: what it cannot write is missing, and said once."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from unbroken.data.journal import Journal, read
from unbroken.data.loading.loader import BatchRecord
from unbroken.journal import lines


def test_a_full_disk_costs_lines_and_nothing_else(
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
    assert sorted(read(tmp_path / "data")) == [1, 4]
    assert [r.getMessage().split(":")[0] for r in caplog.records] == [
        "the journal of the data lacks step 2, and others maybe"
    ]
