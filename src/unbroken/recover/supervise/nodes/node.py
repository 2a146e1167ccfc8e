"""One node as the supervisor knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....link.bounds import Message
from ...wire import Link


@dataclass
class Node:
    """`state` is down, starting, up, or lost; `granted` and `heard` the monotonic times of its last lease and message.

    `launch` is the agent that the cluster says runs there; None where it says that none does.
    """

    name: str
    state: str = "down"
    link: Link | None = None
    hello: Message = field(default_factory=dict)
    granted: float = 0.0
    heard: float = 0.0
    parked: str = ""
    waits: Message | None = None
    """Its keeper's snapshot that waits for a storage that refuses."""
    launch: str | None = None
    exited: float | None = None
    """When its agent ended, where none has come up since."""
    gone: str = ""
    """Why the cluster says that it is gone with its memory, where no agent has come up since."""
    unreachable: str = ""
    """Why the cluster cannot reach it, where nothing was heard since."""
    usable: bool = True
    """Whether an agent can be started there: not on a host that is lost and has not returned."""
    preempted: float | None = None
    """When it will be taken away, on the monotonic clock."""
    preempted_for: str = ""

    @property
    def up(self) -> bool:
        """Whether its agent has a link that stands, heard from or not, and nobody says that the node is gone."""
        return (
            self.state == "up" and not self.gone and self.link is not None and not self.link.closed.is_set()
        )
