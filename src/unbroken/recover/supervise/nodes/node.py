"""One node as the supervisor knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....cluster import Ended
from ....link.bounds import Message
from ...wire import Link


@dataclass
class Node:
    """`state` is down, starting, up, or lost; `granted` and `heard` the monotonic times of its last lease and message."""

    name: str
    state: str = "down"
    link: Link | None = None
    hello: Message = field(default_factory=dict)
    granted: float = 0.0
    heard: float = 0.0
    parked: str = ""
    waits: Message | None = None
    """Its keeper's snapshot that waits for a storage that refuses."""
    left: Ended = field(default_factory=Ended)
    """What ending ranks came to that were held in another way than now, when its agent was launched."""

    @property
    def up(self) -> bool:
        return self.state == "up" and self.link is not None and not self.link.closed.is_set()
