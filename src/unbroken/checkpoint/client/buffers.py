"""The keeper's buffers for the states of a training: of the right size, registered with its GPU, claimed for a save."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import CheckpointError, UnbrokenError
from ...progress import holding_up
from ..capture.state import Captured, capture, cuda_device, optimizers_in
from ..device.staging import CpuStager, CudaStager, Stager
from ..options import CopyOptions
from .links import KeeperGone
from .pinning import Pinning
from .plan import SavePlan, plan_for, whole_pages
from .rank_buffer import RankBuffer
from .session import Session

logger = logging.getLogger("unbroken.checkpoint")

CLAIM_TIMEOUT_S = 600.0
SHORT_WAIT_S = 2.0
"""A save that waits longer for a buffer tells the hang detector so. It is not told of an ordinary save: the phase
checkpointing has a deadline of minutes, and a rank that hangs inside a save must be found as fast as any other."""


@dataclass(frozen=True, eq=False)
class Device:
    """How the state comes from where it lies into a buffer; on a GPU buffers are registered first."""

    stager: Stager
    pinning: Pinning | None = None


class Buffers:
    """This rank's buffers, for states of one shape on one device; both are known from the first state on."""

    def __init__(self, session: Session, copies: CopyOptions, when_busy: str) -> None:
        self.memory = session.memory
        self.agreement = session.agreement
        self.place = session.place
        self.device = Device(CpuStager())
        self.plan: SavePlan | None = None
        self._copies, self._when_busy = copies, when_busy
        self._slow = False

    def choose_device(self, state: Mapping[str, Any]) -> None:
        """Sets up copying for the device that the state lies on, once."""
        if self.device.pinning is not None or self.plan is not None:
            return
        device = cuda_device(state)
        if device is not None:
            stager = CudaStager(device, throttle=self._copies.throttle, device_copy=self._copies.device_copy)
            self.device = Device(stager, Pinning(device))

    def plan_of(self, captured: Captured) -> SavePlan:
        """The layout of this state, and buffers for it; made again when the state's shape has changed."""
        signature = captured.signature()
        if self.plan is None or self.plan.signature != signature:
            plan = plan_for(captured, signature, self.place, str(self.memory.link.info["run_id"]))
            with holding_up():
                buffers = self.memory.provide(plan.buffer_bytes)
            if self.device.pinning is not None:
                self.device.pinning.begin(buffers)
            else:
                self.memory.enter(buffers)
            self.plan = plan
        return self.plan

    def prepare(self, state: dict[str, Any]) -> None:
        """Lets buffers be made and registered now, beside the start of the training, not at the first save.

        Optimizers make their state at their first step: where it is not there yet, after that.
        """
        lazy = [o for o in optimizers_in(state) if not o.state]
        if lazy:
            _after_first_step(lazy, weakref.WeakMethod(self._make), state)
        else:
            self._make(state)

    def _make(self, state: Mapping[str, Any]) -> None:
        try:
            self.plan_of(capture(state))
        except UnbrokenError as e:
            logger.warning("buffers for snapshots were not made ahead: %s", e)

    def claim(self, step: int, plan: SavePlan) -> RankBuffer | None:
        """A buffer for the save of this step, registered where that is needed; None if all are in use.

        Where the system does not let memory be registered the copy is slow, and that is logged once.
        Raises KeeperGone, KeeperRefused.
        """
        buffer = self._claim(step, plan)
        if buffer is not None and self.device.pinning is not None and not buffer.pinned:
            with holding_up():
                try:
                    self.device.pinning.ensure(buffer)
                except CheckpointError as e:
                    if not self._slow:
                        logger.warning("%s", e)
                    self._slow = True
        return buffer

    def _claim(self, step: int, plan: SavePlan) -> RankBuffer | None:
        if self._when_busy == "wait":
            return self._wait_for_one(plan)
        buffer = self.memory.claim(plan.buffer_bytes, 0.02)
        # All ranks do as the first one could, so that no snapshot lacks a rank.
        if not self.agreement.decide(f"save/{step}", buffer is not None):
            if buffer is not None:
                self.memory.release(buffer)
            return None
        return buffer or self._wait_for_one(plan)

    def _wait_for_one(self, plan: SavePlan) -> RankBuffer | None:
        with contextlib.suppress(KeeperGone):  # its successor may need a while
            if buffer := self.memory.claim(plan.buffer_bytes, SHORT_WAIT_S):
                return buffer
        with holding_up():
            return self.memory.claim(plan.buffer_bytes, CLAIM_TIMEOUT_S)

    def to_read_into(self, size: int) -> RankBuffer | None:
        """A buffer to read a checkpoint of `size` bytes into, so that a GPU gets it from registered memory."""
        if self.device.pinning is None:
            return None
        try:
            self.memory.provide(
                whole_pages(size), 1
            )  # the others would compete for the memory's bandwidth now
            return self.memory.claim(whole_pages(size), 10.0)
        except UnbrokenError as e:
            logger.info("reading without a registered buffer: %s", e)
            return None

    @contextlib.contextmanager
    def registering(self, buffer: RankBuffer | None) -> Iterator[None]:
        """Registers the buffer while its bytes are read or verified."""
        if buffer is None or self.device.pinning is None:
            yield
            return
        with ThreadPoolExecutor(1) as pool:
            registered = pool.submit(self.device.pinning.ensure, buffer)
            yield
            try:
                registered.result()
            except CheckpointError as e:
                logger.warning("%s", e)


def _after_first_step(
    waiting: list[torch.optim.Optimizer],
    make: weakref.WeakMethod[Callable[[Any], None]],
    state: dict[str, Any],
) -> None:
    """Calls `make(state)` once, after every one of these optimizers has made its state."""

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        if all(o.state for o in waiting):
            handle.remove()
            target = make()
            if target is not None:
                target(state)

    from torch.optim.optimizer import register_optimizer_step_post_hook

    handle = register_optimizer_step_post_hook(torch._disable_dynamo(hook))  # type: ignore[attr-defined]
