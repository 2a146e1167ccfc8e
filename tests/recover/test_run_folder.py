"""What becomes of a run directory is noticed: deleted, moved, made again."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from unbroken.progress import RunDir
from unbroken.recover.supervise.record.run_folder import FolderLoss, RunFolderWatch
from unbroken.recover.supervise.record.term import TermWatch
from unbroken.testing.fake_cluster import SimulatedLoop
from unbroken.testing.fake_cluster.clock import run_simulated


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    made.term(1).write_text("{}")
    return made


def test_a_folder_that_is_there_is_well(run_dir: RunDir, tmp_path: Path) -> None:
    watch = RunFolderWatch(run_dir, 1)
    assert watch.poll() == watch.poll() and not watch.poll().lost and not watch.poll().trouble
    run_dir.path.rename(tmp_path / "moved")
    run_dir.path.symlink_to(tmp_path / "moved")
    assert not watch.poll().lost, "moved with a link in its place it is the same folder"


def test_deleted_moved_emptied_and_made_anew(run_dir: RunDir, tmp_path: Path) -> None:
    watch = RunFolderWatch(run_dir, 1)
    run_dir.path.rename(tmp_path / "moved")
    assert "was deleted or moved" in watch.poll().lost
    run_dir.create()
    assert "is another folder now" in watch.poll().lost
    shutil.rmtree(run_dir.path)
    (tmp_path / "moved").rename(run_dir.path)
    assert not watch.poll().lost, "moved back in time"
    os.unlink(run_dir.term(1))
    assert "what lay in" in watch.poll().lost


def test_one_that_is_full_or_read_only_is_in_trouble_and_not_lost(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = RunFolderWatch(run_dir, 1)
    real = os.statvfs(run_dir.path)

    class Full:
        f_flag, f_bavail, f_frsize = real.f_flag, 3, 4096

    class ReadOnly:
        f_flag, f_bavail, f_frsize = os.ST_RDONLY, 10**9, 4096

    for kind, words in ((Full, "is full"), (ReadOnly, "is read-only")):
        monkeypatch.setattr(os, "statvfs", lambda path, kind=kind: kind)
        assert words in watch.poll().trouble and not watch.poll().lost


def test_where_the_folder_is_gone_the_ranks_are_asked_to_stop_once(run_dir: RunDir, tmp_path: Path) -> None:
    said: list[str] = []
    stops: list[float] = []
    lost = FolderLoss("recorded")

    async def go(loop: SimulatedLoop) -> None:
        watch = RunFolderWatch(run_dir, 0)
        term = cast(TermWatch, SimpleNamespace(is_over=False))
        following = asyncio.create_task(
            lost.follow(watch, term, said.append, lambda: stops.append(loop.time()))
        )
        await asyncio.sleep(5)
        assert lost.why == "" and said == []
        run_dir.path.rename(tmp_path / "moved")
        await following
        assert loop.time() < 7

    run_simulated(go)
    assert "was deleted or moved" in lost.why and len(stops) == 1
    assert len(said) == 1 and "nothing can be recorded any more" in said[0]
