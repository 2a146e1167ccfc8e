"""What travels through a diagnosis: events, the machine's topology, how training went, how each log ended."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from .rules import Rule, Xid


@dataclass(frozen=True)
class LogEvent:
    """One thing that a log reports. `file` indexes the sources; `line` counts from 1; `weight` in [0, 1] says how
    much the line itself is to be believed (a traceback's last line 1, a warning less); `chain` numbers the
    exceptions of one chained traceback from the innermost, 0; `frames` are the files of its stack."""

    file: int
    line: int
    text: str
    rule: Rule
    time: float | None = None
    rank: int | None = None
    node: str | None = None
    gpu: int | None = None
    pid: int | None = None
    xid: Xid | None = None
    bus: str | None = None
    weight: float = 1.0
    chain: int = 0
    chained: str | None = None
    frames: tuple[str, ...] = ()
    exception: str | None = None
    level: str | None = None
    seq: int | None = None

    @property
    def reason(self) -> str | None:
        """The reason that this event would make, were it the root."""
        return self.xid.reason if self.xid else self.rule.reason

    @property
    def role(self) -> str:
        """Its role in the chain of events."""
        return self.xid.role if self.xid else self.rule.role

    @property
    def id(self) -> str:
        """The id of the rule or XID that decided."""
        return f"xid-{self.xid.code}" if self.xid else self.rule.id


@dataclass
class LogPlace:
    """Where one rank runs."""

    node: str | None = None
    gpu: int | None = None
    pid: int | None = None
    bus: str | None = None


@dataclass
class Topology:
    """Ranks, nodes and GPUs as far as the logs (or the supervisor) name them. `reported` are the failures in
    torchrun's summary: (node, rank, local rank, exit code, pid), the first observed one first."""

    places: dict[int, LogPlace] = field(default_factory=dict)
    nodes: list[str] = field(default_factory=list)
    gpus_per_node: int | None = None
    world: int | None = None
    reported: list[tuple[str | None, int | None, int | None, int | None, int | None]] = field(
        default_factory=list
    )
    addresses: dict[str, str] = field(default_factory=dict)
    only: str | None = None
    """The one host of the job, where its launcher names one and nothing names another."""

    def place(self, rank: int) -> LogPlace:
        """The place of a rank, made where it is not known yet."""
        return self.places.setdefault(rank, LogPlace())

    def node_of(self, rank: int | None) -> str | None:
        """The node of a rank, from what was said or from the order of nodes."""
        if rank is None:
            return None
        known = self.places.get(rank)
        if known and known.node:
            return known.node
        if self.gpus_per_node and rank // self.gpus_per_node < len(self.nodes):
            return self.nodes[rank // self.gpus_per_node]
        return self.only

    def gpu_of(self, rank: int | None) -> int | None:
        """The GPU of a rank on its node."""
        if rank is None:
            return None
        known = self.places.get(rank)
        if known and known.gpu is not None:
            return known.gpu
        return rank % self.gpus_per_node if self.gpus_per_node else None

    def rank_at(
        self, node: str | None, gpu: int | None = None, pid: int | None = None, bus: str | None = None
    ) -> int | None:
        """The rank that runs on a node's GPU, bus address or process, if that is known."""
        for rank, p in self.places.items():
            if node is not None and p.node is not None and p.node != node:
                continue
            if (pid is not None and p.pid == pid and p.node == node) or (
                bus is not None and p.bus == bus and p.node == node
            ):
                return rank
        if node is not None and gpu is not None:
            for rank, p in self.places.items():
                if p.node == node and p.gpu == gpu:
                    return rank
            if self.gpus_per_node and node in self.nodes:
                return self.nodes.index(node) * self.gpus_per_node + gpu
        return None

    def ranks_on(self, node: str) -> list[int]:
        """All ranks of a node, as far as they are known."""
        found = [r for r, p in self.places.items() if p.node == node]
        if not found and self.gpus_per_node and node in self.nodes:
            first = self.nodes.index(node) * self.gpus_per_node
            found = list(range(first, first + self.gpus_per_node))
        return sorted(found)

    @property
    def size(self) -> int | None:
        """How many ranks there are."""
        if self.world:
            return self.world
        if self.gpus_per_node and self.nodes:
            return self.gpus_per_node * len(self.nodes)
        return len(self.places) or None


@dataclass(frozen=True)
class MetricLine:
    """One line that shows a step. `step` is None where the framework prints only a loss."""

    file: int
    line: int
    step: float | None
    loss: float | None
    time: float | None
    text: str = ""


@dataclass
class LogEnd:
    """How one log ended: its last lines, whether the very last one was cut off, how large it was. `stamps` are the
    (line, time) of its last lines that carry a time; `pace` the seconds per step that a progress bar showed."""

    lines: int = 0
    bytes: int = 0
    pace: float | None = None
    last_line: int = 0
    last_text: str = ""
    last_time: float | None = None
    stamps: list[tuple[int, float]] = field(default_factory=list)
    cut_off: bool = False


@dataclass(frozen=True)
class Counted:
    """Rule id -> how many of its lines were counted and not read, and of which rules that is an estimate."""

    lines: dict[str, int] = field(default_factory=dict)
    about: frozenset[str] = frozenset()

    def __add__(self, other: Counted) -> Counted:
        """Both together."""
        return Counted(dict(Counter(self.lines) + Counter(other.lines)), self.about | other.about)


@dataclass
class FileScan:
    """Everything read from one log. `unread` bytes were left out by a limit; lines after `exact` (None: all are
    exact) are estimates, because what lies before them was not read. `counted` says, by rule, how many lines that came again
    and again were counted and not read one by one."""

    index: int
    name: str
    rank: int | None = None
    events: list[LogEvent] = field(default_factory=list)
    progress: list[MetricLine] = field(default_factory=list)
    log_end: LogEnd = field(default_factory=LogEnd)
    idle_gpus: list[tuple[str | None, int, float, int, str]] = field(default_factory=list)
    busy_gpus: int = 0
    notes: list[str] = field(default_factory=list)
    machine: bool = False
    """Whether it is a log of the machine (kernel, fabric manager), which no job's end can be read from."""
    complaints: list[tuple[int, str, float | None, int | None, str | None]] = field(default_factory=list)
    """Errors that no rule knows: (line, text, time, rank, node)."""
    last_lines: list[tuple[int, str, float | None]] = field(default_factory=list)
    """The last few lines: (line, text, time)."""
    unread: int = 0
    counted: Counted = field(default_factory=Counted)
    exact: int | None = None
