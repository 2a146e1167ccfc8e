"""What keepers read of a commit grows with the ranks, not with ranks times nodes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from unbroken.checkpoint.format import layout as arena
from unbroken.checkpoint.format.manifest import FileRecord, PartManifest, Sharding, data_name, tensor_part
from unbroken.checkpoint.keeper.buffers.holdings import Buffer, Holdings, Snapshot, SnapshotId
from unbroken.checkpoint.keeper.durability import pending
from unbroken.checkpoint.keeper.durability.pending import PendingCheckpoint
from unbroken.checkpoint.keeper.durability.writing import Writing
from unbroken.checkpoint.storage.base import Storage
from unbroken.checkpoint.storage.posix import PosixStorage
from unbroken.errors import StorageError

SIZE = 4096


class Counted(PosixStorage):
    """Counts what is read of parts, by all keepers."""

    guard = threading.Lock()

    def __init__(self, root: Path, seen: dict[str, int]) -> None:
        super().__init__(root)
        self.seen = seen

    def read(self, name: str) -> bytes:
        data = bytes(super().read(name))
        if "/rank-" in name:
            with self.guard:
                self.seen["reads"] += 1
                self.seen["bytes"] += len(data)
        return data


def snapshot(rank: int, world: int, layout: arena.Layout) -> Snapshot:
    tensor = tensor_part(rank, layout, "data", "uint8", Sharding.whole((SIZE,)))
    part = PartManifest(
        "r", 1, 5, rank, world, {"data": tensor}, FileRecord(data_name(rank), layout.file_bytes, ())
    )
    body: dict[str, Any] = {
        k: v for k, v in json.loads(part.encoded).items() if k not in ("kind", "schema", "file", "check")
    }
    return Snapshot(SnapshotId(1, 5), rank, world, layout.file_bytes, body)


LAYOUT = arena.plan([arena.TensorSpec("data", "U8", (SIZE,))])
DATA = memoryview(LAYOUT.header() + bytes(LAYOUT.file_bytes - LAYOUT.data_start))


def keeper(node: int, storage: Storage) -> tuple[Writing, list[dict[str, Any]]]:
    """What writes and commits of one node's keeper, and what it says."""
    heard: list[dict[str, Any]] = []
    w = Writing(
        lambda _: storage, Holdings(1 << 30, lambda b: None), threading.Condition(), heard.append,
        lambda b, n: DATA[:n], node=f"n{node}", writers=1,
    )  # fmt: skip
    return w, heard


def submit(w: Writing, ranks: range, world: int) -> None:
    with w.changed:
        for rank in ranks:
            whole = snapshot(rank, world, LAYOUT)
            w.submit(Buffer(rank, rank, LAYOUT.file_bytes, -1, state="finalized", snapshot=whole))


def until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def commit_with(
    nodes: int, per_node: int, root: Path, *, without: int | None = None
) -> tuple[dict[str, int], int]:
    """What the keepers of so many nodes read until all of them know that it is durable, and how many say so. The keeper of
    node `without` writes its shares, and is gone before it could commit."""
    seen = {"reads": 0, "bytes": 0}
    made = [keeper(node, Counted(root, seen)) for node in range(nodes)]
    keepers = [w for w, _ in made]
    if without is not None:
        keepers[without].gate = lambda snapshot_id, job=None: None  # type: ignore[method-assign]
        keepers[without]._poll = lambda watch: setattr(watch, "next_poll", time.monotonic() + 600)  # type: ignore[method-assign]
    for node, w in enumerate(keepers):
        submit(w, range(node * per_node, (node + 1) * per_node), nodes * per_node)

    def durable(heard: list[dict[str, Any]]) -> bool:
        return any(e["event"] == "durable" for e in heard)

    expected = [heard for i, (_, heard) in enumerate(made) if i != without]
    until(lambda: all(durable(h) for h in expected))
    for w in keepers:
        w.end()
    assert not [e for _, heard in made for e in heard if e["event"] == "failed"]
    return seen, sum(durable(h) for h in expected)


def test_every_part_is_read_once_however_many_nodes_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "COMMITTER_S", 60.0)  # on a busy machine nobody takes over
    small, told = commit_with(2, 2, tmp_path / "small")
    large, told_of_large = commit_with(8, 2, tmp_path / "large")
    assert (told, told_of_large) == (2, 8)
    assert (small["reads"], large["reads"]) == (4, 16)
    assert large["bytes"] / small["bytes"] == pytest.approx(4, rel=0.1)


def test_another_keeper_commits_where_that_of_rank_0_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "COMMITTER_S", 0.1)
    _, told = commit_with(3, 1, tmp_path, without=0)
    assert told == 2


def names_listed(nodes: int, per_node: int, seconds: int) -> int:
    """How many names the keepers that do not commit read while they wait so long for a share that is late."""
    world, found = nodes * per_node, 0
    waiting = [
        PendingCheckpoint(
            SnapshotId(1, 5), world, 0.0, 0.0, shares=set(range(n * per_node, (n + 1) * per_node))
        )
        for n in range(1, nodes)
    ]
    for now in range(seconds):
        for watch in waiting:
            if watch.may_list(float(now)):
                watch.polled, found = float(now), found + world
    return found


def test_folders_are_listed_as_often_as_one_keeper_alone_would() -> None:
    small, large = names_listed(8, 8, 500), names_listed(64, 8, 500)
    assert large / small == pytest.approx(8, rel=0.15), "eight times the ranks, not 64 times the names"
    assert large <= 64 * 8 * 500 / pending.LISTING_S


class Refuses(PosixStorage):
    """Takes no data of rank 1."""

    def write(self, name: str, chunks: Iterable[Any], size: int) -> None:
        if "rank-00001" in name:
            raise StorageError("the disk is full")
        super().write(name, chunks, size)


def test_every_keeper_hears_of_a_failure_and_lists_no_folder_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "LISTING_S", 600.0)
    made = [keeper(node, Refuses(tmp_path)) for node in range(4)]
    for node, (w, _) in enumerate(made):
        submit(w, range(node, node + 1), 4)
    until(lambda: all(any(e["event"] == "failed" for e in heard) for _, heard in made))
    for w, _ in made:
        w.end()
    failed = [e for _, heard in made for e in heard if e["event"] == "failed"]
    assert [(e["rank"], e["refused"]) for e in failed] == [(1, True)] * 4
    assert all("the disk is full" in e["why"] for e in failed)
