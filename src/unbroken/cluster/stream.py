"""Events to several readers, none of which misses any: what a backend of `contract.Cluster` publishes through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

from .contract import Event


class EventStream:
    """Hands each event to every reader, in order. `current` makes the events that tell a new reader what is already so."""

    def __init__(self, current: Callable[[], Iterable[Event]] = tuple) -> None:
        self._current = current
        self._readers: set[asyncio.Queue[Event | None]] = set()
        self.closed = False

    def publish(self, event: Event) -> None:
        """Adds an event, at once and without waiting for a reader. Does nothing once closed."""
        for reader in self._readers:
            reader.put_nowait(event)

    def read(self) -> AsyncIterator[Event]:
        """A new reader. It hears of everything from this call on, not only from its first step."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        for event in self._current():
            queue.put_nowait(event)
        if self.closed:
            queue.put_nowait(None)
        else:
            self._readers.add(queue)
        return self._follow(queue)

    async def _follow(self, queue: asyncio.Queue[Event | None]) -> AsyncIterator[Event]:
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._readers.discard(queue)

    def close(self) -> None:
        """Ends all readers after what they have not read yet."""
        self.closed = True
        for reader in self._readers:
            reader.put_nowait(None)
        self._readers.clear()
