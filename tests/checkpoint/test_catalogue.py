"""What lies in a folder is told as it is: whole, unfinished, damaged, too new, and why."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import flip_bit, save_small
from unbroken.checkpoint.capture import direct
from unbroken.checkpoint.catalogue import contents as catalogue
from unbroken.checkpoint.format.manifest import COMMITTED, MANIFEST, data_name, part_name
from unbroken.checkpoint.storage.posix import PosixStorage
from unbroken.errors import CheckpointCorrupt, CheckpointError, NoCheckpoint
from unbroken.journal import checksummed


def test_a_whole_one(tmp_path: Path) -> None:
    name = save_small(tmp_path, 12)
    (found,) = catalogue.listing(PosixStorage(tmp_path))
    assert (found.name, found.step, found.attempt, found.status) == (name, 12, 1, "committed")
    assert (found.world_size, found.samples, found.files, found.level) == (2, 12, 6, "disk")
    assert found.bytes == sum(p.stat().st_size for p in (tmp_path / name).iterdir())
    result = catalogue.verify(tmp_path / name)
    assert result.ok
    assert result.deep
    assert result.bytes == 2 * (4096 + 1208)
    assert catalogue.newest(PosixStorage(tmp_path)).name == name


def test_the_order_is_attempt_then_step(tmp_path: Path) -> None:
    names = [save_small(tmp_path, 800, 1), save_small(tmp_path, 1000, 1), save_small(tmp_path, 900, 2)]
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-12").mkdir()
    listed = [f.name for f in catalogue.listing(PosixStorage(tmp_path))]
    assert listed == [names[2], names[1], names[0]]
    assert catalogue.newest(PosixStorage(tmp_path)).step == 900, (
        "what attempt 2 saved supersedes the spike of 1"
    )


def test_none_at_all(tmp_path: Path) -> None:
    assert catalogue.listing(PosixStorage(tmp_path / "nowhere")) == []
    with pytest.raises(NoCheckpoint, match="holds none"):
        catalogue.newest(PosixStorage(tmp_path))


DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no marker": (lambda d: (d / COMMITTED).unlink(), "incomplete", "no commit marker"),
    "torn marker": (lambda d: os.truncate(d / COMMITTED, 40), "damaged", "checksum"),
    "empty marker": (lambda d: os.truncate(d / COMMITTED, 0), "damaged", "torn"),
    "huge marker": (lambda d: (d / COMMITTED).write_bytes(bytes(2**20)), "damaged", "too many"),
    "no manifest": (lambda d: (d / MANIFEST).unlink(), "damaged", "manifest is missing"),
    "torn manifest": (lambda d: os.truncate(d / MANIFEST, 200), "damaged", "not the one that was committed"),
    "flipped manifest": (lambda d: flip_bit(d / MANIFEST, 300), "damaged", "not the one that was committed"),
    "no part": (lambda d: (d / part_name(1)).unlink(), "damaged", "rank-00001.json is missing"),
    "no data": (lambda d: (d / data_name(1)).unlink(), "damaged", "rank-00001.safetensors is missing"),
    "short data": (
        lambda d: os.truncate(d / data_name(1), 5000),
        "damaged",
        "has 5000 bytes, 5304 were committed",
    ),
    "long data": (lambda d: os.truncate(d / data_name(0), 9999), "damaged", "has 9999 bytes"),
    # What a listing does not read, verifying finds:
    "flipped data": (lambda d: flip_bit(d / data_name(0), -1), "committed", "checksum"),
    "flipped header": (lambda d: flip_bit(d / data_name(0), 9), "committed", "rank-00000.safetensors"),
    "flipped padding": (lambda d: flip_bit(d / data_name(0), 4000), "committed", "rank-00000.safetensors"),
    "flipped part": (lambda d: flip_bit(d / part_name(0), 100), "committed", "checksum"),
    "another rank's part": (
        lambda d: shutil.copy(d / part_name(0), d / part_name(1)),
        "committed",
        "part of rank 0",
    ),
    "a fifo for data": (
        lambda d: ((d / data_name(0)).unlink(), os.mkfifo(d / data_name(0))),
        "damaged",
        "missing",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_and_the_older_one_taken(tmp_path: Path, kind: str) -> None:
    good, name = save_small(tmp_path, 10), save_small(tmp_path, 20)
    harm, status, why = DAMAGE[kind]
    harm(tmp_path / name)
    found = next(f for f in catalogue.listing(PosixStorage(tmp_path)) if f.name == name)
    assert found.status == status
    result = catalogue.verify(tmp_path / name)
    assert not result.ok
    told = found.why if status != "committed" else str(result.problems[0])
    assert why in told, told
    assert catalogue.newest(PosixStorage(tmp_path)).name == good


def test_files_of_two_saves_do_not_mix(tmp_path: Path) -> None:
    """The same layout, both whole: a part, a data file or a manifest of another save is still found."""
    one, two = save_small(tmp_path, 10), save_small(tmp_path, 20)
    for file in (part_name(0), data_name(0), MANIFEST, COMMITTED):
        kept = (tmp_path / two / file).read_bytes()
        shutil.copy(tmp_path / one / file, tmp_path / two / file)
        assert not catalogue.verify(tmp_path / two).ok, file
        (tmp_path / two / file).write_bytes(kept)
    assert catalogue.verify(tmp_path / two).ok
    shutil.copytree(tmp_path / one, tmp_path / "step-00000030.a0001")
    assert not catalogue.verify(tmp_path / "step-00000030.a0001").ok, "a renamed folder is not another step"


def test_a_newer_version_is_no_damage(tmp_path: Path) -> None:
    name = save_small(tmp_path, 10)
    marker = json.loads((tmp_path / name / COMMITTED).read_bytes())
    body = {k: v for k, v in marker.items() if k not in ("check", "kind", "schema")}
    data = checksummed.encode_checked("unbroken.checkpoint.committed", body).replace(
        b'"schema":1', b'"schema":7'
    )
    tail = data[checksummed._PREFIX :]
    (tmp_path / name / COMMITTED).write_bytes(
        b'{"check":"' + checksummed.digest(tail).encode() + b'",' + tail
    )
    (found,) = catalogue.listing(PosixStorage(tmp_path))
    assert (found.status, "schema 7" in found.why) == ("too_new", True)


def test_only_some_ranks(tmp_path: Path) -> None:
    name = save_small(tmp_path, 10, world=3)
    flip_bit(tmp_path / name / data_name(2), -1)
    storage = PosixStorage(tmp_path)
    assert catalogue.verify_in(storage, name, ranks=[0, 1]).ok
    assert [p.file for p in catalogue.verify_in(storage, name).problems] == [data_name(2)]
    assert catalogue.verify_in(storage, name, deep=False).ok, "without reading the bytes nothing is seen"


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_damage_at_all_passes(tmp_path_factory: Any, data: Any) -> None:
    """Any one file flipped, cut, lengthened, emptied or removed, anywhere: `verify` says so, and raises nothing."""
    root = tmp_path_factory.getbasetemp() / "catalogue-property"
    if not root.exists():
        save_small(root, 10)
    pristine = root / "step-00000010.a0001"
    hurt = tmp_path_factory.mktemp("hurt") / pristine.name
    shutil.copytree(pristine, hurt)
    file = hurt / data.draw(st.sampled_from(sorted(p.name for p in pristine.iterdir())))
    size = file.stat().st_size
    how = data.draw(st.sampled_from(["flip", "cut", "lengthen", "empty", "remove", "zero"]))
    at = data.draw(st.integers(0, size - 1))
    if how == "flip":
        flip_bit(file, at)
    elif how == "cut":
        os.truncate(file, at)
    elif how == "lengthen":
        os.truncate(file, size + 1 + at)
    elif how == "empty":
        os.truncate(file, 0)
    elif how == "remove":
        file.unlink()
    else:
        whole = bytearray(file.read_bytes())
        if not any(whole[at:]):
            whole[at:] = b"\1" * (size - at)
        else:
            whole[at:] = bytes(size - at)
        file.write_bytes(whole)
    assert not catalogue.verify(hurt).ok
    shutil.rmtree(hurt.parent)


def test_a_second_commit_is_refused(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    part = direct.write_rank(storage, {"w": torch.ones(2)}, direct.Stamp("run", 1, 5))
    direct.commit(storage, [part])
    with pytest.raises(CheckpointError, match="committed already"):
        direct.commit(storage, [part])


def test_a_part_is_only_read_where_it_belongs(tmp_path: Path) -> None:
    name = save_small(tmp_path, 10)
    storage = PosixStorage(tmp_path)
    manifest = catalogue.read_committed(storage, name)
    assert catalogue.read_part(storage, manifest, 1).rank == 1
    (tmp_path / name / part_name(0)).unlink()
    with pytest.raises(CheckpointCorrupt, match="missing"):
        catalogue.read_part(storage, manifest, 0)
