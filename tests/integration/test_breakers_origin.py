"""The breaker's list on what comes from elsewhere: imports, and `unbroken run --from`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .breakers import Stage, combinations

pytestmark = [pytest.mark.breakers, pytest.mark.integration]


def imported(stage: Stage, to: str, step: int) -> subprocess.CompletedProcess[str]:
    torch.save({"w": torch.full((4,), float(step)), "step": step}, stage.folder / "other.pt")
    torch.save({"w": torch.full((4,), float(step))}, stage.folder / "other.pt")
    return subprocess.run(
        [sys.executable, "-m", "unbroken", "checkpoint", "import", "other.pt", "--to", to, "--step", str(step)],
        cwd=stage.folder, capture_output=True, text=True, check=False, env=None,
    )  # fmt: skip


@combinations(places=("own", "run"), thin=(("run", "run"),))
def test_a_training_goes_on_from_an_import_into_a_fresh_folder(stage: Stage) -> None:
    to = "run" if stage.place == "run" else "checkpoints"
    done = imported(stage, to, 300)
    assert done.returncode == 0, done.stderr
    stage.start().until(lambda: stage.restored(), "a start")
    assert stage.restored()[0] == (300, "disk"), stage.story()
    stage.until_durable(320)
    assert 300 in stage.durable()


@combinations(places=("own", "run"), launchers=("run", "alone"))
def test_a_stopped_training_goes_on_from_an_import_also_of_an_earlier_step(stage: Stage) -> None:
    stage.start().until_durable(20)
    stage.stop()
    done = imported(stage, "run" if stage.launcher == "run" else "checkpoints", 7)
    assert done.returncode == 0, done.stderr
    stage.start().until(lambda: len(stage.restored()) > 1, "a second start")
    assert stage.restored()[1] == (7, "disk"), stage.story()
    stage.until(lambda: stage.step() >= 15, "it goes on")
    stage.stop()
    stage.start().until(lambda: len(stage.restored()) > 2, "a third start")
    assert stage.restored()[2][0] >= 15, stage.story()


@combinations(places=("own", "run"), launchers=("run",), thin=(("own", "run"),))
def test_a_new_run_from_another_runs_directory(stage: Stage) -> None:
    stage.start().until_durable(10)
    stage.stop()
    last = max(stage.durable())
    if stage.place == "own":  # its own folder is another one, or it would go on there by itself
        text = (stage.folder / "train.py").read_text().replace("[folder]", '["second"]')
        (stage.folder / "train.py").write_text(text)
    stage.run_name, stage.options = "new", ["--from", "run"]
    stage.start().until(lambda: len(stage.restored()) > 1, "the new run's start")
    assert stage.restored()[1] == (last, "disk"), stage.story()
    stage.kill_everything()
    shutil.rmtree(stage.folder / "run")
    stage.start().until(lambda: len(stage.restored()) > 2, "the same command again")
    assert stage.restored()[2][0] >= last, stage.story()


@combinations(places=("run",), launchers=("run",))
def test_what_cannot_be_a_start_is_refused_before_anything_starts(stage: Stage) -> None:
    (Path(stage.folder) / "bad").write_text("no checkpoint")
    stage.options = ["--from", "bad"]
    assert stage.start().wait() == 3, stage.story()
    assert not stage.run_dir.path.exists() and "torch cannot read it" in stage.output
