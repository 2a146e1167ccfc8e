"""Starts agents and waits for them. One whose process runs is slow, not lost: to kill it would throw away what it has done.

A busy machine, or a busy file system that Python is imported from, takes more than half a minute for an agent and its keeper.
Where each was killed then and started again, a run on such a machine never came to its first attempt.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping

from ....cluster.contract import ClusterAway
from ....waiting import wait_within
from ..attempt.outcome import NodeEnd
from ..record.clock import Clock
from .away import AWAY_AGAIN_S
from .node import Node

_WITHIN_S = 30.0
_SLOW_S = 300.0
"""For agents that run, where no other node could take the place."""
_LOOK_S = 1.0
_TRIES = 2
"""One that ran a moment ago may have been on its way out: then another is started, once."""


async def bring_up(
    nodes: Mapping[str, Node], names: Collection[str], start: Callable[[Collection[str]], Awaitable[Mapping[str, ClusterAway]]], moved: asyncio.Event,
    clock: Clock, say: Callable[[str], None], needs_them: Callable[[], bool], lease_s: float,
) -> list[str]:  # fmt: skip
    """Waits until all of `names` are up; returns those that did not come. `moved` is set when anything becomes of a node,
    `needs_them` says whether the run cannot go on without those that are slow. One that is lost by the rule of an attempt
    (`Node.judge`) is waited for no longer where the run can. A cluster that does not answer costs no node its time, nor one of its
    tries, where the run cannot go on without."""
    began = clock.monotonic()
    waiting = [n for n in names if not nodes[n].up]
    for name in waiting:
        nodes[name].state = "starting"
    started: Counter[str] = Counter()
    is_told, told = False, ""
    while True:
        moved.clear()
        waiting = [n for n in waiting if not nodes[n].up]
        if not waiting:
            return []
        idle = [n for n in waiting if nodes[n].launch is None and started[n] < _TRIES]
        left = began + _WITHIN_S - clock.monotonic()
        lost = [n for n in waiting if not started[n] and _is_lost(nodes[n], clock.monotonic(), lease_s)]
        if len(lost) == len(waiting) and not needs_them():
            return waiting
        if left <= 0:
            # One that was there before this call is no slow start: it hangs, or cannot be reached.
            slow = [n for n in waiting if started[n] and _is_coming(nodes[n])]
            if not slow or not needs_them() or clock.monotonic() >= began + _SLOW_S:
                return waiting
            if not is_told:
                is_told = True
                say(_describe(slow))
            idle, left = [], _LOOK_S
        away = await start(idle)
        started.update(n for n in idle if n not in away)
        if away and needs_them():
            began = clock.monotonic()
            if (why := next(iter(away.values())).message) != told:
                told = why
                say(f"{told}; the run goes on as soon as that is over")
        pause = AWAY_AGAIN_S if away else _LOOK_S  # that a node is silent too long is no event
        try:
            await wait_within(moved.wait(), min(left, pause))
        except TimeoutError:
            continue


def _is_lost(node: Node, now: float, lease_s: float) -> bool:
    """Whether it is gone, or its agent was here and is silent for too long."""
    return bool(node.gone) or (node.link is not None and node.judge(now, lease_s) is NodeEnd.UNREACHABLE)


def _is_coming(node: Node) -> bool:
    """Whether its agent runs, as far as the cluster knows, and has not come yet."""
    return node.launch is not None and not node.unreachable and not node.gone


def _describe(slow: Collection[str]) -> str:
    first = ", ".join(list(slow)[:3]) + (f" and {len(slow) - 3} more" if len(slow) > 3 else "")
    return (
        f"{first}: the agent runs, and has not come within {_WITHIN_S:.0f} s. No other node can take the place, so it has "
        f"{_SLOW_S / 60:.0f} minutes: a busy machine or file system takes long to start it"
    )
