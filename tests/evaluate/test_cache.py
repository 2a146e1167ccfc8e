from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from unbroken.errors import EvaluationError, ModelChanged, ModelDoesNotLoad, NoRoomForModel, RunInterrupted
from unbroken.evaluate.model import cache, reaper, sources
from unbroken.evaluate.model.cache import ModelReference, Places, copies, fetch_unknown, sweep, take_reference
from unbroken.evaluate.model.sources import (
    CHUNK,
    FileInfo,
    FolderSource,
    ModelManifest,
    StoreSource,
    fetch,
    hash_model,
    needed,
    open_source,
    small_files,
)


class Counting(FolderSource):
    """Counts what is read, and can be slow."""

    def __init__(self, folder: Path, delay: float = 0.0) -> None:
        super().__init__(folder)
        self.read_bytes = 0
        self.delay = delay

    def read(self, name: str, offset: int, size: int) -> bytes:
        time.sleep(self.delay)
        self.read_bytes += size
        return super().read(name, offset, size)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(os.urandom(CHUNK + 12345))
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"the same weights again")
    (folder / ".gitattributes").write_text("x")
    (folder / "README.md").write_text("x")
    (folder / "empty.txt").write_text("")
    return folder


@pytest.fixture
def places(tmp_path: Path) -> Places:
    (tmp_path / "shm").mkdir()
    (tmp_path / "disk").mkdir()
    return Places(tmp_path / "shm", (tmp_path / "disk",))


def test_one_fetch_however_many_lease_it(model: Path, places: Places, tmp_path: Path) -> None:
    source = Counting(model)
    manifest = hash_model(source, tmp_path / "memo")
    whole = source.read_bytes
    first = take_reference(source, manifest, places, watcher=False)
    second = take_reference(source, manifest, places, watcher=False)
    assert source.read_bytes == 2 * whole  # once for the hash, once for the copy
    assert first.path == second.path and first.in_memory and second.fetched_s == 0
    for name in ("model.safetensors", "config.json", "tokenizer.json", "empty.txt"):
        assert (first.path / name).read_bytes() == (model / name).read_bytes()
    assert not (first.path / "pytorch_model.bin").exists()
    first.release()
    assert second.path.exists()
    second.release()
    assert not list((tmp_path / "shm").rglob("*.safetensors"))


def test_an_unknown_model_is_read_once_for_hash_and_copy(model: Path, places: Places, tmp_path: Path) -> None:
    source = Counting(model)
    kept: list[ModelReference | None] = []

    def reader(files: Sequence[FileInfo]) -> ModelManifest:
        manifest, first = fetch_unknown(source, files, places)
        kept.append(first)
        return manifest

    manifest = hash_model(source, tmp_path / "memo", reader)
    once = source.read_bytes
    assert kept[0] is not None
    assert cache.live_references(kept[0].path.parent, manifest.hash) == 1, (
        "nobody removes it before it is used"
    )
    held = take_reference(source, manifest, places, watcher=False)
    kept[0].release()
    assert source.read_bytes == once == manifest.bytes
    assert hash_model(source, tmp_path / "memo").hash == manifest.hash
    assert source.read_bytes == once  # remembered
    held.release()


def test_the_hash_is_of_the_content(model: Path, tmp_path: Path) -> None:
    one = hash_model(open_source(str(model)), tmp_path / "memo")
    copy = tmp_path / "copy"
    fetch(open_source(str(model)), open_source(str(model)).files(), copy)
    assert hash_model(open_source(str(copy)), tmp_path / "memo").hash == one.hash
    (copy / "config.json").write_text("{ }")
    assert hash_model(open_source(str(copy)), tmp_path / "memo").hash != one.hash


def test_changed_bytes_are_refused_and_leave_nothing(model: Path, places: Places, tmp_path: Path) -> None:
    manifest = hash_model(open_source(str(model)), tmp_path / "memo")
    data = bytearray((model / "model.safetensors").read_bytes())
    data[CHUNK + 5] ^= 1
    (model / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelChanged, match="in its chunk 1"):
        take_reference(open_source(str(model)), manifest, places, watcher=False)
    assert not list((tmp_path / "shm").rglob("*.safetensors"))


def test_a_file_that_ends_early_is_an_error(model: Path, places: Places) -> None:
    source = open_source(str(model))
    files = [FileInfo("config.json", 100, "")]
    with pytest.raises(EvaluationError, match="ended early"):
        fetch(source, files, None)


def test_disk_where_memory_is_too_small_and_a_clear_refusal(
    model: Path, places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(str(model))
    manifest = hash_model(source, tmp_path / "memo")
    real = cache.room_in
    monkeypatch.setattr(
        cache,
        "room_in",
        lambda root, mem: cache.Room(
            str(root), 64 * 2**20 if not mem else 2**20, "the cgroup's memory limit"
        ),
    )
    held = take_reference(source, manifest, places, watcher=False)
    assert not held.in_memory and held.path.is_relative_to(tmp_path / "disk")
    held.release()
    monkeypatch.setattr(
        cache,
        "room_in",
        lambda root, mem: cache.Room(
            str(root), 2**20, "the cgroup's memory limit" if mem else "the file system"
        ),
    )
    with pytest.raises(
        NoRoomForModel, match=r"needs 32 MiB.*1 MiB free, limited by the cgroup's memory limit.*--shm-size"
    ):
        take_reference(source, manifest, places, watcher=False)
    monkeypatch.setattr(cache, "room_in", real)
    assert take_reference(source, manifest, places, watcher=False).in_memory


def test_room_is_never_more_than_the_file_system_has(tmp_path: Path) -> None:
    room = cache.room_in(tmp_path, True)
    assert 0 < room.free <= os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize


def hold(model: str, shm: str, ready: Any, watcher: bool, linger: float, delay: float) -> None:
    source = Counting(Path(model), delay)
    manifest = hash_model(FolderSource(Path(model)), Path(shm).parent / "memo")
    take_reference(source, manifest, Places(Path(shm)), watcher=watcher, linger_s=linger)
    ready.set()
    time.sleep(60)


def start(
    model: Path, shm: Path, *, watcher: bool = False, linger: float = 0.5, delay: float = 0.0
) -> tuple[Any, Any]:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(
        target=hold, args=(str(model), str(shm), ready, watcher, linger, delay), daemon=True
    )
    process.start()
    return process, ready


def test_killed_users_do_not_count_and_the_copy_is_swept(model: Path, places: Places, tmp_path: Path) -> None:
    assert places.memory is not None
    process, ready = start(model, places.memory)
    assert ready.wait(20)
    root = places.roots()[0][0]
    assert [c.users for c in copies(root)] == [1]
    assert sweep(root) == []
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert len(sweep(root)) == 1
    assert copies(root) == []


def test_a_fetch_that_was_killed_is_made_anew(
    model: Path, places: Places, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    assert places.memory is not None
    process, ready = start(model, places.memory, delay=0.5)
    eventually(lambda: list(places.memory.rglob("model.safetensors")), within=20)  # type: ignore[union-attr]
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not ready.is_set()
    source = open_source(str(model))
    held = take_reference(source, hash_model(source, tmp_path / "memo"), places, watcher=False)
    assert held.fetched_s > 0
    assert (held.path / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    held.release()


def test_after_a_crash_of_everything_the_watcher_clears(
    model: Path, places: Places, eventually: Callable[..., None]
) -> None:
    assert places.memory is not None
    process, ready = start(model, places.memory, watcher=True)
    assert ready.wait(20)
    root = places.roots()[0][0]
    eventually(lambda: list(root.glob("*.watch")), within=20)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    eventually(lambda: not list(root.rglob("*.safetensors")) and not list(root.glob("*.watch")), within=20)


@pytest.mark.parametrize("known", [True, False])
def test_what_a_killed_fetch_leaves_is_cleared_by_the_watcher(
    model: Path, places: Places, eventually: Callable[..., None], known: bool
) -> None:
    assert places.memory is not None
    root = places.roots()[0][0]
    if known:
        process, _ = start(model, places.memory, watcher=True, delay=30)
    else:
        source = Counting(model, delay=30)
        process = multiprocessing.get_context("fork").Process(
            target=fetch_unknown, args=(source, source.files(), places), kwargs={"linger_s": 0.5}, daemon=True
        )
        process.start()
    eventually(
        lambda: list(root.rglob("model.safetensors")) and list(root.glob("*.watch")), within=20
    )  # it takes room, and is watched
    time.sleep(0.7)  # longer than the watcher lingers: a fetch that lives is left alone
    assert list(root.rglob("model.safetensors"))
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    eventually(lambda: not list(root.iterdir()), within=20)


def take(model: str, shm: str, linger: float, delay: float, known: bool) -> None:
    source, places = Counting(Path(model), delay), Places(Path(shm))
    if known:
        manifest = hash_model(FolderSource(Path(model)), Path(shm).parent / "memo")
        take_reference(source, manifest, places, linger_s=linger)
    else:
        fetch_unknown(source, source.files(), places, linger_s=linger)


def fetching(model: Path, shm: Path, *, linger: float, known: bool) -> Any:
    """A process that is in the middle of a fetch, and will be for a long time."""
    if known:
        hash_model(FolderSource(model), shm.parent / "memo")
    context = multiprocessing.get_context("fork")
    process = context.Process(target=take, args=(str(model), str(shm), linger, 60.0, known), daemon=True)
    process.start()
    return process


@pytest.mark.parametrize("known", [True, False])
def test_a_fetch_that_takes_longer_than_the_linger_keeps_its_copy(
    model: Path, places: Places, eventually: Callable[..., None], known: bool
) -> None:
    assert places.memory is not None
    process = fetching(model, places.memory, linger=0.0, known=known)
    root = places.roots()[0][0]
    eventually(lambda: list(root.rglob("*.watch")), within=20)
    looks = time.monotonic() + 2.5 * reaper.EVERY_S
    eventually(lambda: time.monotonic() > looks)
    assert list(root.rglob("model.safetensors"))
    assert sweep(root, force=True) == []
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    eventually(lambda: not list(root.iterdir()), within=20)


@pytest.mark.slow
def test_who_waits_for_a_fetch_that_is_killed_takes_over(
    model: Path, places: Places, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    assert places.memory is not None
    process = fetching(model, places.memory, linger=0.0, known=True)
    root = places.roots()[0][0]
    eventually(lambda: list(root.glob("*.watch")), within=20)
    second, ready = start(model, places.memory, delay=1.0)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert ready.wait(20), "the watcher of the first fetch took the second one's copy"
    assert [c.users for c in copies(root)] == [1]
    looks = time.monotonic() + 2.5 * reaper.EVERY_S
    eventually(lambda: time.monotonic() > looks)
    (copy,) = copies(root)
    assert (Path(copy.path) / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    os.kill(second.pid, signal.SIGKILL)
    second.join()
    eventually(lambda: not list(root.iterdir()), within=20)


def test_what_a_killed_fetch_left_makes_room_for_another_model_at_once(
    model: Path, places: Places, eventually: Callable[..., None]
) -> None:
    assert places.memory is not None
    process = fetching(model, places.memory, linger=10.0, known=True)
    root = places.roots()[0][0]
    eventually(lambda: list(root.glob("*.watch")), within=20)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert len(sweep(root)) == 1
    assert copies(root) == []


def test_a_fetch_in_another_container_is_not_taken_for_dead(
    model: Path, places: Places, eventually: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers that share /dev/shm do not see each other's processes."""
    assert places.memory is not None
    process = fetching(model, places.memory, linger=0.0, known=False)
    root = places.roots()[0][0]
    eventually(lambda: list(root.glob(".incoming-*/model.safetensors")), within=20)
    (incoming,) = (p for p in root.glob(".incoming-*") if (p / "model.safetensors").exists())
    monkeypatch.setattr(Path, "exists", _not_in_proc(Path.exists))
    assert sweep(root) == []
    assert (incoming / "model.safetensors").exists()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    eventually(lambda: not list(root.iterdir()), within=20)


def _not_in_proc(exists: Callable[..., bool]) -> Callable[..., bool]:
    return lambda path, **more: path.parts[1:2] != ("proc",) and exists(path, **more)


def test_an_object_store(model: Path, places: Places, tmp_path: Path) -> None:
    obstore = pytest.importorskip("obstore")
    store = obstore.store.MemoryStore()
    for f in model.iterdir():
        obstore.put(store, f.name, f.read_bytes())
    source = StoreSource("memory://model", store)
    manifest = hash_model(source, tmp_path / "memo")
    assert manifest.hash == hash_model(open_source(str(model)), tmp_path / "memo").hash
    held = take_reference(source, manifest, places, watcher=False)
    assert (held.path / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    held.release()
    small = small_files(source, tmp_path / "small")
    assert sorted(p.name for p in small.iterdir()) == ["config.json", "empty.txt", "tokenizer.json"]
    obstore.put(store, "chat_template.jinja", b"another state of it")
    other = small_files(source, tmp_path / "small")
    assert (other / "chat_template.jinja").exists() and not (small / "chat_template.jinja").exists()
    obstore.delete(store, "model.safetensors")
    with pytest.raises(EvaluationError, match=r"gave no 'model\.safetensors'"):
        source.read("model.safetensors", 0, 10)


def test_who_waits_for_another_fetch_can_be_stopped(model: Path, places: Places, tmp_path: Path) -> None:
    manifest = hash_model(open_source(str(model)), tmp_path / "memo")
    halt, found = threading.Event(), []

    def take() -> None:
        try:
            take_reference(open_source(str(model)), manifest, places, watcher=False, halt=halt)
        except RunInterrupted as e:
            found.append(e)

    root = places.roots()[0][0]
    root.mkdir(parents=True)
    with cache._locked(root, manifest.hash):
        thread = threading.Thread(target=take)
        thread.start()
        halt.set()
        thread.join(20)
        assert not thread.is_alive()
    assert "another process fetches" in str(found[0])


def test_a_watcher_leaves_no_file(
    model: Path, places: Places, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    manifest = hash_model(open_source(str(model)), tmp_path / "memo")
    held = take_reference(open_source(str(model)), manifest, places)
    held.release()  # before or after the watcher is up
    eventually(lambda: not list(held.path.parent.iterdir()), within=20)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelDoesNotLoad, match="no file of a model"):
        open_source(str(tmp_path)).files()
    with pytest.raises(ModelDoesNotLoad, match="No such file"):
        open_source(str(tmp_path / "gone")).files()
    assert needed([FileInfo("a.bin", 1, "")], "x")[0].name == "a.bin"


def test_room_is_made_beside_the_reads_and_only_by_the_system_call(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The C library's way, where a file system knows none (NFS before 4.2, many FUSE), is to write zeros."""
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("it may write zeros"))
    began = threading.Event()
    make = sources.make_room

    def waits(fd: int, size: int) -> None:
        assert began.wait(20), "nothing was read meanwhile"
        make(fd, size)
        assert os.fstat(fd).st_size == size

    class Telling(FolderSource):
        def read(self, name: str, offset: int, size: int) -> bytes:
            began.set()
            return super().read(name, offset, size)

    monkeypatch.setattr(sources, "make_room", waits)
    source = Telling(model)
    found = fetch(source, source.files(), tmp_path / "copy")
    copy = open_source(str(tmp_path / "copy"))
    assert fetch(copy, copy.files(), None).hash == found.hash


def test_a_disk_without_room_is_told_at_once(tmp_path: Path) -> None:
    with open(tmp_path / "large", "wb") as f, pytest.raises(OSError, match=r"\w"):
        sources.make_room(f.fileno(), 1 << 62)


def test_a_write_that_takes_only_a_part_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: whole(fd, bytes(data[:7]), at))
    with open(tmp_path / "f", "w+b") as f:
        sources.write_all(f.fileno(), b"0123456789" * 5, 3)
    assert (tmp_path / "f").read_bytes() == b"\0\0\0" + b"0123456789" * 5
