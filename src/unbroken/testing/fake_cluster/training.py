"""How virtual ranks train: all at one pace, and all standing where one stands, as collectives have it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Script:
    """What a virtual script does. `start_s` from launch to the first step, `step_s` a step; it saves each `save_every`
    steps (0 for never) and ends well after `steps`. Ranks whose collective does not come back for `timeout_s` abort. Of a step each
    rank works `work_s` (0: they tell nothing of it), give or take `work_noise` of it."""

    start_s: float = 20.0
    step_s: float = 5.0
    save_every: int = 0
    steps: int | None = None
    timeout_s: float = 600.0
    work_s: float = 0.0
    work_noise: float = 0.01


class Gang:
    """The ranks of one attempt. They step together once all have come, and stand from the moment that one does not.

    `first` is the step that comes first. Nothing is counted step by step: how far all are follows from the time.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, script: Script, attempt: int, world_size: int, first: int
    ) -> None:
        self._loop, self.script, self.attempt = loop, script, attempt
        self._missing, self.world_size, self.first = world_size, world_size, first
        self._began: float | None = None
        self._stood: float | None = None
        self._members: list[tuple[Callable[[], None], Callable[[], None]]] = []

    def join(self, ranks: int, when_begun: Callable[[], None], when_stuck: Callable[[], None]) -> None:
        """So many ranks have been launched. `when_begun` is called once all have, `when_stuck` once collectives have
        timed out."""
        self._missing -= ranks
        self._members.append((when_begun, when_stuck))
        if self._missing == 0:
            self._began = self._loop.time() + self.script.start_s
            for begun, _ in self._members:
                begun()

    def stand(self) -> None:
        """A rank is gone or hangs: nobody gets beyond the step that is under way."""
        if self._stood is None:
            self._stood = self._loop.time()
            self._loop.call_later(self.script.timeout_s, self._time_out)

    def slow_down(self, factor: float) -> None:
        """From the step that is under way on, each takes so many times as long."""
        if self._began is not None:
            done = self.step() + 1 - self.first
            self._began += done * self.script.step_s
            self.first += done
        self.script = replace(self.script, step_s=self.script.step_s * factor)

    def _time_out(self) -> None:
        for _, stuck in self._members:
            stuck()

    @property
    def stands(self) -> bool:
        return self._stood is not None

    @property
    def began(self) -> float | None:
        """When its first step begins; None while ranks are missing."""
        return self._began

    def step(self) -> int:
        """The newest step that is complete, `first` - 1 before there is one."""
        if self._began is None:
            return self.first - 1
        now = self._loop.time() if self._stood is None else self._stood
        # A step that ends at this very instant is complete, whatever rounding says.
        done = int(max(0.0, now - self._began) / self.script.step_s + 1e-6)
        newest = self.first + done - 1
        return newest if self.script.steps is None else min(newest, self.script.steps - 1)

    @property
    def finished(self) -> bool:
        return self.script.steps is not None and self.step() >= self.script.steps - 1
