"""What the ranks of one attempt report of their work, put together window by window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ....detect.stragglers import SlowFinding, SlowWatch
from ....detect.work import WorkWindow, reckon_work


class WorkFollower:
    """`finding` is the newest one that was not taken yet, and how many steps its window had."""

    def __init__(self, nodes: Mapping[int, str]) -> None:
        self._peers = dict[int, str]()
        self._watch = SlowWatch(nodes, self._peers)
        self._ranks = frozenset(nodes)
        self._news: dict[int, WorkWindow] = {}
        self.finding: tuple[SlowFinding, int] | None = None

    def take(self, rows: Sequence[Sequence[Any]], counted: Sequence[Sequence[Any]] = ()) -> None:
        """Takes an agent's rows `[rank, step, steps, wall, busy, peak, peers, data]`, of which the last two may be left out, and those of
        GPUs' counters, `[rank, step, steps, wall, busy, tensor, peers, data]`; a window is judged once all ranks have told one."""
        for rank, *window in rows:
            self._news[rank] = WorkWindow(*window)
        for rank, step, steps, wall, busy, tensor, peers, data in counted:
            self._news[rank] = WorkWindow(step, steps, wall, busy, None, peers, data, tensor)
        if not self._ranks <= self._news.keys():
            return
        news, self._news = self._news, {}
        self._peers.update({r: str(w.peers) for r, w in news.items() if w.peers or r in self._peers})
        step, steps = min(w.step for w in news.values()), min(w.steps for w in news.values())
        step_s = median(w.wall for w in news.values())
        found = self._watch.observe(step, step_s, reckon_work(news))
        if found is not None:
            self.finding = (found, steps)
