"""The breaker's list on placement: one folder under several launchers, several runs, several ranks, other folders."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from unbroken.checkpoint.catalogue import contents as catalogue
from unbroken.progress import read_journal

from .breakers import Stage, combinations
from .conftest import run_json

pytestmark = [pytest.mark.breakers, pytest.mark.integration]


def journal(stage: Stage, kind: str) -> list[dict[str, Any]]:
    return [r for r in read_journal(stage.run_dir).records if r["kind"] == kind]


@combinations(places=("own", "store"), launchers=("torchrun", "alone"))
def test_a_training_changes_its_launcher_and_loses_nothing(stage: Stage) -> None:
    """Alone or under torchrun, then under `unbroken run`, then back again: always from the last checkpoint."""
    first = stage.launcher
    stage.start().until_durable(10)
    assert stage.stop() == 0
    before = {f.name for f in catalogue.listing(stage.storage()) if f.committed}
    for launcher in ("run", first, "run"):
        stage.launcher = launcher
        last = max(stage.durable())
        starts = len(stage.restored())
        stage.start().until(lambda n=starts: len(stage.restored()) > n, f"a start under {launcher}")  # type: ignore[misc]
        assert stage.restored()[-1][0] == last, stage.story()
        stage.until_durable(last + 10)
        assert stage.stop() == (11 if launcher == "run" else 0), stage.story()
        if (
            launcher == "run"
        ):  # what was there before the run; without a supervisor `keep` counts all that is there
            assert before <= {f.name for f in catalogue.listing(stage.storage()) if f.committed}
        before = set()
    committed = [f for f in catalogue.listing(stage.storage()) if f.committed]
    assert max(f.attempt for f in committed) >= 4 and "new number" in stage.output
    assert len(journal(stage, "incident")) == 0


@combinations(places=("own",), launchers=("run",))
def test_commands_that_read_a_run_find_its_own_folder(stage: Stage) -> None:
    stage.start().until_durable(10)
    assert stage.stop() == 11
    last = max(stage.durable())
    listed = run_json("checkpoint", "ls", "run", cwd=stage.folder)
    assert listed["place"] == str(stage.folder / "checkpoints")
    assert listed["checkpoints"][0]["step"] == last
    status = run_json("status", "run", cwd=stage.folder)
    assert str(last) in str(status), status


@combinations(places=("own",), launchers=("run",))
def test_two_runs_in_one_folder(stage: Stage) -> None:
    """While one has not ended the other is refused at its first call; afterwards it goes on from what is accepted."""
    stage.steps = 2000
    stage.start().until_durable(10)
    other = Stage(stage.folder, "own", "run")
    other.run_name, other.steps = "other", 5000  # on a slow machine the first one is far ahead when it comes
    try:
        other.start()
        assert other.wait() == 10, other.story()
        assert "another run uses this folder" in other.output and str(stage.run_dir.path) in other.output
        assert stage.process is not None and stage.process.poll() is None
        assert stage.stop() == 11
        last, starts = max(stage.durable()), len(stage.restored())
        shutil.rmtree(other.run_dir.path)
        other.start().until(lambda: len(stage.restored()) > starts, "the other's start")
        assert stage.restored()[-1][0] == last
        other.until_durable(last + 10)
        assert other.stop() == 11
        stage.start()
        assert stage.wait() == 10
        assert "gone on in this folder" in stage.output and "--from" in stage.output
    finally:
        with contextlib.suppress(Exception):
            other.end()


@combinations(places=("own",), launchers=("run",), thin=())
def test_a_run_that_is_deleted_and_given_again_goes_on_from_its_folder(stage: Stage) -> None:
    stage.start().until_durable(10)
    assert stage.stop() == 11
    last = max(stage.durable())
    shutil.rmtree(stage.run_dir.path)
    stage.start().until(lambda: len(stage.restored()) > 1, "a second start")
    assert stage.restored()[1][0] == last, stage.story()


@combinations(places=("own",), launchers=("run", "torchrun"))
def test_ranks_that_name_different_folders_are_refused(stage: Stage) -> None:
    script = (stage.folder / "train.py").read_text().replace("[folder]", '[f"{folder}-{rank}"]')
    (stage.folder / "train.py").write_text(script)
    stage.ranks = 2
    stage.start()
    assert stage.wait() != 0
    assert "the ranks name different folders" in stage.story()
    assert not list(stage.folder.glob("checkpoints-*/step-*"))


@combinations(places=("own",), launchers=("run",))
def test_a_script_that_names_another_folder_goes_on_and_writes_there(stage: Stage) -> None:
    stage.start().until_durable(10)
    assert stage.stop() == 11
    last, before = max(stage.durable()), sorted(p.name for p in (stage.folder / "checkpoints").glob("step-*"))
    script = (stage.folder / "train.py").read_text().replace("[folder]", '["elsewhere"]')
    (stage.folder / "train.py").write_text(script)
    stage.start().until(lambda: len(stage.restored()) > 1, "a second start")
    assert stage.restored()[1][0] == last, stage.story()
    stage.until(lambda: list((stage.folder / "elsewhere").glob("step-*/COMMITTED")), "a checkpoint elsewhere")
    assert stage.stop() == 11
    assert sorted(p.name for p in (stage.folder / "checkpoints").glob("step-*")) == before
    newest = run_json("checkpoint", "ls", "run", cwd=stage.folder)
    assert newest["place"] == str(stage.folder / "elsewhere")


@combinations(places=("own",), launchers=("run", "alone"))
def test_a_folder_that_cannot_be_one_is_said_in_words(stage: Stage) -> None:
    (stage.folder / "checkpoints").symlink_to(Path("nowhere"))
    stage.start()
    assert stage.wait() != 0
    assert "link to nowhere, which does not exist" in stage.story()
