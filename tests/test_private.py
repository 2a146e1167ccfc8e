"""Folders and key files that only their owner may use, whatever the umask and whoever was there before."""

from __future__ import annotations

import ast
import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from unbroken.checkpoint.ranks.environment import scratch
from unbroken.cluster.contract import Request
from unbroken.cluster.local_events import LocalCluster
from unbroken.errors import UnsafeFile
from unbroken.evaluate.model.cache import Places
from unbroken.private import private_folder, read_secret, write_secret
from unbroken.progress import page


@pytest.fixture(params=[0o000, 0o022, 0o277])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_private_folder_is_0700_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    made = private_folder(tmp_path / "a" / "b")
    assert mode(made) == mode(made.parent) == 0o700
    made.chmod(0o755)
    assert mode(private_folder(made)) == 0o700


def test_what_others_put_there_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "link").symlink_to(elsewhere)
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(UnsafeFile, match="no folder"):
            private_folder(tmp_path / name)
    if os.geteuid() != 0:
        pytest.skip("only root can make a folder that belongs to another user")
    os.chown(elsewhere, 64_123, 64_123)
    with pytest.raises(UnsafeFile, match="belongs to another user"):
        private_folder(elsewhere)


def test_keeper_pages_and_copies_lie_in_private_folders(
    tmp_path: Path, umask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A Unix socket's path is short, and a test's folder is not.
    with tempfile.TemporaryDirectory(prefix="ub-") as short:
        monkeypatch.setenv("UNBROKEN_SCRATCH", short)
        keeper = scratch("/checkpoints", "node")
        assert mode(keeper) == mode(keeper.parent) == 0o700
    page.create(tmp_path / "pages" / "rank-0", rank=0, attempt=1)
    assert mode(tmp_path / "pages") == 0o700


def test_a_run_and_a_copy_in_shared_memory_are_private(tmp_path: Path, umask: int) -> None:
    from unbroken.evaluate.model.cache import take_reference
    from unbroken.evaluate.model.sources import FolderSource, hash_model

    os.umask(0o022)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.bin").write_bytes(b"x" * 100)
    source = FolderSource(tmp_path / "model")
    manifest = hash_model(source, tmp_path / "memo")
    os.umask(umask)
    root = Places(tmp_path / "shm", ()).roots()[0][0]
    held = take_reference(source, manifest, Places(tmp_path / "shm", ()), watcher=False)
    assert mode(root) == 0o700
    held.release()
    cluster = LocalCluster("x" * 12)
    cluster._root = tmp_path / "unbroken-run"
    asyncio.run(cluster.acquire(Request(1)))
    assert mode(tmp_path / "unbroken-run") == 0o700


def test_a_secret_is_written_for_its_owner_alone(tmp_path: Path, umask: int) -> None:
    if umask == 0o277:
        pytest.skip("nobody could replace a file of their own")
    path = tmp_path / "key"
    path.write_text("planted")
    path.chmod(0o666)
    with open(path) as planted:
        write_secret(path, b"secret")
        assert planted.read() == "planted"
    assert (mode(path), read_secret(path)) == (0o600, b"secret")
    assert [p.name for p in tmp_path.iterdir()] == ["key"]


@pytest.mark.parametrize("loose", [0o640, 0o604, 0o644, 0o660, 0o602, 0o601])
def test_a_loose_key_file_is_refused(tmp_path: Path, loose: int) -> None:
    path = tmp_path / "key"
    write_secret(path, b"secret")
    path.chmod(loose)
    with pytest.raises(UnsafeFile, match=f"chmod 600 {path}"):
        read_secret(path)


def test_a_planted_key_file_is_refused(tmp_path: Path) -> None:
    write_secret(tmp_path / "real", b"secret")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OSError):
        read_secret(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UnsafeFile, match="plain file"):
        read_secret(tmp_path / "pipe")
    if os.geteuid() != 0:
        pytest.skip("only root can make a file that belongs to another user")
    os.chown(tmp_path / "real", 64_123, 64_123)
    with pytest.raises(UnsafeFile, match="belongs to another user"):
        read_secret(tmp_path / "real")
    os.chown(tmp_path, 64_123, 64_123)  # who gave us the folder may give us the file
    assert read_secret(tmp_path / "real") == b"secret"


def test_every_folder_of_ours_in_shared_memory_is_made_private() -> None:
    """`mkdir` beside a name of /dev/shm or the temporary folder is how one is forgotten."""
    source = Path(page.__file__).resolve().parents[1]
    for name in ("cluster/local.py", "recover/node/agent.py", "progress/page.py", "checkpoint/keeper/__main__.py",
                 "checkpoint/ranks/environment.py", "evaluate/model/cache.py"):  # fmt: skip
        tree = ast.parse((source / name).read_text())
        made = [
            ast.unparse(n.func.value) for n in ast.walk(tree)
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "mkdir"
        ]  # fmt: skip
        assert set(made) <= {"log.parent"}, (name, made)
