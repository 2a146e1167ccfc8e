"""The contract of placement: numbers are never used twice, living runs are refused, what lay there is taken over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from unbroken.checkpoint.capture.direct import Stamp, commit, write_rank
from unbroken.checkpoint.catalogue.placement import (
    claim,
    claims,
    next_number,
    place_of,
    refuse_supervised,
    same_place,
    survey,
)
from unbroken.checkpoint.catalogue.retention import Retention, apply
from unbroken.checkpoint.storage import open_storage
from unbroken.errors import StorageError, UsageError
from unbroken.progress import JournalWriter, RunDir, RunSpec, write_spec
from unbroken.progress.terms import claim as claim_epoch


def saved(folder: Path, step: int, attempt: int) -> str:
    storage = open_storage(folder)
    stamp = Stamp("test", attempt, step)
    commit(storage, [write_rank(storage, {"w": torch.full((3,), float(step))}, stamp)])
    return stamp.folder


def a_run(folder: Path, *, ended: str | None = None, seals: dict[int, list[str]] | None = None) -> RunDir:
    """A run directory with a journal, of a run that goes on or has ended."""
    run_dir = RunDir(folder)
    run_dir.create()
    write_spec(run_dir, RunSpec(("train.py",), folder.name))
    claim_epoch(run_dir, 1, run_id=folder.name, address=("127.0.0.1", 1), sealed={})
    journal = JournalWriter(run_dir, 1)
    journal.append("epoch", host="h", pid=1)
    for attempt, names in (seals or {}).items():
        journal.append("seal", attempt=attempt, checkpoints=names)
    if ended:
        journal.append("status", status=ended)
    journal.close()
    return run_dir


def test_one_place_has_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert place_of("real", None) == str(tmp_path / "real") == place_of(f"file://{tmp_path}/real", None)
    assert place_of(None, tmp_path) == str(tmp_path / "checkpoints")
    assert same_place(str(tmp_path / "real"), str(tmp_path / "x" / ".." / "link"))
    assert same_place("s3://b/p", "s3://b/p/") and not same_place("s3://b/p", "/p")
    with pytest.raises(UsageError, match="no folder"):
        place_of(None, None)
    with pytest.raises(UsageError, match="empty"):
        place_of("", tmp_path)


def test_what_can_be_no_folder_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").write_text("x")
    for name, why in [("dangling", "link to nowhere, which does not exist"), ("file", "not a folder"),
                      ("file/below", "would lie in a file"), ("dangling/below", "link to nowhere")]:  # fmt: skip
        with pytest.raises(StorageError, match=why):
            place_of(tmp_path / name, None)


def test_a_number_is_never_used_twice(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    saved(tmp_path, 5, 3)  # of a version that claimed nothing
    assert next_number(storage) == 4
    assert claim(storage, 4, "alone") and not claim(storage, 4, "run", run_id="r")
    (tmp_path / "attempts" / "00000009").write_bytes(b"claimed\n")
    assert next_number(storage) == 10 and next_number(storage, above=20) == 21
    found = claims(storage)
    assert (found[4].kind, found[9].kind) == ("alone", "unknown")
    assert found[4].host and found[4].started > 0


def test_a_run_takes_over_what_lies_there(tmp_path: Path) -> None:
    old, alone, mine = saved(tmp_path, 5, 1), saved(tmp_path, 9, 2), saved(tmp_path, 12, 3)
    storage = open_storage(tmp_path)
    claim(storage, 2, "alone")
    claim(storage, 3, "run", run_id="me", run_dir=str(tmp_path))
    found = survey(storage, run_id="me", mine=())
    assert found.others == {1: (old,), 2: (alone,)} and found.highest == 2
    assert "without a supervisor" in found.where_from
    assert mine not in {n for names in found.others.values() for n in names}


def test_a_run_that_has_not_ended_is_never_joined(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "c")
    other = a_run(tmp_path / "other")
    claim(storage, 1, "run", run_id="other", run_dir=str(other.path))
    with pytest.raises(UsageError, match="has not ended"):
        survey(storage, run_id="me", mine=())
    with pytest.raises(UsageError, match="has not ended"):
        refuse_supervised(storage, storage.url)
    assert survey(storage, run_id="other", mine=()).others == {}  # it is its own place


def test_of_an_ended_run_only_what_it_accepted_counts(tmp_path: Path) -> None:
    good, late = saved(tmp_path / "c", 5, 1), saved(tmp_path / "c", 6, 1)
    other = a_run(tmp_path / "other", ended="interrupted", seals={1: [good]})
    storage = open_storage(tmp_path / "c")
    claim(storage, 1, "run", run_id="other", run_dir=str(other.path))
    assert survey(storage, run_id="me", mine=()).others == {1: (good,)}
    refuse_supervised(storage, storage.url)
    assert late in storage.folders()


def test_a_run_does_not_come_back_to_a_place_that_another_went_on_in(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "c")
    first, second = a_run(tmp_path / "first", ended="stopped"), a_run(tmp_path / "second", ended="completed")
    claim(storage, 1, "run", run_id="first", run_dir=str(first.path))
    claim(storage, 2, "run", run_id="second", run_dir=str(second.path))
    with pytest.raises(UsageError, match="gone on in this folder"):
        survey(storage, run_id="first", mine=())
    assert survey(storage, run_id="second", mine=()).highest == 1


def test_retention_spares_what_was_there_before(tmp_path: Path) -> None:
    before = [saved(tmp_path, 100 + i, 1) for i in range(3)]
    mine = [saved(tmp_path, i, 4) for i in range(1, 6)]
    outcome = apply(open_storage(tmp_path), Retention(2, spare_below=4), verified=mine)
    assert set(outcome.removed) == set(mine[:3])
    assert set(before) | set(mine[3:]) == {n for n in os.listdir(tmp_path) if n.startswith("step")}
