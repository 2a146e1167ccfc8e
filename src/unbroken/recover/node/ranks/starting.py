"""Starts the ranks of an attempt on a node, warm where a process waits for that, and keeps such processes ready."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ....cluster import EndedProcesses, Ownership
from ....progress import page
from ...room import describe_no_room, find_no_room, is_full
from ...wire import Message
from ..logs.folder import NodeFolder
from ..warm.caches import CompileCaches
from ..warm.imports import check_lines
from ..warm.pool import WarmPool
from ..warm.process import RankStart
from .counters import NodeCounters
from .kernel_log import KernelLog
from .process import LaunchOrder, RankProcess, as_a_rank, describe_start, prepare_files, run_cold

_WITHOUT_STEPS_S = 600.0
"""Where no step of the ranks is known, they are taken to train after so long: what they compile first is to be among the imports."""


class Starting:
    """How ranks of this node come to run, and what waits to be one."""

    OPS = ("imports", "warm", "room", "caches", "take_caches")
    """What of the supervisor's questions is answered here."""

    def __init__(
        self, node: str, scratch: Path, folder: NodeFolder, keeper_socket: Path, owner: Ownership, tell: Callable[..., None]
    ) -> None:  # fmt: skip
        self._node, self._pages, self._folder = node, scratch / "pages", folder
        self._keeper_socket, self._owner = keeper_socket, owner
        self._pool = WarmPool(node, scratch, owner, as_a_rank, tell)
        self._caches = CompileCaches()
        self._counters = NodeCounters()
        self._order: LaunchOrder | None = None
        self._due: float | None = None
        """When warm processes are to be made (CLOCK_MONOTONIC)."""
        self._pages_bytes = 0
        """Of the pages of the newest attempt's ranks."""

    async def launch(self, order: LaunchOrder, started: Callable[[RankProcess], None]) -> Message:
        """Starts the ranks, and hands each on as soon as it runs. Returns the message about it: `no_room` where their files find
        none, and nothing was started. Raises OSError."""
        began = time.monotonic()
        starts = self._describe(order)
        self._pages_bytes = len(starts) * page.SIZE
        try:
            for start in starts.values():
                prepare_files(start)
        except OSError as e:
            if not is_full(e):
                raise
            return {"no_room": describe_no_room(e, self._folder.own.path)}
        self._order, self._due = order, None
        if order.cold or order.warm_after is None:
            self._pool.end()
        cold: dict[str, str] = {}
        kernel_log = KernelLog()
        found = await asyncio.gather(*(self._take(order, r, s) for r, s in starts.items()))
        for (rank, start), process in sorted(zip(starts.items(), found, strict=True), key=_cold_last):
            if isinstance(process, str):
                cold[str(rank)] = process
                if order.warm_after is not None:
                    start = self._pool.record(order.ranks[rank], start)
                process = run_cold(start, self._node, self._owner)
            started(RankProcess(process, start, order.follow_log, self._counters, kernel_log))
        if order.warm_after is not None:
            self._pool.expect(order.warm_after)
            self._due = time.monotonic() + _WITHOUT_STEPS_S + order.warm_after
        return {"seconds": time.monotonic() - began, "cold": cold if order.restarts else {}}

    def _describe(self, order: LaunchOrder) -> dict[int, RankStart]:
        return {
            r: describe_start(order, r, local, self._folder, self._node, self._pages, self._keeper_socket)
            for r, local in order.ranks.items()
        }

    async def _take(self, order: LaunchOrder, rank: int, start: RankStart) -> Any:
        if order.cold:
            return "a start from warm processes failed before its first step"
        if order.warm_after is None:
            return "no warm processes are wanted (--no-warm)"
        return await self._pool.take(order.ranks[rank], start)

    # --- what waits

    def note_steps(self) -> None:
        """The ranks made steps."""
        if (
            self._order is not None
            and self._due is not None
            and (after := self._order.warm_after) is not None
        ):
            self._due = min(self._due, time.monotonic() + after)

    def make_ready(self, now: float) -> None:
        """Begins to make warm processes when it is time; `now` is CLOCK_MONOTONIC."""
        if self._order is None or self._due is None or now < self._due:
            return
        self._due = None
        self._pool.prepare({self._order.ranks[r]: start for r, start in self._describe(self._order).items()})

    async def answer(self, op: str, message: Message) -> Message:
        """Does what the supervisor asks for, one of `OPS`. Raises RunError."""
        match op:
            case "imports":  # what the ranks have imported, by local rank
                return {"imports": {str(local): lines for local, lines in self._pool.read_records().items()}}
            case "warm":
                self._make_ready_for(LaunchOrder.from_message(message["order"]), message["imports"])
            case (
                "room"
            ):  # `no_room` says why the files of an attempt find none on this node; "" where they do
                return {"no_room": await asyncio.to_thread(self._find_no_room)}
            case "caches":
                return await self._caches.give(message["offset"])
            case "take_caches":
                return await self._caches.take(message["offset"], message["total"], message["data"])
        return {}

    def _find_no_room(self) -> str:
        """As `find_no_room`, for whatever `prepare_files` writes: logs and output, and pages, which are in memory."""
        return find_no_room(self._folder.own.attempts) or find_no_room(self._pages.parent, self._pages_bytes)

    def _make_ready_for(self, order: LaunchOrder, imports: Message) -> None:
        """Begins to make warm processes on a node without ranks, from what those of another node have imported."""
        known = {int(local): check_lines(lines) for local, lines in imports.items()}
        self._pool.prepare({order.ranks[r]: start for r, start in self._describe(order).items()}, known)

    def end_ranks(self, *, keep_warm: bool = True) -> EndedProcesses:
        """Kills all ranks and what they have started; blocks meanwhile."""
        return self._owner.end_ranks(self._node, keep=self._pool.pids if keep_warm else ())

    def end(self) -> None:
        """Ends what waits."""
        self._due = None
        self._pool.end()


def _cold_last(started: tuple[Any, Any]) -> bool:
    return isinstance(started[1], str)
