"""A run directory that was moved or copied has its checkpoints with it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from tests.support.checkpoints import save_small
from tests.support.run_folder import RunFolder
from unbroken.progress import RunDir, newest_place, read_journal
from unbroken.progress.records.state import RunState
from unbroken.recover.supervise.accept.placing import CheckpointPlace
from unbroken.status.gather import gather


def test_the_journal_names_no_place_for_the_runs_own_folder(tmp_path: Path) -> None:
    made = RunFolder(RunDir(tmp_path / "here"), nodes=1, nproc=1, spares=0)
    state = RunState()
    place = CheckpointPlace.__new__(CheckpointPlace)
    place._run_dir, place._state = made.run_dir, lambda: state
    assert asyncio.run(place.shorten(str(made.run_dir.checkpoints))) == ""
    assert asyncio.run(place.shorten(str(tmp_path / "elsewhere"))) == str(tmp_path / "elsewhere")


def test_what_was_accepted_is_found_where_the_run_is_now(tmp_path: Path) -> None:
    made = RunFolder(RunDir(tmp_path / "here"), nodes=1, nproc=1, spares=0)
    made.attempt()
    made.steps(10)
    name = save_small(made.run_dir.checkpoints, 9)
    made.record("accepted", number=1, checkpoints=[name], place="", before=2, source="an import")
    made.record("place", attempt=1, place="")
    made.end("interrupted")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    shutil.rmtree(tmp_path / "here")
    there = RunDir(tmp_path / "there")
    assert newest_place(there) == str(there.checkpoints)
    assert [c.name for c in gather(there).checkpoints] == [name]
    state = RunState.of(read_journal(there).records)
    place = CheckpointPlace.__new__(CheckpointPlace)
    place._run_dir, place._state = there, lambda: state
    assert [b.place for b in place.brought()] == [str(there.checkpoints)]
