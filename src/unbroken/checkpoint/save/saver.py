"""One save: the state as it is at the call goes into a buffer of the keeper, behind the training's back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...errors import DoesNotFit, UnbrokenError
from ...progress import holding_up
from ..capture.digests import Digests, begin_digests
from ..capture.direct import Stamp, write_tensors
from ..capture.generators import capture_rng
from ..capture.loaders import position_in
from ..capture.state import Captured, capture
from ..client.buffers import Buffers
from ..client.links import KeeperGone
from ..client.plan import SavePlan
from ..client.rank_buffer import RankBuffer
from ..client.session import Session
from ..device.staging import Copying
from ..format.position import Position, position_of
from ..format.replicas import joined_json
from ..levels import Saved
from ..options import Options
from .outcomes import Outcomes
from .schedule import Schedule

logger = logging.getLogger("unbroken.checkpoint")

SLOW_S = 1.0


class Saver:
    """Takes saves one after the other, of whichever thread. `position` gives the data position where a save has none."""

    def __init__(
        self,
        options: Options,
        session: Session,
        buffers: Buffers,
        schedule: Schedule,
        outcomes: Outcomes,
        position: Callable[[], Any] | None,
    ) -> None:
        self.options, self.session, self.buffers = options, session, buffers
        self.schedule, self.outcomes = schedule, outcomes
        self._position = position

    def save(self, step: int, state: Mapping[str, Any], position: Any, persist: bool | None) -> Saved:
        """As `Checkpointer.save`; not for two threads at once."""
        # Nobody asked for this very step, and no rule keeps it: a newer one makes up for it on a slow storage.
        every = int(self.options.keeper.keep_every or 0)
        periodic = persist is None and not (every and step % every == 0)
        persist = self.schedule.persists(step) if persist is None else persist
        where = position_of(
            position if position is not None else self._position() if self._position else position_in(state)
        )
        self.buffers.choose_device(state)
        captured = capture(state)
        saved = Saved.with_levels(step, self.session.attempt, self._levels(persist))
        try:
            plan = self.buffers.plan_of(captured)
            buffer = self.buffers.claim(step, plan)
        except KeeperGone as e:
            return self.outcomes.skip(saved, str(e))
        except DoesNotFit as e:
            with holding_up():
                return self._save_without_memory(saved, captured, where, persist, e)
        if buffer is None:
            return self.outcomes.skip(saved, "every buffer is still in use")
        if (waited := time.monotonic() - saved.began) > SLOW_S:
            logger.warning(
                "step %d waited %.1f s for a buffer: saves are asked for faster than written", step, waited
            )
        self.outcomes.begin(saved)
        content = self._content(step, plan, captured, where, persist=persist, periodic=periodic)
        if self._copy(saved, captured, plan, buffer, content):
            self.schedule.saved(saved, self.buffers.device.stager.last_stall_s, persist)
        return saved

    def _levels(self, persist: bool) -> list[str]:
        levels = ["staged", "host", *(["peer"] if self.session.has_peers else [])]
        if persist:
            levels += [self.session.storage.level, *(["remote"] if self.options.keeper.remote else [])]
        return levels

    def _content(
        self, step: int, plan: SavePlan, captured: Captured, where: Position, **how: bool
    ) -> dict[str, Any]:
        """What the keeper is told of the buffer once it is whole."""
        changing = {
            "step": step, "attempt": self.session.attempt, "position": where.as_json(), "values": captured.tree,
            "rng": _generators(captured), "time": time.time(),
        }  # fmt: skip
        if went_on := self.session.memory.went_on:
            changing["went_on"] = list(went_on)
        return {
            "file_bytes": plan.layout.file_bytes, "world_size": self.session.place.world_size,
            "part": plan.body.with_more(changing), **how,
        }  # fmt: skip

    def _copy(
        self, saved: Saved, captured: Captured, plan: SavePlan, buffer: RankBuffer, content: dict[str, Any]
    ) -> bool:
        """Begins the copy; False if it cannot be made for want of memory, which is no reason to end a training."""

        digests: Digests | None = None

        def copied(copying: Copying) -> None:
            self._copied(copying, buffer, saved, content, digests)

        buffer.map[: plan.layout.data_start] = plan.header
        protected = frozenset(captured.pieces) if self.options.copies.fenced else captured.protected
        try:
            if content["persist"]:  # keepers compare what goes to the disk
                digests = begin_digests(captured, self.session.place.world_size)
            self.buffers.device.stager.copy(captured.pieces, buffer.tensor, plan.layout, protected, copied)
        except BaseException as e:  # an interrupt too: the buffer goes back, and nobody waits for this save
            self.session.memory.release(buffer)
            self.outcomes.fail(saved, str(e)[:500] or type(e).__name__)
            if not isinstance(e, torch.OutOfMemoryError):
                raise
            return False
        return True

    def _copied(
        self,
        copying: Copying,
        buffer: RankBuffer,
        saved: Saved,
        content: dict[str, Any],
        digests: Digests | None,
    ) -> None:
        """The copy has ended: the buffer is whole, or will never be."""
        memory = self.session.memory
        if copying.error is not None:
            memory.release(buffer)
            self.outcomes.fail(saved, copying.error.message)
            return
        saved.reach("staged")
        if digests is not None:
            content["part"] = content["part"].with_more({"replicas": joined_json(digests.read())})
        memory.finalize(buffer, saved.step, saved.attempt, content, time.monotonic() - saved.began)
        saved.reach("host")
        if self.session.completion is not None:
            self.session.completion.on_host(saved.step)

    def _save_without_memory(
        self, saved: Saved, captured: Captured, where: Position, persist: bool, why: DoesNotFit
    ) -> Saved:
        """The slower path where the keeper has no room for a snapshot: this process writes its share itself."""
        if not persist:
            return self.outcomes.skip(saved, f"{why.message}; only what goes to disk is saved")
        logger.warning(
            "%s; step %d is written by the training process, which waits for it", why.message, saved.step
        )
        self.outcomes.begin(saved)
        p, memory = self.session.place, self.session.memory
        run_id = str(memory.link.info["run_id"])
        stamp = Stamp(run_id, saved.attempt, saved.step, p.rank, p.world_size, where, memory.went_on)
        try:
            write_tensors(
                self.session.storage, captured.live, captured.tree, stamp, rng=_generators(captured)
            )
            memory.alive().request({"op": "wrote", "step": saved.step, "world_size": p.world_size})
        except (UnbrokenError, OSError) as e:
            self.outcomes.fail(saved, str(e))
            return saved
        saved.reach("staged")
        saved.fail("the keeper has no room for a snapshot", levels=("host", "peer"))
        return saved


def _generators(captured: Captured) -> dict[str, Any]:
    return {"generators": capture_rng(), **captured.notes}
