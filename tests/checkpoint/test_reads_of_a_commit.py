"""What keepers read of a commit grows with the ranks, not with ranks times nodes."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from unbroken.checkpoint.format import layout as arena
from unbroken.checkpoint.format.manifest import FileRecord, PartManifest, Sharding, data_name, tensor_part
from unbroken.checkpoint.keeper.buffers.holdings import Buffer, Holdings, Snapshot, SnapshotId
from unbroken.checkpoint.keeper.durability import pending
from unbroken.checkpoint.keeper.durability.writing import Writing
from unbroken.checkpoint.storage.posix import PosixStorage

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


def commit_with(
    nodes: int, per_node: int, root: Path, *, without: int | None = None
) -> tuple[dict[str, int], int]:
    """What the keepers of so many nodes read until all of them know that it is durable, and how many say so. The keeper of
    node `without` writes its shares, and is gone before it could commit."""
    layout = arena.plan([arena.TensorSpec("data", "U8", (SIZE,))])
    data = memoryview(layout.header() + bytes(layout.file_bytes - layout.data_start))
    seen = {"reads": 0, "bytes": 0}
    keepers, events = [], []
    for node in range(nodes):
        heard: list[dict[str, Any]] = []
        changed = threading.Condition()
        w = Writing(
            lambda _: Counted(root, seen), Holdings(1 << 30, lambda b: None), changed, heard.append,
            lambda b, n: data[:n], node=f"n{node}", writers=1,
        )  # fmt: skip
        keepers.append(w)
        events.append(heard)
    world = nodes * per_node
    if without is not None:
        keepers[without].gate = lambda snapshot_id, job=None: None  # type: ignore[method-assign]
        keepers[without]._poll = lambda watch: setattr(watch, "next_poll", time.monotonic() + 600)  # type: ignore[method-assign]
    for node, w in enumerate(keepers):
        with w.changed:
            for rank in range(node * per_node, (node + 1) * per_node):
                w.submit(
                    Buffer(
                        rank,
                        rank,
                        layout.file_bytes,
                        -1,
                        state="finalized",
                        snapshot=snapshot(rank, world, layout),
                    )
                )

    def durable(heard: list[dict[str, Any]]) -> bool:
        return any(e["event"] == "durable" for e in heard)

    expected = [h for i, h in enumerate(events) if i != without]
    deadline = threading.Event()
    for _ in range(600):
        if all(durable(h) for h in expected):
            break
        deadline.wait(0.05)
    for w in keepers:
        w.end()
    assert not [e for h in events for e in h if e["event"] == "failed"]
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
