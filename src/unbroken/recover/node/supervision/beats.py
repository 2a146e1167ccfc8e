"""An agent's beats over one link, and what their answers bring: a lease, and how far the node's clocks are off."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ...wire import Link, Message
from .clocks import NodeClocks

_EVERY_LEAST_S = 0.2


class Beats:
    """`lease_s` is how long the last lease was to hold, in seconds."""

    def __init__(self, clocks: NodeClocks, lease_s: float = 15.0) -> None:
        self.clocks, self.lease_s = clocks, lease_s
        self._sent: dict[int, tuple[float, float]] = {}
        """Each beat that waits for its answer -> when it was sent, on the monotonic clock and by the time of day."""

    @property
    def unanswered(self) -> int:
        """Each is answered at once: two that wait say that nobody answers."""
        return len(self._sent)

    async def send(self, link: Link, keeper_is_alive: Callable[[], bool]) -> None:
        """Sends one eight times in a lease, until the link closes."""
        number = 0
        while not link.closed.is_set():
            number += 1
            self._sent[number] = (time.monotonic(), time.time())
            link.tell(op="beat", number=number, keeper=keeper_is_alive())
            await asyncio.sleep(max(_EVERY_LEAST_S, self.lease_s / 8))

    def take(self, answer: Message) -> float | None:
        """Until when the lease of an answer holds, on the monotonic clock; None where nobody had asked for it.

        From the moment the beat was sent: the supervisor counts from its answer, which is later.
        """
        sent = self._sent.pop(answer["number"], None)
        if sent is None:
            return None
        for old in [n for n in self._sent if n < answer["number"]]:
            del self._sent[old]
        self.clocks.take(sent, answer)
        self.lease_s = answer["seconds"]
        return sent[0] + self.lease_s
