"""The keeper's checksums of what is in memory hold up no rank: what is superseded is given up where a rank waits."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from tests.support.keepers import until
from unbroken.checkpoint.format.manifest import CHUNK_BYTES
from unbroken.checkpoint.keeper.buffers.holdings import FINALIZED, Buffer, Snapshot, SnapshotId
from unbroken.checkpoint.keeper.clients import Client, KeeperSettings, Wait
from unbroken.checkpoint.keeper.durability import commit
from unbroken.checkpoint.keeper.durability.commit import chunk_digests
from unbroken.checkpoint.keeper.flushing import flush
from unbroken.checkpoint.keeper.keeping import Keeper
from unbroken.checkpoint.keeper.operations import OPERATIONS


def held(keeper: Keeper, number: int, step: int, size: int) -> Buffer:
    """A buffer of rank 0 with a whole snapshot."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, size)
    b = Buffer(number, 0, size, fd, ready=True)
    keeper.holdings.buffers[number] = b
    keeper.holdings.finalize(b, Snapshot(SnapshotId(1, step), 0, 1, size, {}))
    keeper.changed.notify_all()
    return b


@pytest.fixture
def keeper(tmp_path: Path) -> Keeper:
    settings = KeeperSettings(tmp_path / "socket", "node-000", "run", str(tmp_path / "checkpoints"), 1 << 40)
    return Keeper(settings, OPERATIONS, flush)


def test_the_buffer_of_a_superseded_snapshot_is_given_back_in_the_middle(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    summed, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def slow(data: memoryview) -> str:
        summed.release()
        assert go_on.acquire(timeout=60)
        return "0" * 16

    monkeypatch.setattr(commit, "digest", slow)
    with keeper.changed:
        first = held(keeper, 1, step=5, size=8 * CHUNK_BYTES)
    assert summed.acquire(timeout=60)  # its first chunk is being summed
    with keeper.changed:
        assert first.pins == 1 and not keeper.holdings.may_reuse(first)
        second = held(keeper, 2, step=6, size=CHUNK_BYTES)
    go_on.release()
    assert summed.acquire(
        timeout=60
    )  # nobody waits for it: it may still be restored from, so it is summed on
    with keeper.changed:
        keeper.waits.append(Wait(Client(MagicMock(), "rank", 0, 0), 1, 1 << 60))
    go_on.release()  # only this second chunk of eight
    until(lambda: keeper.holdings.may_reuse(first))
    assert first.snapshot is not None and first.snapshot.checksums is None
    # The newer one is summed instead, to its end.
    go_on.release()
    until(lambda: second.snapshot is not None and second.snapshot.checksums is not None)
    keeper.stop.set()


def test_a_snapshot_that_stays_the_newest_is_summed_whole(keeper: Keeper) -> None:
    with keeper.changed:
        b = held(keeper, 1, step=5, size=2 * CHUNK_BYTES + 1)
    until(lambda: b.snapshot is not None and b.snapshot.checksums is not None)
    assert b.state == FINALIZED and b.pins == 0 and b.snapshot is not None
    view = memoryview(bytes(2 * CHUNK_BYTES + 1))
    assert b.snapshot.checksums == chunk_digests(view)
    keeper.stop.set()
