"""What the supervisor asks of the keepers, through their nodes' agents."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from ....checkpoint.catalogue.announcement import as_before
from ....checkpoint.keeper.wire import PROTOCOL
from ....cluster.at_once import for_each
from ....errors import RunError
from ....link.bounds import Malformed
from ....link.runs import pack, unpack
from ...wire import Message
from ..attempt.attempt import Attempt
from ..attempt.farewell import Last
from ..record.background import Background
from .fleet import Fleet

_log = logging.getLogger("unbroken.supervisor")
_MOST_RANKS = 1 << 20
_INVENTORY_S = 20.0
_SETTLE_S = 10.0
_WAKE_S = 5.0
_RING_S = 2.0
"""For a hint no start is held up longer."""

Inventories = dict[str, list[dict[str, Any]]]


class Keepers:
    """The keepers of a run's nodes."""

    def __init__(self, fleet: Fleet, background: Background) -> None:
        self._fleet, self._background = fleet, background

    async def list_snapshots(self, names: Iterable[str], timeout: float = _INVENTORY_S) -> Inventories:
        """What each of these holds; those that do not answer are left out."""
        request = {"op": "inventory", "runs": True}
        answers = await self._fleet.ask_all(names, "keeper", request=request, timeout=timeout)
        return await asyncio.to_thread(_read_inventories, answers)

    async def find_restored(self, attempt: int) -> tuple[int, int] | None:
        """(attempt, step) of what this one went on from, as far as a keeper still knows it."""
        request = {"op": "inventory", "runs": True}
        answers = await self._fleet.ask_all(self._fleet.up(), "keeper", request=request, timeout=_INVENTORY_S)
        for told in (a.get("restored") for a in answers.values()):
            match told:
                case [int(number), [int(of), int(step)]] if number == attempt:
                    return of, step
        return None

    async def add_ring(self, requests: Mapping[str, Message], holders: Mapping[str, set[str]]) -> None:
        """Adds to each announcement how that node's keeper reaches these others, as far as they answer: it may fetch from them
        beside the start of the ranks."""
        names = set().union(*holders.values())
        if not names:
            return
        answers = await self._fleet.ask_all(names, "keeper", request={"op": "ring"}, timeout=_RING_S)
        members = {n: a["ring"] for n, a in answers.items() if a.get("ring")}
        for node, others in holders.items():
            requests[node]["ring"] = {n: members[n] for n in sorted(others) if n in members}

    async def announce(self, requests: Mapping[str, Message]) -> None:
        """Tells each keeper of an attempt, as far as it answers."""
        asked = {n: {"request": self.phrase(n, r)} for n, r in requests.items()}
        await self._fleet.ask_each(asked, "keeper", timeout=_INVENTORY_S)

    def phrase(self, name: str, announcement: Message) -> Message:
        """The announcement as that node's keeper reads it, which may be of an earlier version."""
        lean = self._fleet.nodes[name].hello.get("protocol", 1) >= PROTOCOL
        return announcement if lean else as_before(announcement)

    async def settle(self, attempt: int, gone: list[int]) -> None:
        """Lets all finish or abandon what they write for an attempt; `gone` are ranks whose node is lost."""
        request = {"op": "settle", "attempt": attempt, "deadline_s": _SETTLE_S}
        names, lean, whole = self._fleet.up(), pack(gone), gone
        asked = {
            n: {
                "request": {
                    **request,
                    "gone": lean if self._fleet.nodes[n].hello.get("protocol", 1) >= PROTOCOL else whole,
                }
            }
            for n in names
        }
        await self._fleet.ask_each(asked, "keeper", timeout=_SETTLE_S + 10)

    def tell_complete(self, attempt: int, step: int) -> None:
        """Tells all, without waiting, that every rank has this snapshot: older buffers may be used again."""
        request = {"op": "complete", "attempt": attempt, "step": step}
        self._background.start(self._fleet.ask_all(self._fleet.up(), "keeper", request=request, timeout=20))

    async def save(self, snapshot: Last, deadline_s: float) -> dict[str, str]:
        """Has those that hold it make a snapshot durable, and waits for that as long; {node: why} of those that did not."""

        async def one(name: str) -> str:
            request = {
                "op": "flush", "deadline_s": deadline_s, "room_s": 0.0, "ranks": list(snapshot.shares[name]),
                "mark": [snapshot.attempt, snapshot.step],
            }  # fmt: skip
            try:
                answer = await self._fleet.ask(
                    name, "keeper", request=request, timeout=deadline_s + _SETTLE_S
                )
            except RunError as e:
                return e.message
            # It answers for what it has: for a share that was freed meanwhile with no step.
            return "" if answer.get("step") == snapshot.step else "its share of it is not in memory there"

        return {n: why for n, why in (await for_each(snapshot.shares, one)).items() if why}

    async def reconcile(self, attempt: Attempt) -> None:
        """Asks what they hold: what they told while nobody listened must not stay unknown."""
        done = -1
        inventories = await self.list_snapshots(attempt.nodes)
        ranks: dict[int, list[int]] = {}
        for e in (e for held in inventories.values() for e in held if e["attempt"] == attempt.number):
            ranks.setdefault(e["step"], []).append(e["rank"])
        for step in sorted(ranks):
            if attempt.tracker.on_host(step, ranks[step]):
                done = step
        if done >= 0:
            self.tell_complete(attempt.number, done)

    async def wake(self, names: Iterable[str]) -> dict[str, int]:
        """Continues keepers that somebody stopped; {node: process} of those."""
        answers = await self._fleet.ask_all(names, "wake", timeout=_WAKE_S)
        return {n: int(a["woken"]) for n, a in answers.items() if a.get("woken")}


def _read_inventories(answers: Mapping[str, Message]) -> Inventories:
    """What each keeper holds; in a thread, since there is an entry for each rank and snapshot."""
    return {n: _read_inventory(a) for n, a in answers.items()}


def _read_inventory(answer: Message) -> list[dict[str, Any]]:
    """An entry for each rank and snapshot, of a keeper of any version; none where the answer makes no sense."""
    if "runs" not in answer:
        return list(answer.get("inventory", []))
    try:
        return [
            {
                "attempt": int(attempt), "step": int(step), "rank": rank, "world_size": int(world_size), "complete": True,
                "everywhere": bool(everywhere), "peer": bool(peer),
            }
            for attempt, step, world_size, everywhere, peer, _, runs in answer["runs"]
            for rank in unpack(runs, "ranks", _MOST_RANKS)
        ]  # fmt: skip
    except (Malformed, TypeError, ValueError) as e:
        _log.warning("an inventory was passed over: %s", e)
        return []
