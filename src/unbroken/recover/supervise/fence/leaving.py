"""How a run leaves its nodes: what only the keepers hold becomes durable first, and the journal says that it counts.

A snapshot counts if the seal of its attempt lists it: the committed ones by name, those that were whole in memory by
step (`memory`). So does one that was offered to a later attempt. Written later, by whichever keeper still holds it,
it is the same snapshot byte for byte, and the next start takes it into the seal.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....checkpoint.catalogue.candidates import candidates
from ....checkpoint.catalogue.contents import Found
from ....errors import RunError
from ....progress.records.state import RunState
from ...wire import Message
from ..watch.nodes import NodeTable

FLUSH_S = 60.0
"""For writing a checkpoint at the end, where the storage takes it."""
ANSWER_S = 15.0
INVENTORY_S = 5.0


@dataclass(frozen=True)
class Last:
    """The newest snapshot that is whole in memory, and the ranks whose share each node is to write."""

    attempt: int
    step: int
    shares: Mapping[str, tuple[int, ...]]


def whole_in_memory(
    inventories: Mapping[str, Sequence[Mapping[str, Any]]], rank_nodes: Mapping[int, str]
) -> list[Last]:
    """The snapshots that these keepers hold for every rank, the newest first: by attempt, then by step."""
    found = [
        c
        for c in candidates({}, inventories, dict(rank_nodes))
        if len(c["memory"]) == len(rank_nodes) and rank_nodes
    ]
    last = []
    for c in sorted(found, key=lambda c: (c["attempt"], c["step"]), reverse=True):
        shares: dict[str, list[int]] = {}
        for rank, node in c["memory"].items():
            shares.setdefault(node, []).append(int(rank))
        last.append(Last(c["attempt"], c["step"], {n: tuple(r) for n, r in shares.items()}))
    return last


def accept_late(found: Iterable[Found], state: RunState) -> dict[int, tuple[str, ...]]:
    """{attempt: names} for each seal that a checkpoint belongs to and lacks: it was accepted in memory, and is
    committed now. The names are all that the seal is to list."""
    wider: dict[int, list[str]] = {}
    for f in found:
        sealed = state.seals.get(f.attempt)
        if sealed is None or not f.committed or f.name in sealed or (f.attempt, f.step) not in state.accepted:
            continue
        wider.setdefault(f.attempt, list(sealed)).append(f.name)
    return {attempt: tuple(names) for attempt, names in wider.items()}


@dataclass
class Farewell:
    """What came of leaving: each node's answer; `holding` are nodes whose keepers go on trying on their own."""

    answers: dict[str, Message] = field(default_factory=dict)
    holding: list[str] = field(default_factory=list)

    @property
    def unsaved(self) -> dict[str, str]:
        """{node: why} of the keepers that ended, or did not answer, with a snapshot that is not durable."""
        closed = {n: a.get("closed", {}) for n, a in self.answers.items()}
        return {n: str(why) for n, c in closed.items() if (why := c.get("why") or c.get("what"))}

    @property
    def elsewhere(self) -> str:
        """Where the snapshot was written because its own place refused it; "" where it did not."""
        closed = [a.get("closed", {}) for a in self.answers.values()]
        return next((str(c["elsewhere"]) for c in closed if c.get("elsewhere")), "")


async def say_farewell(
    nodes: NodeTable,
    names: Sequence[str],
    last: Last | None,
    *,
    flush: bool,
    room_s: float,
    patient_until: Callable[[], float],
    extra_s: float = 0.0,
) -> Farewell:
    """Asks all agents to save what is in memory and to end; waits while `patient_until()` is ahead (monotonic).

    An agent that is not waited for goes on by itself: it tries for `room_s` and ends, or serves the next supervisor.
    `extra_s` is for writing elsewhere after that.
    """
    request: dict[str, Any] = {"flush": flush, "deadline_s": FLUSH_S, "room_s": 0.0}
    if last is not None:  # else nothing is whole: what a lost node lacks is not worth a long wait
        request |= {"mark": [last.attempt, last.step], "room_s": room_s}

    async def one(name: str) -> Message:
        ranks = list(last.shares.get(name, ())) if last is not None else []
        return await nodes.ask(
            name, "quit", timeout=FLUSH_S + room_s + ANSWER_S + extra_s, ranks=ranks, **request
        )

    tasks = {name: asyncio.create_task(one(name)) for name in names}
    done = Farewell()
    pending = set(tasks.values())
    while pending and time.monotonic() < patient_until():
        _, pending = await asyncio.wait(pending, timeout=0.1)
    for name, task in tasks.items():
        if not task.done():
            task.cancel()
            done.holding.append(name)
            continue
        try:
            done.answers[name] = task.result()
        except RunError as e:
            done.answers[name] = {"closed": {"what": e.what}}
    return done
