"""How an attempt ended, as the watch over it saw it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ....detect import Hang, ProcessInfo
from ....diagnose import CorruptionFact, LossFact


class NodeEnd(StrEnum):
    """What is left of a node that the attempt has lost."""

    AGENT_LOST = "agent_lost"
    """Its agent is gone; its keeper, and so its memory, is there."""
    GONE = "gone"
    """Its agent and its keeper are gone."""
    UNREACHABLE = "unreachable"
    """It does not answer: what runs there is fenced, by force or by its lease."""


@dataclass(frozen=True)
class AttemptOutcome:
    """`kind`: completed, interrupted, preempted, slow, amended, resized, failed, hung, loss_spike, corrupted, lease, agent_lost or node_lost; supervisor_lost and start_failed where
    there was no watch; renumbered or refused where the attempt could not keep its checkpoints in its place.

    `nodes` are those that were lost, `processes` the ranks' stacks.
    """

    kind: str
    nodes: Mapping[str, NodeEnd] = field(default_factory=dict)
    hang: Hang | None = None
    processes: Mapping[int, ProcessInfo] = field(default_factory=dict)
    error: str = ""
    loss: LossFact | None = None
    corruption: CorruptionFact | None = None

    @property
    def lost_nodes(self) -> list[str]:
        """The nodes that are gone with their memory, or cannot be reached."""
        return [n for n, end in self.nodes.items() if end is not NodeEnd.AGENT_LOST]


def name_loss(nodes: Mapping[str, NodeEnd]) -> str:
    """The kind of an outcome that came of lost nodes."""
    return "node_lost" if any(end is not NodeEnd.AGENT_LOST for end in nodes.values()) else "agent_lost"
