"""What the coordinator knows of a worker that is connected, and the bars that its assignments leave on the chart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ...link.bounds import Message
from ..contracts import Assignment, WorkerSeen
from .wire import pack


@dataclass
class OpenAssignment:
    """One shard of a bundle while a worker is at it."""

    task: str
    number: int
    expected_s: float
    blocks: list[int] = field(default_factory=list)
    started: float = 0.0
    ended: float = 0.0
    busy_s: float = 0.0
    shared: bool = False
    tokens_read: int = 0
    tokens_made: int = 0
    given: frozenset[int] = frozenset()
    """The blocks of it."""
    left: int = 0
    """Blocks that were given out with it and are not answered."""


@dataclass
class WorkerLink:
    """A worker's connection."""

    name: str
    node: str
    gpus: tuple[int, ...]
    width: int
    writer: asyncio.StreamWriter
    offset: float
    """Our clock minus the worker's."""
    sees: bool
    """It can read the shared folder."""
    started: float
    pid: int = 0
    start_s: float = 0.0
    fetch_s: float = 0.0
    load_s: float = 0.0
    ready: float = 0.0
    uncompiled: int = 0
    energy_j: float | None = None
    sent: set[str] = field(default_factory=set)
    assignments: dict[int, OpenAssignment] = field(default_factory=dict)
    answered: int = 0
    at: tuple[str, int] = ("", -1)
    since: float = 0.0
    """Monotonic time since when it is at that block."""
    heard: float = field(default_factory=time.monotonic)
    last_end: float = 0.0
    leaving: str = ""
    at_once: int = 1
    """Samples that it answers at once."""
    steps: int = 0
    """Grows while it works at something, of a worker that answers many blocks at once."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between the end of a shard and the start of the next one, where that was waiting."""

    def send(self, op: str, **fields: object) -> None:
        """Queues a message; what cannot be sent is noticed by the reading side."""
        message: Message = {"op": op, **fields}
        self.writer.write(pack(message))

    def seen(self, why: str = "", ended: float = 0.0) -> WorkerSeen:
        """For the report."""
        return WorkerSeen(
            self.name, self.node, self.gpus, self.started, self.fetch_s, self.load_s, self.ready, ended, why, self.start_s,
            self.uncompiled, self.energy_j,
        )  # fmt: skip

    def believable(self, started: float, ended: float) -> tuple[float, float]:
        """A block's times on our clock, within the life of this link: a worker's clock may jump or lie.

        Runtime estimates are learnt from them, and kept for the next evaluation. How long it took counts more than when
        it was: what we know of the offset is too large by as long as the worker's first message was under way.
        """
        ended, took = min(max(ended + self.offset, self.started), time.time()), max(0.0, ended - started)
        return max(ended - took, self.started), ended

    def note_block(
        self,
        number: int,
        block: int,
        started: float,
        ended: float,
        prefetched: bool,
        tokens: tuple[int, int] = (0, 0),
    ) -> OpenAssignment | None:
        """Adds a block to its assignment; returns the assignment that it ended by beginning another one."""
        self.answered += 1
        assignment = self.assignments.get(number)
        if assignment is None:
            return None
        before = None
        assignment.left -= 1
        if not assignment.blocks:
            assignment.started = started
            if self.at_once == 1:
                before = next((a for n, a in self.assignments.items() if n < number and a.blocks), None)
            if self.last_end and prefetched:
                self.gaps.append(max(0.0, started - self.last_end))
        assignment.blocks.append(block)
        assignment.ended = ended
        assignment.busy_s += ended - started
        assignment.tokens_read += tokens[0]
        assignment.tokens_made += tokens[1]
        self.last_end = ended
        return before

    def close_assignment(self, number: int, outcome: str, why: str = "") -> Assignment | None:
        """Ends an assignment; None if no block was answered in it."""
        assignment = self.assignments.pop(number, None)
        if assignment is None or (not assignment.blocks and outcome == "done"):
            return None
        now = time.time()
        return Assignment(
            assignment.task,
            self.name,
            tuple(assignment.blocks),
            assignment.started or now,
            assignment.ended or now,
            assignment.busy_s,
            "shared" if outcome == "done" and assignment.shared else outcome,
            why,
            assignment.expected_s,
            assignment.tokens_read,
            assignment.tokens_made,
        )


@dataclass(frozen=True)
class EvaluationProgress:
    """Where an evaluation stands; what `--progress` and `unbroken eval status` show."""

    phase: str
    at: float
    started: float
    tasks: dict[str, dict[str, object]]
    """Per task: state, blocks done, blocks in all, samples missing from its score."""
    workers: dict[str, dict[str, object]]
    """Per worker: node, gpus, state, task, busy share."""
    remaining_s: float
    """Worker seconds of inference still expected."""
    finish_s: float
    """Seconds until the last score is expected."""
    errors: dict[str, str]


Watcher = Callable[[EvaluationProgress], None]
