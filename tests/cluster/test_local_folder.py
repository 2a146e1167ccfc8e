"""A run's volatile folder stays while a supervisor uses it, and goes when nothing of the run is left."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from unbroken.cluster import local_folder
from unbroken.cluster.local_folder import RECORD, forget_run, hold_run


def test_what_a_supervisor_holds_is_not_forgotten(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with hold_run(root):
        (root / RECORD).write_text("{}")
        (root / "supervisor-1.sock").touch()  # bound, and not listening yet
        forget_run(root)
        assert {p.name for p in root.iterdir()} == {RECORD, "supervisor-1.sock"}
        with hold_run(root):  # a standby supervisor's
            pass
        forget_run(root)
        assert (root / RECORD).exists()
    forget_run(root)
    assert not root.exists()
    forget_run(root)


def test_a_folder_that_goes_just_as_it_is_taken_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, real, gone = tmp_path / "run", fcntl.flock, []

    def flock(held: int, how: int) -> None:
        if not gone:
            gone.append(root)
            os.rmdir(root)
        real(held, how)

    monkeypatch.setattr(local_folder.fcntl, "flock", flock)
    with hold_run(root):
        assert gone and root.is_dir()


def test_many_that_come_and_go_at_once(tmp_path: Path) -> None:
    root, ended = tmp_path / "run", threading.Event()

    def forget() -> None:
        while not ended.is_set():
            forget_run(root)

    forgetting = threading.Thread(target=forget)
    forgetting.start()
    try:
        for _ in range(300):
            with hold_run(root):
                (root / RECORD).write_text("{}")
                assert (root / RECORD).exists() and root.is_dir()
    finally:
        ended.set()
        forgetting.join()
