"""When saves are due: at fixed steps, or as measured costs and the failure rate say, the same on all ranks."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict

from ...units import plural
from ..catalogue.placement import CLAIMS
from ..client.session import Session
from ..interval import IntervalController
from ..levels import Saved
from ..options import IntervalOptions

logger = logging.getLogger("unbroken.checkpoint")

FIRST_STEPS = 5
"""With automatic intervals: the first save comes after this many steps, before anything is measured."""


def due_at(step: int, every: int) -> bool:
    """Whether a fixed interval ends at this step."""
    return step % every == 0


class Schedule:
    """Which steps are saved. `controller` measures where an interval is automatic; None where both are fixed."""

    def __init__(self, intervals: IntervalOptions, session: Session) -> None:
        self.intervals = intervals
        self.session = session
        self.controller: IntervalController | None = None
        self._next_snapshot = self._next_persist = FIRST_STEPS
        self._last_why = ""
        if intervals.automatic:
            began = min((e.modified for e in session.storage.files(CLAIMS)), default=time.time())
            self.controller = IntervalController(session.place.world_size, session.attempt - 1, began)

    def due(self, step: int) -> bool:
        """Whether this step is to be saved; called at every step, on every rank."""
        if self.controller is not None:
            self.controller.step(step, time.monotonic())
        every = self.intervals.snapshot
        snapshot = due_at(step, every) if isinstance(every, int) else step >= self._next_snapshot
        return snapshot or self.persists(step)

    def persists(self, step: int) -> bool:
        """Whether this step is to become durable."""
        every = self.intervals.persist
        return due_at(step, every) if isinstance(every, int) else step >= self._next_persist

    def durable(self, seconds: float) -> None:
        """A save was durable after this long."""
        if self.controller is not None:
            self.controller.durable(seconds)

    def saved(self, saved: Saved, stall_s: float, persist: bool) -> None:
        """Where intervals are automatic: what this save cost, and when the next ones are due, the same on all ranks.

        `stall_s` is by how much the copies before it held the training up.
        """
        if self.controller is None:
            return
        self.controller.saved(time.monotonic() - saved.began + stall_s)
        proposal = self.controller.decide()
        agreed = self.session.agreement.decide(
            f"interval/{saved.step}", None if proposal is None else asdict(proposal)
        )
        snapshot, every = (
            (agreed["snapshot"], agreed["persist"]) if agreed else (FIRST_STEPS, 2 * FIRST_STEPS)
        )
        why = (
            f"a snapshot every {plural(snapshot, 'step')}, a checkpoint every {every}: {agreed['why']}"
            if agreed
            else ""
        )
        if why and why != self._last_why and self.session.place.rank == 0:
            logger.info("%s", why)
        self._last_why = why
        self._next_snapshot = saved.step + snapshot
        if persist:
            self._next_persist = saved.step + every
