"""Every storage keeps the same contract; the POSIX one on hostile folders; the S3 one under injected faults."""

from __future__ import annotations

import mmap
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from unbroken.checkpoint.storage import open_storage
from unbroken.checkpoint.storage import posix as posix_module
from unbroken.checkpoint.storage.base import Storage
from unbroken.checkpoint.storage.posix import PosixStorage
from unbroken.errors import MissingExtra, StorageError, UsageError
from unbroken.extras import install_command
from unbroken.testing.object_store import RESET, SLOW_DOWN, FakeS3, Fault, HttpRequest

obstore = pytest.importorskip("obstore")
from unbroken.checkpoint.storage.s3 import S3Storage  # noqa: E402

MIB = 2**20


def pieces(data: bytes | mmap.mmap, size: int = 3 * MIB) -> Iterator[memoryview]:
    view = memoryview(data)
    for at in range(0, len(view), size):
        yield view[at : at + size]


@pytest.fixture
def s3() -> Iterator[FakeS3]:
    with FakeS3() as server:
        yield server


@pytest.fixture(params=["posix", "posix without O_DIRECT", "s3", "s3 in memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, s3: FakeS3) -> Storage:
    if request.param == "s3":
        return s3.storage(part_bytes=5 * MIB)
    if request.param == "s3 in memory":
        return S3Storage(obstore.store.MemoryStore(), "memory://", part_bytes=5 * MIB)
    return PosixStorage(tmp_path / "deep" / "root", direct="without" not in request.param)


def test_the_contract(storage: Storage) -> None:
    assert storage.folders() == []
    assert storage.files("a") == []
    storage.put("a/small", b"123")
    storage.put("a/small", b"4567")
    storage.put("a/empty", b"")
    assert storage.create("a/C", b"one")
    assert not storage.create("a/C", b"two")
    data = os.urandom(13 * MIB + 17)
    storage.write("b/large", pieces(data), len(data))
    storage.write("b/none", iter([]), 0)
    assert storage.folders() == ["a", "b"]
    assert storage.list("a") == ["C", "empty", "small"]
    assert [(e.name, e.bytes) for e in storage.files("b")] == [("large", len(data)), ("none", 0)]
    assert all(e.modified > 1.6e9 for e in storage.files("b"))
    assert storage.read("a/small") == b"4567"
    assert storage.read("a/small", 1, 3) == b"56"
    assert storage.read("a/empty") == storage.read("b/none") == b""
    assert storage.read("a/C") == b"one"
    assert storage.read("b/large") == data
    into = memoryview(bytearray(6 * MIB))
    storage.read_into("b/large", 5 * MIB + 3, into)
    assert into == data[5 * MIB + 3 : 11 * MIB + 3]
    assert storage.size("b/large") == len(data)
    storage.delete("a/small")
    storage.delete("a/small")
    assert storage.list("a") == ["C", "empty"]
    storage.delete_folder("b")
    storage.delete_folder("b")
    assert storage.folders() == ["a"]


@pytest.mark.parametrize("start", [0, 4096, 5 * MIB + 3])
@pytest.mark.parametrize("size", [1, 4096, 6 * MIB, 6 * MIB + 1001])
def test_bytes_that_are_read_once(storage: Storage, start: int, size: int) -> None:
    """Past the page cache where that can be, whatever the alignment, and the same bytes."""
    data = os.urandom(13 * MIB + 17)
    storage.write("a/large", pieces(data), len(data))
    for place in (mmap.mmap(-1, size), bytearray(size)):
        into = memoryview(place)
        storage.read_into("a/large", start, into, once=True)
        assert into == data[start : start + size]
        with pytest.raises(StorageError):
            storage.read_into("a/large", len(data) - size // 2, into, once=True)


@pytest.mark.parametrize("kept", [False, True])
def test_what_is_in_the_page_cache_is_read_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    storage = PosixStorage(tmp_path)
    data = os.urandom(4 * MIB)
    with mmap.mmap(-1, len(data)) as aligned:  # so that writing goes past the cache too
        aligned[:] = data
        storage.write("a/large", [aligned], len(data))
    if kept:
        storage.read("a/large")
    opened: list[int] = []
    real_open = os.open

    def note(path: Any, flags: int, *more: Any, **named: Any) -> int:
        opened.append(flags)
        return real_open(path, flags, *more, **named)

    monkeypatch.setattr(posix_module.os, "open", note)
    for _ in range(2):  # the first time must not leave what the second takes for all of it
        with mmap.mmap(-1, len(data)) as into:
            storage.read_into("a/large", 0, memoryview(into)[: 4 * MIB], once=True)
            assert into[:] == data
    direct = sum(bool(flags & os.O_DIRECT) for flags in opened)
    if not kept and not direct:
        pytest.skip("this file system keeps in memory what was written past its page cache")
    assert direct == (0 if kept else 2)


def test_the_check(storage: Storage) -> None:
    storage.put("a/x", b"1")
    storage.check()
    assert storage.folders() == ["a"]
    if isinstance(storage, PosixStorage):
        assert [p.name for p in storage.root.iterdir()] == ["a"]


def test_the_check_finds_what_is_not_safe(tmp_path: Path, s3: FakeS3) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError):
        PosixStorage(tmp_path / "file").check()
    s3.ignore_conditions = True
    with pytest.raises(StorageError, match="conditional PUT"):
        s3.storage().check()
    s3.fault = lambda _: Fault(403, "AccessDenied")
    with pytest.raises(StorageError, match="credentials"):
        s3.storage().check()


def test_what_is_missing_or_short(storage: Storage) -> None:
    storage.put("a/x", b"123")
    for missing in (
        lambda: storage.read("a/y"),
        lambda: storage.size("a/y"),
        lambda: storage.read("z/y", 0, 4),
    ):
        with pytest.raises(FileNotFoundError):
            missing()
    with pytest.raises(StorageError):
        storage.read("a/x", 0, 4)
    with pytest.raises(StorageError):
        storage.read_into("a/x", 7, memoryview(bytearray(2)))


class Stop(Exception):
    """As the keeper's gate raises."""


def test_a_write_that_is_broken_off_leaves_nothing(storage: Storage) -> None:
    data = os.urandom(11 * MIB)

    def broken() -> Iterator[memoryview]:
        yield memoryview(data)[: 6 * MIB]
        raise Stop

    with pytest.raises(Stop):
        storage.write("a/large", broken(), len(data))
    for wrong in (len(data) - 1, len(data) + 1):
        with pytest.raises(ValueError, match="announced"):
            storage.write("a/large", pieces(data), wrong)
    assert storage.list("a") == []
    if isinstance(storage, PosixStorage):
        assert list((storage.root / "a").iterdir()) == []


def test_one_of_many_creators_wins(storage: Storage) -> None:
    start, won = threading.Barrier(8), []

    def race(i: int) -> None:
        start.wait()
        if storage.create("a/COMMITTED", f"by {i}".encode()):
            won.append(i)

    threads = [threading.Thread(target=race, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(won) == 1
    assert storage.read("a/COMMITTED") == f"by {won[0]}".encode()


def test_aligned_memory_goes_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a mapping (as the keeper's buffers are) all but the last, unaligned bytes are written directly."""
    seen: list[tuple[int, int]] = []
    real = os.pwrite

    def spy(fd: int, data: Any, at: int) -> int:
        import fcntl

        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            seen.append((at, len(data)))
        return real(fd, data, at)

    monkeypatch.setattr(posix_module.os, "pwrite", spy)
    size = 9 * MIB + 100
    with mmap.mmap(-1, size) as m:
        m[:] = os.urandom(size)
        PosixStorage(tmp_path).write("a/x", pieces(m, 4 * MIB), size)
        same = (tmp_path / "a" / "x").read_bytes() == m[:]
    assert same
    if not seen:
        pytest.skip("this file system has no O_DIRECT")
    assert sum(n for _, n in seen) == 9 * MIB


def test_hostile_names_on_disk(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "fifo")
    (tmp_path / "a" / "folder").mkdir()
    with pytest.raises(StorageError, match="not a regular file"):
        storage.read("a/fifo", 0, 1)
    with pytest.raises(StorageError):
        storage.read("a/folder", 0, 1)
    assert storage.list("a") == []
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="Name a folder"):
        PosixStorage(tmp_path / "file").put("a/x", b"")


def test_a_full_disk_is_said_before_writing(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"No space left.*Free space"):
        PosixStorage(tmp_path).write("a/x", iter([b"x"]), 2**60)
    assert PosixStorage(tmp_path).list("a") == []


def test_a_disk_that_fills_while_writing(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("/dev/full is not on this machine")
    (tmp_path / "a").mkdir()
    # The name aside leads to a device that is always full.
    (tmp_path / "a" / f".x.{os.getpid()}.aside").symlink_to("/dev/full")
    storage = PosixStorage(tmp_path)
    real_unlink, storage_unlink = Path.unlink, []

    def keep_the_first(self: Path, missing_ok: bool = False) -> None:
        if not storage_unlink:
            storage_unlink.append(self)
            return
        real_unlink(self, missing_ok)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(StorageError, match="No space left"):
        patch.setattr(Path, "unlink", keep_the_first)
        storage.write("a/x", pieces(bytes(5 * MIB)), 5 * MIB)
    assert list((tmp_path / "a").iterdir()) == []


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".x.999999.aside").write_bytes(b"half")
    PosixStorage(tmp_path).write("a/x", [b"whole"], 5)
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["x"]


def test_a_link_that_was_made_and_refused_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS does when the first answer is lost: the second try says that it exists."""
    real = os.link

    def twice(a: Any, b: Any) -> None:
        real(a, b)
        real(a, b)

    monkeypatch.setattr(posix_module.os, "link", twice)
    assert PosixStorage(tmp_path).create("a/C", b"mine")
    assert not PosixStorage(tmp_path).create("a/C", b"theirs")
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["C"]


def test_without_links_one_still_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(a: Any, b: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(posix_module.os, "link", refuse)
    storage = PosixStorage(tmp_path)
    storage.check()
    assert storage.create("a/C", b"one")
    assert not storage.create("a/C", b"two")
    assert storage.read("a/C") == b"one"


def test_addresses(tmp_path: Path) -> None:
    assert open_storage(f"file://{tmp_path}").url == str(tmp_path)
    assert open_storage(tmp_path).level == "disk"
    assert open_storage("s3://bucket/prefix/").url == "s3://bucket/prefix"
    for wrong in ("gs://x", "s3://", "http://x"):
        with pytest.raises(UsageError):
            open_storage(wrong)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingExtra, match=re.escape(install_command("s3"))):
        open_storage("s3://bucket/x")


# S3 under faults ------------------------------------------------------------------------------------------------


def large() -> bytes:
    return os.urandom(17 * MIB + 5)


FAULTS: dict[str, Callable[[HttpRequest], Fault | None]] = {
    "SlowDown on every third request": lambda r: SLOW_DOWN if r.number % 3 == 1 else None,
    "resets on every third request": lambda r: RESET if r.number % 3 == 1 else None,
    "lost answers to parts": lambda r: Fault(lose_answer=True) if r.is_part and r.number % 2 else None,
    "500 on parts": lambda r: Fault(500, "InternalError") if r.is_part and r.number % 2 else None,
}


@pytest.mark.parametrize("kind", FAULTS)
def test_s3_survives(s3: FakeS3, kind: str) -> None:
    storage, data = s3.storage(part_bytes=5 * MIB), large()
    s3.fault = FAULTS[kind]
    storage.write("a/large", pieces(data), len(data))
    assert storage.create("a/COMMITTED", b"marker")
    assert storage.read("a/large") == data
    assert storage.list("a") == ["COMMITTED", "large"]
    assert s3.uploads == {}


def test_a_part_that_hangs_is_sent_again(s3: FakeS3) -> None:
    storage, data = s3.storage(part_bytes=5 * MIB, request_timeout=0.7), large()
    slow = []

    def once(r: HttpRequest) -> Fault | None:
        if r.is_part and r.query["partNumber"] == "2" and not slow:
            slow.append(r)
            return Fault(delay=2.0)
        return None

    s3.fault = once
    storage.write("a/large", pieces(data), len(data))
    assert storage.read("a/large") == data
    assert slow


def test_bytes_that_change_on_the_way_are_refused_by_their_checksum(s3: FakeS3) -> None:
    storage, data = s3.storage(part_bytes=5 * MIB, retries=1, give_up_after=2.0), large()
    s3.fault = lambda r: Fault(flip=True) if r.is_part and r.query["partNumber"] == "3" else None
    with pytest.raises(StorageError, match="BadDigest"):
        storage.write("a/large", pieces(data), len(data))
    assert storage.list("a") == []


def test_a_store_that_stays_down_is_known_in_seconds(s3: FakeS3) -> None:
    storage = s3.storage(retries=2, give_up_after=3.0)
    s3.fault = lambda _: SLOW_DOWN
    with pytest.raises(StorageError, match=r"503|SlowDown"):
        storage.put("a/x", b"1")


def test_the_lost_answer_to_a_create(s3: FakeS3) -> None:
    """The marker is there, its answer is not: the writer finds that it won, and another one that it lost."""
    storage, lost = s3.storage(), []

    def lose(r: HttpRequest) -> Fault | None:
        if r.method == "PUT" and not lost:
            lost.append(r)
            return Fault(lose_answer=True)
        return None

    s3.fault = lose
    assert storage.create("a/COMMITTED", b"mine")
    assert not storage.create("a/COMMITTED", b"theirs")
    assert storage.read("a/COMMITTED") == b"mine"


def test_a_bucket_of_many_files(s3: FakeS3) -> None:
    storage = s3.storage()
    for i in range(2300):
        s3.objects[f"bucket/run/step-{i % 3}/f{i:05d}"] = b""
        s3.modified[f"bucket/run/step-{i % 3}/f{i:05d}"] = 1.7e9
    assert storage.folders() == ["step-0", "step-1", "step-2"]
    s3.objects |= {f"bucket/run/x/{i:05d}": b"1" for i in range(1500)}
    s3.modified |= {f"bucket/run/x/{i:05d}": 1.7e9 for i in range(1500)}
    assert len(storage.list("x")) == 1500
    storage.delete_folder("x")
    assert storage.list("x") == []
