"""One node as the supervisor knows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ....cluster.clocks import ClockOffset, Moment
from ....cluster.hello import Hello
from ....link.bounds import Message
from ...wire import Link
from ..attempt.outcome import NodeEnd
from .received import clock_of

LEASE_MARGIN_S = 2.0
_SILENT_LEAST_S = 2.0
_WITH_ITS_AGENT_S = 0.3
"""A node whose agent has ended is reported as lost within so much, if it is; else it is the agent alone."""


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
    facts: Hello | None = None
    """What its agent says that the node is; None of an agent of an earlier version, and before one has come."""
    restarted: NodeEnd | None = None
    """What is left of it where another agent came than the one that had the attempt's ranks, and nobody had missed that."""
    waits: Message | None = None
    """Its keeper's snapshot that waits for a storage that refuses."""
    launch: str | None = None
    exited: float | None = None
    """When its agent ended, where none has come up since."""
    how_ended: str = ""
    """What was heard last of the end of its agent."""
    agent_before: str = ""
    """How the agent before this one ended, where another one came since an attempt was launched there; its warm processes went with it."""
    gone: str = ""
    """Why the cluster says that it is gone with its memory, where no agent has come up since."""
    unreachable: str = ""
    """Why the cluster cannot reach it, where nothing was heard since."""
    usable: bool = True
    """Whether an agent can be started there: not on a host that is lost and has not returned."""
    returned: bool = False
    """Whether the cluster has said that it can be used again, since it was given up."""
    preempted: float | None = None
    """When it will be taken away, on the monotonic clock."""
    preempted_for: str = ""
    clock: ClockOffset = field(default_factory=ClockOffset)
    """How far its monotonic clock is from the supervisor's."""
    wall_clock: ClockOffset = field(default_factory=ClockOffset)
    """How far its time of day, which logs carry, is from the supervisor's."""

    @property
    def up(self) -> bool:
        """Whether its agent has a link that stands, heard from or not, and nobody says that the node is gone."""
        return (
            self.state == "up" and not self.gone and self.link is not None and not self.link.closed.is_set()
        )

    def judge(self, now: float, lease_s: float) -> NodeEnd | None:
        """What is left of it where it may be lost; None while it may still answer."""
        if self.gone:
            return NodeEnd.GONE
        if self.restarted is not None:
            return self.restarted
        if self.exited is not None:
            return NodeEnd.AGENT_LOST if now - self.exited > _WITH_ITS_AGENT_S else None
        if now - self.heard >= lease_s + LEASE_MARGIN_S or (
            self.unreachable and self.is_silent(now, lease_s)
        ):
            return NodeEnd.UNREACHABLE
        return None

    def is_silent(self, now: float, lease_s: float) -> bool:
        """Whether nothing was heard of it for so long that nobody would wait for its answer.

        What the cluster alone does not reach answers as long as it beats: its link is another way.
        """
        # Beats come eight times in a lease: two that are missing are more than a busy moment.
        return now - self.heard > (max(_SILENT_LEAST_S, lease_s / 4) if self.unreachable else lease_s)

    @property
    def has_folder(self) -> bool:
        """Whether the node has the run directory."""
        return bool(self.hello.get("folder", True))

    @property
    def keeper_bytes(self) -> int:
        """What its keeper may hold of snapshots, as its agent said last; 0 where that is not known."""
        return int(self.hello.get("keeper_bytes", 0))

    def take_clocks(self, message: Message) -> None:
        """Takes what its agent says of its clocks, which was checked."""
        self.clock = clock_of(message.get("clock"))
        self.wall_clock = clock_of(message.get("wall_clock"))

    def translate(self, at: Sequence[float] | None) -> Moment | None:
        """When something was that its agent saw between two times of its own, on the supervisor's monotonic clock; None
        where the agent tells no times."""
        if at is None:
            return None
        return Moment(self.clock.translate(at[0]).earliest, self.clock.translate(at[1]).latest)
