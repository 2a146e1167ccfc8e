"""The contract of a cluster backend, the same for local, Slurm and Kubernetes.

Four nouns: an *allocation* names nodes and spares; a *launch* starts the agent of one node; the *watcher* says
whether a node is alive, provably gone or out of sight; a *cordon* takes a node out of use, with an owner, a
reason and an expiry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from .holding.ownership import Ended


class NodeState(StrEnum):
    """What the watcher knows of a node."""

    ALIVE = "alive"
    """Something of the run is left on it: an agent, a keeper or a rank."""
    AGENT_LOST = "agent_lost"
    """Its agent is gone, its keeper (and so its memory) is there."""
    GONE = "gone"
    """Its agent and its keeper are gone; `clear` ends what its ranks have left, and says whether that is proven."""
    UNREACHABLE = "unreachable"
    """Cannot be asked: what runs there must be fenced by lease and seal."""


@dataclass(frozen=True)
class Allocation:
    """The nodes that a run may use, in order: the first ones train, the others are spares."""

    nodes: tuple[str, ...]
    spares: tuple[str, ...]


@dataclass(frozen=True)
class NodeHandle:
    """A launched agent. `pid` is 0 where the backend cannot know it; `left` is what ending the ranks came to that an
    earlier supervisor held in another way."""

    node: str
    pid: int
    scratch: Path
    left: Ended = field(default_factory=Ended)


class Backend(Protocol):
    """What the supervisor needs of a cluster."""

    def check_fits(self, nodes: int, nproc: int, spares: int) -> None:
        """Raises DoesNotFit when so many ranks cannot be held."""

    def allocate(self, nodes: int, spares: int) -> Allocation:
        """The nodes of this run; the same ones when asked again."""

    def launch(self, node: str, argv: Sequence[str], env: Mapping[str, str], log: Path) -> NodeHandle:
        """Starts the agent of a node. Raises OSError."""

    def keeper_memory(self, nodes: int) -> int:
        """Bytes that each node's keeper may hold where the user did not say; `nodes` counts spares too."""

    def scratch(self, node: str) -> Path:
        """The node's own volatile folder, for sockets and progress pages."""

    def address(self, node: str) -> str:
        """The address at which the node's ranks reach each other."""

    def devices(self, slot: int, nproc: int, slots: int) -> str | None:
        """CUDA_VISIBLE_DEVICES of the ranks in this slot; None leaves it as it is."""

    def state(self, node: str) -> NodeState:
        """What the watcher knows of a node now."""

    def describe_ownership(self) -> str:
        """How the processes of the run are held on its nodes, in words. Raises RunError where the wanted way does not work."""

    def ownership(self) -> str:
        """The same for an agent: the value of its `--ownership`."""

    def agent_state(self, node: str) -> str:
        """What the node's agent is doing, in words, where it can be seen; "" where it cannot."""

    def clear(self, node: str) -> Ended:
        """Kills whatever of this run is left on a reachable node, frees its scratch, and says whether that is proven.

        A node with survivors of kill -9 (D state) must be parked.
        """

    def forget(self, node: str) -> None:
        """A person has made sure that nothing is left on a node whose end could not be proven."""

    def sweep(self, keep: Sequence[str] = ()) -> Ended:
        """Clears every node of which something is left here, but for those to `keep`."""

    def can_return(self, node: str) -> bool:
        """Whether a lost node may be launched again (a virtual node may; a dead host may not)."""
