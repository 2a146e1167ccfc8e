"""Files appear whole or not at all, whatever dies or fills up meanwhile."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from unbroken import atomic


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_write_and_replace(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    atomic.write_json(path, {"b": 1, "a": "é"})
    assert path.read_text() == '{\n "a": "\\u00e9",\n "b": 1\n}\n'
    atomic.write_text(path, "é")
    assert path.read_bytes() == "é".encode()
    atomic.write_bytes(path, memoryview(b"xyz"), durable=False)
    assert path.read_bytes() == b"xyz"
    assert names(tmp_path) == ["a.json"]


def test_what_cannot_be_encoded_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    atomic.write_text(path, "old")
    with pytest.raises(TypeError):
        atomic.write_json(path, {"a": object()})
    assert path.read_text() == "old" and names(tmp_path) == ["a"]


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_full_disk_leaves_the_old_file_and_nothing_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    path = tmp_path / "a"
    atomic.write_text(path, "old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic.os, where, full)
    with pytest.raises(OSError) as e:
        atomic.write_text(path, "new")
    assert e.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert path.read_text() == "old" and names(tmp_path) == ["a"]


def test_missing_folder_raises_as_the_system_says(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        atomic.write_text(tmp_path / "absent" / "a", "x")
    with pytest.raises(FileNotFoundError):
        atomic.create_exclusive(tmp_path / "absent" / "a", b"x")


def test_order_of_durability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data is synced before the name is, and the name before the call returns."""
    done: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(fd: int) -> None:
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "file")
        real_fsync(fd)

    def replace(a: Path, b: Path) -> None:
        done.append("rename")
        real_replace(a, b)

    monkeypatch.setattr(atomic.os, "fsync", fsync)
    monkeypatch.setattr(atomic.os, "replace", replace)
    atomic.write_bytes(tmp_path / "a", b"x")
    assert done == ["file", "rename", "folder"]
    done.clear()
    assert atomic.create_exclusive(tmp_path / "b", b"x")
    assert done == ["file", "folder"]


def test_readers_see_old_or_new_never_a_part(tmp_path: Path) -> None:
    path = tmp_path / "a"
    texts = [bytes([c]) * 100_000 for c in b"ab"]
    atomic.write_bytes(path, texts[0], durable=False)
    stop = threading.Event()

    def rewrite() -> None:
        n = 0
        while not stop.is_set():
            n += 1
            atomic.write_bytes(path, texts[n % 2], durable=False)

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        seen = set()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and len(seen) < 2:
            data = path.read_bytes()
            assert data in texts
            seen.add(data[:1])
        assert len(seen) == 2
    finally:
        stop.set()
        writer.join()


def test_killed_writer_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    code = textwrap.dedent("""
        import sys
        from pathlib import Path
        from unbroken import atomic
        n = 0
        while True:
            n += 1
            atomic.write_bytes(Path(sys.argv[1]), str(n).encode() * 20000, durable=False)
            if n == 1: print("go", flush=True)
    """)
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None and writer.stdout.readline() == b"go\n"
        time.sleep(0.02)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        data = path.read_bytes()
        number = data[: len(data) // 20000]
        assert number and data == number * 20000


def test_create_exclusive(tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert atomic.create_exclusive(path, b"first")
    assert not atomic.create_exclusive(path, b"second")
    assert path.read_bytes() == b"first"
    (tmp_path / "folder").mkdir()
    assert not atomic.create_exclusive(tmp_path / "folder", b"x")
    assert names(tmp_path) == ["a", "folder"]


def test_a_link_that_was_made_and_denied_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client sees of an NFS server whose first answer was lost."""
    real = os.link

    def link(a: Path, b: Path) -> None:
        real(a, b)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(atomic.os, "link", link)
    assert atomic.create_exclusive(tmp_path / "a", b"x")
    assert names(tmp_path) == ["a"]


def test_one_of_many_threads_creates(tmp_path: Path) -> None:
    path = tmp_path / "a"
    barrier = threading.Barrier(16)
    won: list[int] = []

    def race(i: int) -> None:
        barrier.wait()
        if atomic.create_exclusive(path, str(i).encode()):
            won.append(i)

    threads = [threading.Thread(target=race, args=(i,)) for i in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(won) == 1 and path.read_bytes() == str(won[0]).encode()


def test_a_secret_is_never_readable_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = os.fsync

    def look(fd: int) -> None:
        seen.append(os.fstat(fd).st_mode & 0o777)
        real(fd)

    monkeypatch.setattr(atomic.os, "fsync", look)
    assert atomic.create_exclusive(tmp_path / "token", b"secret", mode=0o600)
    assert seen[0] == 0o600 and (tmp_path / "token").stat().st_mode & 0o777 == 0o600
