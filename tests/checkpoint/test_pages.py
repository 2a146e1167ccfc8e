"""The pages of the buffers are there before the first save: a training must not enter them one by one."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch

from tests.support.keepers import until
from unbroken import Checkpointer
from unbroken.checkpoint.client.rank_buffer import RankBuffer

SIZE = 24 << 20


def entered() -> int:
    """Bytes of memfd pages in this process's page table."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            ours = "/memfd:" in line
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_the_first_save_finds_its_pages(own_keepers: Path, tmp_path: Path) -> None:
    state = {"w": torch.randn(SIZE // 4)}
    before = entered()
    c = Checkpointer(tmp_path / "c", snapshot_every=1, persist_every=1000, memory="256MiB")
    c.restore(state)
    until(lambda: all(s.entered for s in c.memory.buffers.values()))
    buffers = len(c.memory.buffers)
    assert buffers >= 2
    until(lambda: entered() - before >= buffers * SIZE)
    c.save(1, state)
    c.close()


def test_pages_that_the_keeper_could_not_have_are_not_taken_behind_its_back(
    own_keepers: Path, tmp_path: Path
) -> None:
    c = Checkpointer(tmp_path / "c", snapshot_every=1, persist_every=1000, memory="256MiB")
    c.save(1, {"w": torch.zeros(8)})
    fd = os.memfd_create("unfilled")
    os.ftruncate(fd, SIZE)
    buffer = RankBuffer(99, SIZE, fd, mmap.mmap(fd, SIZE))
    c.memory.buffers[99] = buffer
    before = entered()
    c.memory._event({"event": "ready", "buffer": 99, "why": "cannot be had"})
    c.memory._enter([buffer])
    assert buffer.unfilled
    assert entered() == before
    c.close()


def test_buffers_that_go_while_their_pages_are_entered(own_keepers: Path, tmp_path: Path) -> None:
    """Another shape at once after the first: the old buffers are unmapped under the thread."""
    c = Checkpointer(tmp_path / "c", snapshot_every=1, persist_every=1000, memory="256MiB")
    for step, size in enumerate((SIZE, SIZE // 2, SIZE, SIZE // 3), 1):
        state = {"w": torch.full((size // 4,), float(step))}
        c.save(step, state).host.result(30)
    state["w"].zero_()
    assert c.restore(state) is not None
    assert bool((state["w"] == 4).all())
    c.close()
