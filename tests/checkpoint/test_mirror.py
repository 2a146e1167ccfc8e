"""A copy to another storage goes on where it broke off, spreads no damage, and commits last."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import flip_bit, save_small
from unbroken.checkpoint.catalogue import contents as catalogue
from unbroken.checkpoint.catalogue.mirror import mirror
from unbroken.checkpoint.format.manifest import COMMITTED, MANIFEST, data_name, part_name
from unbroken.checkpoint.storage.posix import PosixStorage
from unbroken.errors import CheckpointCorrupt, NoCheckpoint, StorageError
from unbroken.testing.object_store import FakeS3


@pytest.fixture
def s3() -> Iterator[FakeS3]:
    pytest.importorskip("obstore")
    with FakeS3() as server:
        yield server


def test_there_and_back(tmp_path: Path, s3: FakeS3) -> None:
    name = save_small(tmp_path / "a", 12, world=3, elements=1_500_000)
    disk, bucket, back = (
        PosixStorage(tmp_path / "a"),
        s3.storage(part_bytes=5 << 20),
        PosixStorage(tmp_path / "b"),
    )
    done = mirror(disk, name, bucket)
    assert (done.committed, done.skipped, done.sent) == (True, 0, 3 * (4096 + 6_000_008))
    assert catalogue.verify_in(bucket, name).ok
    assert [f.status for f in catalogue.listing(bucket)] == ["committed"]
    assert catalogue.listing(bucket)[0].level == "remote"
    assert mirror(bucket, name, back).committed
    for file in (tmp_path / "a" / name).iterdir():
        assert (tmp_path / "b" / name / file.name).read_bytes() == file.read_bytes()


def test_the_order_is_data_part_manifest_marker(tmp_path: Path, s3: FakeS3) -> None:
    name = save_small(tmp_path, 12)
    mirror(PosixStorage(tmp_path), name, s3.storage())
    put = [r.key.rsplit("/", 1)[-1] for r in s3.requests if r.method == "PUT"]
    assert put == [data_name(0), part_name(0), data_name(1), part_name(1), MANIFEST, COMMITTED]


class Stop(Exception):
    """What the gate raises."""


@pytest.mark.parametrize("after", range(9))
def test_it_goes_on_where_it_stopped(tmp_path: Path, s3: FakeS3, after: int) -> None:
    name, bucket, left = save_small(tmp_path, 12, world=3), s3.storage(), [after]

    def gate() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Stop

    try:
        mirror(PosixStorage(tmp_path), name, bucket, gate=gate)
    except Stop:
        assert not catalogue.verify_in(bucket, name).ok, "nothing half passes"
    before = {k for k in s3.objects if k.endswith(".json")}
    s3.requests.clear()
    done = mirror(PosixStorage(tmp_path), name, bucket)
    assert done.committed
    assert catalogue.verify_in(bucket, name).ok
    again = {r.key for r in s3.requests if r.method == "PUT"}
    assert not again & before - {f"bucket/run/{name}/{MANIFEST}"}, "what was whole was not sent again"


def test_each_node_sends_its_own_and_the_last_commits(tmp_path: Path, s3: FakeS3) -> None:
    name, bucket = save_small(tmp_path, 12, world=4), s3.storage()
    assert not mirror(PosixStorage(tmp_path), name, bucket, ranks=[2, 3]).committed
    assert mirror(PosixStorage(tmp_path), name, bucket, ranks=[0, 1]).committed
    assert catalogue.verify_in(bucket, name).ok


def test_damage_is_not_spread(tmp_path: Path, s3: FakeS3) -> None:
    name = save_small(tmp_path, 12)
    flip_bit(tmp_path / name / data_name(1), -1)
    with pytest.raises(CheckpointCorrupt):
        mirror(PosixStorage(tmp_path), name, s3.storage())
    assert f"bucket/run/{name}/{data_name(1)}" not in s3.objects
    (tmp_path / name / COMMITTED).unlink()
    with pytest.raises(NoCheckpoint):
        mirror(PosixStorage(tmp_path), name, s3.storage())


def test_another_checkpoint_of_the_name_is_not_overwritten(tmp_path: Path, s3: FakeS3) -> None:
    mine, theirs = save_small(tmp_path / "a", 12), save_small(tmp_path / "b", 12, elements=5)
    bucket = s3.storage()
    mirror(PosixStorage(tmp_path / "a"), mine, bucket)
    with pytest.raises(StorageError, match="another checkpoint"):
        mirror(PosixStorage(tmp_path / "b"), theirs, bucket)


def test_the_copier_is_killed(tmp_path: Path, s3: FakeS3) -> None:
    """kill -9 in the middle of a multipart upload: nothing passes for a checkpoint, the next copier finishes."""
    name = save_small(tmp_path, 12, elements=6_000_000)
    code = f"""
import sys
from pathlib import Path
from unbroken.checkpoint.catalogue.mirror import mirror
from unbroken.checkpoint.storage.posix import PosixStorage
from unbroken.checkpoint.storage.s3 import S3Storage
bucket = S3Storage.from_url("s3://bucket/run", options=dict(endpoint={s3.endpoint!r}, access_key_id="a",
    secret_access_key="b", region="x"), part_bytes=5 << 20)
mirror(PosixStorage(Path({str(tmp_path)!r})), {name!r}, bucket)
"""
    victim: list[subprocess.Popen[bytes]] = []

    def kill_at_a_part_of_rank_1(r: object) -> None:
        if getattr(r, "is_part", False) and data_name(1) in getattr(r, "key", ""):
            victim[0].send_signal(signal.SIGKILL)

    s3.fault = kill_at_a_part_of_rank_1
    victim.append(
        subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"})
    )
    assert victim[0].wait(60) == -signal.SIGKILL
    s3.fault = lambda _: None
    bucket = s3.storage(part_bytes=5 << 20)
    assert not catalogue.verify_in(bucket, name).ok
    assert data_name(1) not in bucket.list(name), "a part of an object is no object"
    done = mirror(PosixStorage(tmp_path), name, bucket)
    assert (done.committed, done.skipped > 0) == (True, True)
    assert catalogue.verify_in(bucket, name).ok
