"""The contract of a cluster, made of events: the same for local, hosts, Slurm, Kubernetes, and the fake in `testing`.

    acquire   asks for nodes; may stay pending for hours, may be cancelled, is asked again for replacements
    start     starts the agent of a node
    events    what the cluster reports of the nodes: nothing is polled
    fence     proves that nothing of the run is left on a node, or says by a deadline that it cannot
    cordon    takes a node out of use, with an owner, a reason and an expiry; release gives it back
    give_back returns nodes that the run needs no more

A cluster knows names of nodes, and whether something runs on them. What a node *is* (addresses, GPUs, memory, scratch,
interpreter) its agent says in its `hello`; how its ranks are started and ended is the agent's business. So a cluster
never looks at processes of the supervisor's own host, and nothing in an agent's command names its files.

Whoever implements it passes tests/cluster/contract.py, and is registered by name (`registry`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ..errors import RunError
from .clocks import Moment


class ClusterAway(RunError):
    """Nothing of the cluster answers now, which may be over in a moment: a run that goes on waits for that."""


class NodeRefuses(RunError):
    """A node lets nobody in, or does not run our program: a run that goes on does so with the others."""


@dataclass(frozen=True)
class Request:
    """Nodes that are wanted together.

    `nodes` train, `spares` wait beside them. `ranks_per_node` says how many GPUs, or processes, each has to take.
    `exclude` are nodes not to be given. `replaces` are nodes of this run that are lost: with them it asks for more
    nodes beside those that the run has, without them for all that it needs.
    """

    nodes: int
    spares: int = 0
    ranks_per_node: int = 1
    exclude: frozenset[str] = frozenset()
    replaces: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.nodes < 0 or self.spares < 0 or self.nodes + self.spares < 1 or self.ranks_per_node < 1:
            raise ValueError(f"nobody can be given {self.nodes} nodes and {self.spares} spares")


@dataclass(frozen=True)
class Allocation:
    """Nodes that a run may use, in order: `nodes` first, then `spares`. `ends` is when they are taken away, on the
    supervisor's monotonic clock; None where the cluster knows no end. `name` is what the cluster calls it (a job id). `notes`
    are what whoever gave the command should know before training starts, each in a sentence."""

    name: str
    nodes: tuple[str, ...]
    spares: tuple[str, ...] = ()
    ends: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def everything(self) -> tuple[str, ...]:
        return (*self.nodes, *self.spares)


@dataclass(frozen=True)
class AgentCommand:
    """What to start on a node: the Python module of the agent, with arguments.

    The cluster puts the node's own interpreter in front, in the user's image where there is one: the supervisor's
    interpreter, environment and working directory need not exist there. `environment` is added to what processes have
    on that node. `secret` comes to the agent on its standard input and nowhere else: arguments, environments and logs
    are read by others.
    """

    module: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    secret: bytes = field(default=b"", repr=False)


# --- events


@dataclass(frozen=True)
class Event:
    """Something that the cluster reports. `at`: when it was, on the supervisor's clock, as surely as the cluster knows."""

    at: Moment


@dataclass(frozen=True)
class Pending(Event):
    """A request waits. `why` is the cluster's own reason; `expected` when it may be granted, None where nobody knows."""

    request: Request
    why: str
    expected: float | None = None


@dataclass(frozen=True)
class NodeEvent(Event):
    """Something about one node."""

    node: str


@dataclass(frozen=True)
class Started(NodeEvent):
    """An agent runs. `launch` is what `start` returned for it. A new reader of events is first told of those that run
    already, also of ones that an earlier supervisor started."""

    launch: str


@dataclass(frozen=True)
class Exited(NodeEvent):
    """An agent's process ended; its keeper, and what its ranks started, may still be there. `code` or `signal`: how it
    ended, both None where the cluster cannot tell. Once for each launch, after its `Started`; a node that is lost may
    take its launches with it without one."""

    launch: str
    code: int | None = None
    signal: int | None = None


@dataclass(frozen=True)
class Lost(NodeEvent):
    """The node is gone, and what was in its memory. Where that is `proven` nothing of the run can run on it any more, and
    no fence has to be waited for. Once it can be used again, `Returned` follows."""

    why: str
    proven: bool = False


@dataclass(frozen=True)
class Unreachable(NodeEvent):
    """The cluster cannot reach the node: what runs there may go on, and stops by its lease only."""

    why: str


@dataclass(frozen=True)
class Returned(NodeEvent):
    """A node that was lost or could not be reached can be used again; whether it is the same is said by its agent."""


@dataclass(frozen=True)
class PreemptingAt(NodeEvent):
    """The node will be taken away at `deadline`, on the supervisor's clock: for a job of higher rank, or for repair."""

    deadline: float
    why: str = ""


@dataclass(frozen=True)
class EndingAt(Event):
    """An allocation, by name, will end at `deadline`. Reported when it comes near, and when it changes."""

    allocation: str
    deadline: float


# --- fences and cordons


@dataclass(frozen=True)
class Fenced:
    """What fencing a node came to. `proven`: nothing that the run had started there runs, nor will it ever write again.
    `why`, in words, where that is not proven; `survivors` names processes that outlived kill -9, as far as known."""

    proven: bool
    why: str = ""
    survivors: tuple[str, ...] = ()
    found: str = ""
    """What the node's agent was doing when it was ended, in words, where the cluster can see that."""


@dataclass(frozen=True)
class Cordon:
    """A node out of use. `owner` is who did it and may undo it; `expires` is in seconds since the Unix epoch (others
    read it too), None for never."""

    node: str
    owner: str
    reason: str
    expires: float | None = None

    def __post_init__(self) -> None:
        if not self.owner or not self.reason:
            raise ValueError(f"the cordon of {self.node} needs an owner and a reason: somebody will ask")

    def has_expired(self, now: float) -> bool:
        return self.expires is not None and self.expires <= now


class Cluster(Protocol):
    """A cluster as one run sees it. Every method may be called again with the same arguments, also by a successor.

    Methods raise RunError with what the cluster said; none waits without end but `acquire`, which is cancelled.
    """

    @property
    def socket_folder(self) -> Path | None:
        """Where all nodes are this machine: a folder of this user's alone for the supervisor's Unix socket. None where they
        may be others: then agents come over TLS, with the run's certificate, which is handed to them with `secret`."""

    @property
    def door_address(self) -> str:
        """Where nodes are other machines: this host's address as they reach it. "" for the one by which its routes reach the
        world."""

    def describe(self) -> str:
        """How processes are started and held here, in words for the terminal. Raises RunError where nothing works."""

    def check(self, request: Request) -> None:
        """Raises DoesNotFit, UsageError, RunError or MissingExtra where such a request can never be granted here, in words with
        what to do; ClusterAway where nothing answers, NodeRefuses where a node is of no use: of a run that goes on the former is
        asked again, the latter passed over. Called before anything of a run is written, outside an event loop; it changes nothing, and
        takes seconds at most."""

    async def acquire(self, request: Request) -> Allocation:
        """The nodes, once they are granted; meanwhile `Pending` events say why they are not.

        Cancelling the call withdraws the request. Without `replaces` it returns what the run has been given before,
        and asks for what lacks. Raises DoesNotFit where the cluster will never have so much.
        """

    async def start(self, node: str, command: AgentCommand) -> str:
        """Starts the agent of a node that the run has; returns the launch's name, which its events carry.

        It returns when the cluster has taken the order; `Started` or `Exited` follow, or `Lost`. Raises RunError where
        the node is not the run's, or takes no order.
        """

    def events(self) -> AsyncIterator[Event]:
        """All that happens from now on, after what is already so; ends when the cluster is closed. Several may read."""

    async def fence(self, node: str, deadline_s: float) -> Fenced:
        """Ends all that the run has on a node, agent and keeper too, within `deadline_s` seconds. Never raises for a node
        that does not answer: that is unproven. A fence of a node where nothing is left is proven. What was ordered
        before a proven fence, and had not begun yet, never begins."""

    async def forget(self, node: str) -> None:
        """A person has made sure that nothing is left on a node of which that could not be proven: later fences of it need
        not prove what was before. Does nothing where nothing is remembered."""

    async def cordon(self, cordon: Cordon) -> None:
        """Takes a node out of use. In place of a cordon of the same owner; raises RunError for another owner's, and where
        the cluster does not allow it."""

    async def release(self, node: str, owner: str) -> None:
        """Undoes that owner's cordon; nothing where there is none. Raises RunError for another owner's."""

    async def cordons(self) -> Mapping[str, Cordon]:
        """The cordons that hold now, by node."""

    async def give_back(self, nodes: Collection[str]) -> None:
        """Returns nodes to the cluster; whatever of the run is left there is ended. Unknown ones are passed over."""

    async def close(self) -> None:
        """Lets go of the cluster: readers of events end, what runs goes on. Idempotent."""
