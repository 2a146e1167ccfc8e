"""The journal of the data never ends a training: what it cannot write is said once, and written when there is room."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unbroken.data import journal as journal_module
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


def batch(step: int, rank: int = 0) -> BatchRecord:
    return BatchRecord(step, 0, ((8 * step + 4 * rank, 8 * step + 4 * rank + 4),), rank, 2, 7)


@pytest.fixture
def journal_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Journal]:
    """The journal of a rank of such an attempt of a run, on a node with memory."""
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv("UNBROKEN_PAGE", str(memory / "rank-0.page"))

    def make(attempt: int) -> Journal:
        run = SimpleNamespace(active=True, attempt=attempt, run_dir=tmp_path / "run")
        monkeypatch.setattr(journal_module, "attach", lambda: run)
        return Journal(tmp_path / "data")

    return make


def test_lines_of_a_rank_that_was_killed_before_there_was_room_are_written_by_the_next(
    journal_of: Callable[[int], Journal], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its snapshot lives in the node's memory, and the run goes on from it: its steps count."""
    append, data, memory = lines.Appender.append, tmp_path / "data", tmp_path / "memory"

    def full(self: lines.Appender, *args: Any, **kwargs: Any) -> Any:
        if self.path.parent == data:
            raise OSError(28, "No space left on device")
        return append(self, *args, **kwargs)

    ranks = [journal_of(1), journal_of(1)]
    for rank, journal in enumerate(ranks):
        journal(batch(1, rank))
    with monkeypatch.context() as m:
        m.setattr(lines.Appender, "append", full)
        for step in range(2, 130):
            for rank, journal in enumerate(ranks):
                journal(batch(step, rank))
    # There is room: some lines are written, then one rank is killed; the other has time for all of its own.
    ranks[0](batch(130, 0))
    for step in (130, 131):
        ranks[1](batch(step, 1))
    assert len([*memory.glob("data.*")]) == 1, "what is written is not kept any longer"
    with monkeypatch.context() as m:
        m.setattr(lines.Appender, "append", full)
        later = journal_of(2)
        later(batch(131, 0))
    later(batch(132, 0))
    assert [*memory.glob("data.*")] == []
    found = read(data)
    assert sorted(found) == [*range(1, 133)]
    assert all(found[s].whole and found[s].digest == 14 for s in range(1, 131)), "each line counts once"


def test_micro_batches_journals_and_a_second_death_lose_no_line(
    journal_of: Callable[[int], Journal], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has two lines, a script two journals, and whoever writes what was left is killed at it."""
    append, write = lines.Appender.append, journal_module.Leftovers._write
    folders = [tmp_path / "data", tmp_path / "other"]

    def half(folder: Path, after: int) -> Any:
        room = [after]

        def full(self: lines.Appender, *args: Any, **kwargs: Any) -> Any:
            if self.path.parent == folder:
                room[0] -= 1
                if room[0] < 0:
                    raise OSError(28, "No space left on device")
            return append(self, *args, **kwargs)

        return full

    def micro(step: int, n: int) -> BatchRecord:
        return BatchRecord(step, 0, ((8 * step + 4 * n, 8 * step + 4 * n + 4),), 0, 1, 7)

    first = [journal_of(1), Journal(folders[1])]
    with monkeypatch.context() as m:
        m.setattr(lines.Appender, "append", half(folders[0], 1))
        for n in (0, 1):
            first[0](micro(1, n))  # one of its two lines finds room
            first[1](micro(1, n))
    second = [journal_of(2), Journal(folders[1])]

    def killed(self: journal_module.Leftovers, path: Path, attempt: int, rank: int) -> None:
        monkeypatch.setattr(lines, "records", die)
        write(self, path, attempt, rank)

    def die(path: Path) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(journal_module.Leftovers, "_write", killed)
        with pytest.raises(KeyboardInterrupt):
            second[0](micro(2, 0))
        second[1](micro(2, 0))
    monkeypatch.undo()
    monkeypatch.setenv("UNBROKEN_PAGE", str(tmp_path / "memory" / "rank-0.page"))
    third = journal_of(3)
    third(micro(3, 0))
    for folder, steps in zip(folders, ([1, 2, 3], [1, 2]), strict=True):
        found = read(folder)
        assert sorted(found) == steps and found[1].samples == ((8, 16),) and found[1].digest == 14
    assert [*(tmp_path / "memory").glob("data.*")] == []
