"""What an agent has to report of its ranks, gathered until it is sent: one message for all of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from ....detect.stacks import ProcessInfo, collect_native, collect_stacks
from ....detect.work import WorkWindow
from ....link.runs import pack, unpack
from ...wire import Message

_CHILD_FRAMES = 12
_MOST_RANKS = 1 << 20
_TOGETHER_S = 0.05
"""Ranks of a node save at the same moment, as far as anybody can tell who is not there."""


class ProgressReport:
    """How far the ranks of an attempt are. Steps one by one are told of the rank that leads here; of the others, the newest."""

    def __init__(self) -> None:
        self._news: dict[int, Message] = {}
        self._steps: dict[int, int] = {}
        self._work: list[list[Any]] = []
        self._counted: list[list[Any]] = []
        self._lead: int | None = None
        self._lead_steps: list[Any] = []

    def add(self, rank: int, news: Message, ranks: Collection[int]) -> None:
        """Takes what a rank's page or log said since the last time (`RankProcess.look`); `ranks` are all of the node."""
        self._news[rank] = news
        steps = news["steps"]
        if not steps:
            return
        self._steps[rank] = max(self._steps.get(rank, -1), steps[-1][0])
        if news["source"] == "page":
            self._lead = min(ranks)
        elif self._lead is None:
            self._lead = rank  # of those that only print their steps, some print none
        if rank == self._lead:
            self._lead_steps += steps

    def add_work(self, rank: int, w: WorkWindow) -> None:
        """Takes what a rank worked in a window of its steps."""
        if w.tensor is not None:  # apart: an older supervisor passes over what it has no name for
            data = None if w.data is None else round(w.data, 7)
            row = [rank, w.step, w.steps, round(w.wall, 7), round(w.busy, 7), round(w.tensor, 6)]
            self._counted.append([*row, w.peers, data])
            return
        seconds = [None if x is None else round(x, 7) for x in (w.wall, w.busy, w.peak)]
        # An older supervisor refuses what it does not know: what is not there is not named.
        more = [w.peers] if w.data is None else [w.peers, round(w.data, 7)]
        self._work.append([rank, w.step, w.steps, *seconds, *(more if any(more) else [])])

    def take(self) -> Message | None:
        """The fields of a `progress` message, and starts afresh; None where there is no news."""
        if not self._news:
            return None
        groups: dict[tuple[Any, ...], list[int]] = {}
        for rank, n in self._news.items():
            key = (n["count"], n["phase"], n["source"], n["total"], self._steps.get(rank, -1))
            groups.setdefault(key, []).append(rank)
        steps = {str(self._lead): self._lead_steps} if self._lead_steps else {}
        work = {k: v for k, v in (("work", self._work), ("counted", self._counted)) if v}
        self._news, self._lead_steps, self._work, self._counted = {}, [], [], []
        return {"groups": [[pack(ranks), *key] for key, ranks in groups.items()], "steps": steps} | work


class KeeperReport:
    """What a node's keeper tells. Which ranks have a snapshot is told once for the node, when all have it or a moment has passed;
    what an attempt went on from is told again to each supervisor that takes over: with the one before it may be lost."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._events: dict[tuple[int, int], list[Message]] = {}
        self._restored: Message | None = None

    def repeat(self, attempt: int) -> None:
        """Says once more what the attempt went on from, if it has asked here."""
        if self._restored is not None and self._restored["attempt"] == attempt:
            self._send(self._restored)

    def add(self, event: Message, ranks: int) -> None:
        """Takes a keeper's event; `ranks` is how many the node has."""
        if event.get("event") != "host":
            self._restored = event if event.get("event") == "restored" else self._restored
            self._send(event)
            return
        key = (event["attempt"], event["step"])
        events = self._events.setdefault(key, [])
        events.append(event)
        if len(events) >= ranks:
            self._flush(key)
        elif len(events) == 1:
            asyncio.get_running_loop().call_later(_TOGETHER_S, self._flush, key)

    def _flush(self, key: tuple[int, int]) -> None:
        events = self._events.pop(key, [])
        if events:
            seconds = max(float(e.get("seconds") or 0.0) for e in events)
            ranks = pack(e["rank"] for e in events)
            self._send(
                {"event": "host", "attempt": key[0], "step": key[1], "ranks": ranks, "seconds": seconds}
            )


def group_looks(looks: dict[int, ProcessInfo]) -> Message:
    """The answer to `look`: ranks that stand in the same place as one row `[runs, state, wchan, frames]`, process ids in the
    order of the ranks. What few have to tell beside that is in `details`, as `[runs, ...]` too. What was collected whole (`text`) is
    asked for of few."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    details: dict[str, list[int]] = {}
    for rank, look in sorted(looks.items()):
        groups.setdefault((look.state, look.wchan, tuple(look.frames)), []).append(rank)
        if (detail := _find_details(look)) is not None:
            details.setdefault(json.dumps(detail), []).append(rank)
    rows = [[pack(ranks), state, wchan, list(frames)] for (state, wchan, frames), ranks in groups.items()]
    more = [[pack(ranks), json.loads(detail)] for detail, ranks in details.items()]
    return {"groups": rows, "pids": [look.pid for _, look in sorted(looks.items())], "details": more}


def _find_details(look: ProcessInfo) -> Message | None:
    children = [[c.pid, c.name, c.state, list(c.frames[:_CHILD_FRAMES])] for c in look.children]
    if not (look.site or look.gil or children or look.busy is not None):
        return None
    return {"site": look.site, "gil": list(look.gil), "busy": look.busy, "children": children}


class LookedAt(Protocol):
    """A rank's process, as far as it is looked at."""

    pid: int

    def ask_for_dump(self) -> bool:
        """Asks its NCCL for a flight-recorder dump."""


class Looks:
    """What the ranks of an attempt were doing when they were last looked at."""

    def __init__(self) -> None:
        self._found: dict[int, ProcessInfo] = {}

    async def collect(self, message: Message, ranks: Mapping[int, LookedAt]) -> Message:
        """Collects state and stacks of the ranks that are asked for, all at once, and has them write what NCCL waits for; answers
        where each stands."""
        asked = [r for r in unpack(message["ranks"], "ranks", _MOST_RANKS) if r in ranks]
        for r in asked:
            ranks[r].ask_for_dump()
        found = await asyncio.gather(*(asyncio.to_thread(collect_stacks, ranks[r].pid) for r in asked))
        self._found = dict(zip(asked, found, strict=True))
        return group_looks(self._found)

    async def tell(self, message: Message, ranks: Mapping[int, LookedAt]) -> Message:
        """All that was collected of them; of the ranks in `native` the frames of C besides, as they are now."""
        asked = unpack(message["ranks"], "ranks", _MOST_RANKS)
        deep = [r for r in unpack(message.get("native", []), "native", _MOST_RANKS) if r in ranks]
        native = await asyncio.gather(*(asyncio.to_thread(collect_native, ranks[r].pid) for r in deep))
        texts = {str(r): self._found[r].text for r in asked if r in self._found}
        for r, text in zip(deep, native, strict=True):
            if text:
                texts[str(r)] = f"{texts.get(str(r), '')}\nwith the frames of C and C++:\n{text}"
        return {"texts": texts}
