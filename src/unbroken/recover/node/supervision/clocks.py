"""How far a node's clocks are from its supervisor's: measured before its agent says hello, and with every lease."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Any

from ....cluster.clocks import ClockOffset, Exchange, measure
from ....errors import RunError
from ...wire import Link, Message

_KEPT = 8
"""Exchanges of which the best is used: an old one has had time to become wrong."""


class NodeClocks:
    """`monotonic` relates this node's monotonic clock to the supervisor's, `wall` its time of day."""

    def __init__(self) -> None:
        self._exchanges: tuple[deque[Exchange], deque[Exchange]] = (deque(maxlen=_KEPT), deque(maxlen=_KEPT))
        self._told: Message = {}

    async def ask(self, link: Link) -> None:
        """Asks the supervisor what its clocks show; one of an older version that does not answer leaves them unknown."""
        sent = (time.monotonic(), time.time())
        try:
            self.take(sent, await link.call("clock", timeout=10))
        except RunError:
            return

    def take(self, sent: tuple[float, float], answer: Message) -> None:
        """Takes what the supervisor's clocks showed while it answered what was `sent` then, by this node's."""
        now = (time.monotonic(), time.time())
        for i, key in enumerate(("monotonic", "wall")):
            if isinstance(there := answer.get(key), int | float):
                self._exchanges[i].append(Exchange(sent[i], float(there), now[i]))

    def as_message(self) -> Message:
        """Both offsets; null where nothing is known."""
        self._told = {
            "clock": _encode(measure(self._exchanges[0])),
            "wall_clock": _encode(measure(self._exchanges[1])),
        }
        return self._told

    def news(self) -> Message:
        """Both offsets, where they are not as they were when they were told last; else nothing."""
        before = self._told
        now = self.as_message()
        return now if now != before else {}


def _encode(offset: ClockOffset) -> dict[str, Any] | None:
    return None if math.isinf(offset.uncertainty_s) else vars(offset).copy()
