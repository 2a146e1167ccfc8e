"""Which processes are a run's own, and the proof that none of them is left: one contract, three ways to keep it.

Marks in the environment prove nothing: `setproctitle` wipes them, `env -i` removes them. So each node's processes
are held by what they cannot shake off:

cgroup    agent and keeper in one cgroup v2, the ranks of each attempt in another; the kernel lists and kills them
parent    a small parent process on each node, to which the kernel hands every orphan; it outlives the agent
marks     the environment, and who descends from whom: good for finding, never a proof

`holding.choose` takes the first that this machine allows. An `Ownership` only ever ends what it holds itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol


class Kind(StrEnum):
    """How the processes of a node are held, the surest first."""

    CGROUP = "cgroup"
    PARENT = "parent"
    MARKS = "marks"


@dataclass(frozen=True)
class EndedProcesses:
    """What ending processes came to. `survivors` outlived kill -9 (D state); `proven` says that besides them nothing
    can be left; `why` says in words why that is not proven."""

    survivors: tuple[int, ...] = ()
    proven: bool = True
    why: str = ""

    @property
    def gone(self) -> bool:
        """Whether provably nothing is left."""
        return self.proven and not self.survivors

    def as_message(self) -> dict[str, Any]:
        """As an agent tells it."""
        return {
            "gone": self.gone, "survivors": list(self.survivors), "proven": self.proven, "unproven_why": self.why,
        }  # fmt: skip

    def __or__(self, other: EndedProcesses) -> EndedProcesses:
        """Both together: proven only where both are."""
        return EndedProcesses(
            tuple(sorted({*self.survivors, *other.survivors})),
            self.proven and other.proven,
            "; ".join(dict.fromkeys(w for w in (self.why, other.why) if w)),
        )


@dataclass(frozen=True)
class Start:
    """How to start a process so that it is held: the command, variables beside its own, and what its child does
    between fork and exec.

    `spawn` starts it in place of `subprocess.Popen`, with the same arguments, where it is to run elsewhere than as a child;
    `enter` and whatever else is done between fork and exec is done there. Call `close` once the process is started or has
    failed to.
    """

    argv: tuple[str, ...]
    enter: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None
    env: Mapping[str, str] = field(default_factory=dict)
    spawn: Callable[..., Process] | None = None


class Process(Protocol):
    """A process that was started: what `subprocess.Popen` shows of it."""

    pid: int

    def poll(self) -> int | None:
        """Its exit code, minus its signal; None while it runs."""


class Ownership(Protocol):
    """Holds the processes of one run on this machine's nodes."""

    kind: Kind

    def describe(self) -> str:
        """How processes are held, in words for the terminal."""

    def as_text(self) -> str:
        """What `holding.from_text` makes the same ownership of in another process."""

    def start_agent(self, node: str, argv: Sequence[str]) -> Start:
        """How to start a node's agent; its keeper is held with it. Raises OSError."""

    def start_rank(self, node: str, attempt: int, argv: Sequence[str]) -> Start:
        """How the node's agent starts a rank, apart from itself and its keeper. Raises OSError."""

    def prepare_warm(self, node: str) -> None:
        """Makes what `start_warm` needs on a node, which may take seconds. Raises OSError."""

    def start_warm(self, node: str, argv: Sequence[str]) -> Start | None:
        """How the node's agent starts a warm process, which belongs to no attempt yet; None where none can be held. Raises OSError."""

    def move_warm(self, node: str, attempt: int, pid: int) -> None:
        """Makes a warm process one of an attempt's, before it runs anything of the attempt. Raises OSError."""

    def end_warm(self, node: str, keep: Collection[int] = ()) -> None:
        """Kills what warm processes have left, but for the processes in `keep` and what descends from them."""

    def take_census(self, node: str) -> None:
        """Notes what is there now, for the case that what holds it is killed. Cheap; call it about once a second."""

    def end_ranks(self, node: str, within: float = 10.0, keep: Collection[int] = ()) -> EndedProcesses:
        """Kills the ranks of every attempt on a node and all that they started; agent and keeper stay, and the warm processes in
        `keep` with what descends from them."""

    def end_node(self, node: str, within: float = 10.0) -> EndedProcesses:
        """Kills all that the run has on a node, and removes what held it."""

    def leave(self, node: str) -> None:
        """Called by a node's agent that ends of itself and has left nothing: drops what only it still uses."""

    def left(self, node: str) -> list[int]:
        """The processes that are held on a node now."""

    def nodes(self) -> list[str]:
        """Nodes of which something is held, or remembered."""

    def forget(self, node: str) -> None:
        """Drops what is remembered of a lost proof: a person has made sure that nothing is left."""
