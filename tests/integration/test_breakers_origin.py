"""The breaker's list on what comes from elsewhere: imports, and `unbroken run --from`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from .breakers import Stage, combinations
from .conftest import run_json

pytestmark = [pytest.mark.breakers, pytest.mark.integration]


def imported(stage: Stage, to: str, step: int) -> subprocess.CompletedProcess[str]:
    torch.save({"w": torch.full((4,), float(step))}, stage.folder / "other.pt")
    return subprocess.run(
        [sys.executable, "-m", "unbroken", "checkpoint", "import", "other.pt", "--to", to, "--step", str(step)],
        cwd=stage.folder, capture_output=True, text=True, check=False, env=None,
    )  # fmt: skip


@combinations(places=("own", "run"))
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
    since = len(stage.said("STEP"))  # the last step that it said may still be one before the import
    stage.until(lambda: len(stage.said("STEP")) > since + 8 and stage.step() >= 15, "it goes on")
    told = len(stage.output)
    stage.stop()
    if stage.launcher == "run":
        assert f"the run is interrupted at step {stage.step()}, newest" in stage.output[told:], stage.story()
    stage.start().until(lambda: len(stage.restored()) > 2, "a third start")
    assert stage.restored()[2][0] >= 15, stage.story()


@combinations(places=("own", "run"), launchers=("run",))
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


def as_dcp(folder: Path, step: int) -> str:
    from torch.distributed import checkpoint as dcp

    dcp.save({"w": torch.full((4,), float(step)), "step": step}, checkpoint_id=folder / "dcp")
    return "dcp"


def as_torch_save(folder: Path, step: int) -> str:
    torch.save({"w": torch.full((4,), float(step)), "step": step}, folder / "other.pt")
    return "other.pt"


def as_safetensors(folder: Path, step: int) -> str:
    from safetensors.torch import save_file

    save_file({"w": torch.full((4,), float(step))}, folder / "model.safetensors")
    return "model.safetensors"


@combinations(places=("own", "run", "store"), launchers=("run",))
@pytest.mark.parametrize("save", [as_dcp, as_torch_save, as_safetensors])
def test_a_run_from_what_others_saved_goes_on_after_any_death_and_without_the_source(
    stage: Stage, save: Callable[[Path, int], str]
) -> None:
    step = 0 if save is as_safetensors else 40  # safetensors do not say their step
    if save is as_safetensors:  # it holds a model
        text = (
            (stage.folder / "train.py")
            .read_text()
            .replace('{"w": torch.zeros(4)}', '{"model": {"w": torch.zeros(4)}}')
        )
        (stage.folder / "train.py").write_text(text.replace('state["w"]', 'state["model"]["w"]'))
    source = stage.folder / save(stage.folder, step)
    stage.options, stage.ranks = ["--from", source.name], 2
    stage.start().until(stage.restored, "a start")
    assert stage.restored()[0][0] == step, stage.story()
    (shutil.rmtree if source.is_dir() else Path.unlink)(source)  # type: ignore[operator]
    told = run_json("status", "run", cwd=stage.folder)
    assert told["started_from"] == f"{source}, step {step}"
    stage.kill_everything()
    stage.start().until(lambda: len(stage.restored()) > 1, "the same command again")
    assert stage.restored()[1][0] >= step
    stage.until_durable(step + 10)
    assert stage.stop() == 11
    last = max(stage.durable())
    stage.start().until(lambda: len(stage.restored()) > 2, "a third start")
    assert stage.restored()[2][0] == last > step, stage.story()


@combinations(places=("own", "run"), launchers=("run",))
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_from_one_of_another_size(stage: Stage, before: int, after: int) -> None:
    stage.ranks = before
    stage.start().until_durable(10)
    assert stage.stop() == 11
    last = max(stage.durable())
    stage.run_name, stage.options, stage.ranks = "new", ["--from", "run"], after
    stage.start().until(lambda: len(stage.restored()) > 1, "the new run's start")
    assert stage.restored()[1][0] == last, stage.story()
    stage.kill_ranks()
    stage.until(lambda: len(stage.restored()) > 2, "a second attempt")
    assert stage.restored()[2][0] >= last, stage.story()
    stage.until_durable(last + 10)


@combinations(places=("own", "store"), launchers=("run",))
def test_from_is_meant_also_where_the_folder_of_the_script_holds_newer_ones(stage: Stage) -> None:
    """An explicit start wins over what lies about; what the run makes itself wins over both."""
    stage.start().until_durable(20)
    assert stage.stop() == 11
    as_torch_save(stage.folder, 7)
    stage.run_name, stage.options = "new", ["--from", "other.pt"]
    stage.start().until(lambda: len(stage.restored()) > 1, "the new run's start")
    assert stage.restored()[1][0] == 7, stage.story()
    assert "starts from" in stage.output and "all the same" in stage.output
    since = len(stage.said("STEP"))
    stage.until(lambda: len(stage.said("STEP")) > since + 8, "it goes on")
    assert stage.stop() == 11
    last = stage.step()
    stage.start().until(lambda: len(stage.restored()) > 2, "the same command again")
    assert stage.restored()[2][0] == last, stage.story()
