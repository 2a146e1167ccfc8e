"""The memory of a node's snapshots: buffers made within what the machine has, given pages, mapped and freed.

What lies in which buffer, and which may be used again, is in holdings.py.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import secrets
import threading
from collections.abc import Callable

from ....errors import DoesNotFit
from ....machine import available_memory
from ....units import Bytes
from ...device.host_memory import fill_pages
from ...format.layout import ALIGN
from ..clients import KeeperSettings, log
from .holdings import CLAIMED, Buffer, Holdings

FILLERS = 3
"""Filling pages is zeroing them, at a few GB/s a thread; several buffers go side by side."""


class NodeMemory:
    """The buffers of a keeper. `changed` guards all of it and is held by whoever calls, but for `view`, which takes it.

    `filled(buffer, why)` is called with it held once a new buffer has its pages, or (`why`) there are none for it.
    """

    def __init__(
        self, settings: KeeperSettings, changed: threading.Condition, filled: Callable[[Buffer, str], None]
    ) -> None:
        self.settings, self.changed, self.filled = settings, changed, filled
        self.holdings = Holdings(settings.budget, self._free)
        self._maps: dict[int, mmap.mmap] = {}
        # Never the number of a buffer of another keeper: a late answer must not name the wrong memory.
        self._ids = itertools.count(secrets.randbits(40) << 10)
        self._to_fill: list[Buffer] = []

    def start(self) -> None:
        """Begins to fill new buffers."""
        for _ in range(FILLERS):
            threading.Thread(target=self._fill_loop, daemon=True).start()

    def create(self, rank: int, size: int) -> Buffer:
        """A new buffer, which gets its pages soon. Raises DoesNotFit where the machine has not that much memory left."""
        room = available_memory()
        if room is not None and size > room:
            raise DoesNotFit(
                f"a buffer of {Bytes(size)} does not fit: {Bytes(room)} of memory are available",
                where=f"{self.settings.node}, rank {rank}",
                hint="Give the job more memory, or the keeper a smaller budget",
            )
        fd = os.memfd_create(f"unbroken-rank-{rank}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
        except OSError:
            os.close(fd)
            raise
        b = Buffer(next(self._ids), rank, size, fd)
        self.holdings.buffers[b.id] = b
        self._to_fill.append(b)
        return b

    def take_over(self, rank: int, fd: int) -> Buffer:
        """The buffer of another keeper, which has its pages; the descriptor is this one's now."""
        b = Buffer(next(self._ids), rank, os.fstat(fd).st_size, fd, ready=True)
        self.holdings.buffers[b.id] = b
        return b

    def room_for(self, rank: int, size: int, replica: bool, *, only_free: bool = False) -> Buffer | None:
        """A buffer to receive a snapshot into, claimed: one that is needed no more (with `only_free` one that holds nothing),
        else a new one in the budget."""
        if not replica:
            b = self.holdings.claim(rank, size, only_free=only_free)
            # In whole pages, as a rank asks for its buffers: then it is one of those.
            pages = -(-size // ALIGN) * ALIGN
            if b is None and self.holdings.used() + pages <= self.settings.budget:
                b = self.create(rank, pages)
                b.state = CLAIMED
            return b
        theirs = [b for b in self.holdings.buffers.values() if b.replica and b.rank == rank]
        newest = max((b.snapshot.snapshot_id for b in theirs if b.snapshot), default=None)
        for b in theirs:
            if (
                b.bytes >= size
                and not b.pins
                and b.state != CLAIMED
                and (b.snapshot is None or b.snapshot.snapshot_id != newest)
            ):
                b.state, b.snapshot = CLAIMED, None
                return b
        for b in [b for b in theirs if b.bytes < size and not b.pins and b.state != CLAIMED]:
            self.holdings.drop(b)
        if len(theirs) >= 2 or self.holdings.used() + size > self.settings.budget:
            return None
        b = self.create(rank, size)
        b.replica, b.state = True, CLAIMED
        return b

    def view(self, b: Buffer, size: int) -> memoryview:
        """The first `size` bytes of a buffer."""
        with self.changed:
            if b.id not in self._maps:
                self._maps[b.id] = mmap.mmap(b.fd, b.bytes, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            return memoryview(self._maps[b.id])[:size]

    def _free(self, b: Buffer) -> None:
        if (m := self._maps.pop(b.id, None)) is not None:
            with contextlib.suppress(BufferError):
                m.close()
        os.close(b.fd)

    def _fill_loop(self) -> None:
        """Gives new buffers their pages, so that neither the trainer's copies nor its registration fault them in."""
        while True:
            with self.changed:
                while not self._to_fill:
                    self.changed.wait()
                b = self._to_fill.pop(0)
                if b.id not in self.holdings.buffers:
                    continue
                b.pins += 1
                fd = os.dup(b.fd)
            why = ""
            try:
                fill_pages(fd, b.bytes)
            except OSError as e:
                why = f"the memory of a buffer of {Bytes(b.bytes)} cannot be had: {e.strerror}"
                log(why)
            finally:
                os.close(fd)
            with self.changed:
                b.pins -= 1
                b.ready = not why
                self.filled(b, why)
                self.changed.notify_all()
