"""The blocks that a worker has still to answer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """One block of the queue."""

    assignment: int
    task: str
    block: int
    crowd: int = 0
    """With at most so many in flight, itself included: a worker died with it among others. 0: any number."""


class Queue:
    """Blocks to answer, shared by the reader thread and the main one."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._stop = ""

    def extend(self, items: Sequence[Item]) -> None:
        """Appends."""
        with self._changed:
            self._items.extend(items)
            self._changed.notify()

    def give_up(self, blocks: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Takes these out, as far as they have not begun, and returns them."""
        wanted = set(blocks)
        with self._changed:
            given = [(i.task, i.block) for i in self._items if (i.task, i.block) in wanted]
            self._items = deque(i for i in self._items if (i.task, i.block) not in wanted)
        return given

    def stop(self, why: str) -> None:
        """No further block is taken."""
        with self._changed:
            self._stop = self._stop or why
            self._changed.notify()

    def take(self) -> Item | None:
        """The next block, as soon as there is one; None when stopped."""
        with self._changed:
            while not self._stop and not self._items:
                self._changed.wait()
            return None if self._stop else self._items.popleft()

    def take_if(self, may: Callable[[Item], bool], *, wait: bool) -> Item | None:
        """The next block, if it may be begun now; with `wait`, as soon as there is one. None also when stopped."""
        with self._changed:
            while wait and not self._stop and not self._items:
                self._changed.wait()
            if self._stop or not self._items or not may(self._items[0]):
                return None
            return self._items.popleft()

    @property
    def why(self) -> str:
        """Why it was stopped."""
        return self._stop
