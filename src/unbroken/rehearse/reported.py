"""What our own trainer makes of a step. Its updates are not one step of a torch optimizer each, so they are counted as it reports them.

The reference trainer has an update of its own; a plan steps its optimizer once for each unit, or updates in one pass over memory.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

import torch

from .collect import short

if TYPE_CHECKING:
    from ..train.training import Training

_LOOP, _STEPS = "unbroken.train.loop", "_steps"
"""The module and the function of our trainer's loop."""


@dataclass(frozen=True)
class OwnStep:
    """A step of our trainer, as its loop holds it."""

    trainer: Training
    batch: bytes
    """This rank's tokens of the last step that is complete."""

    @property
    def epoch(self) -> int:
        """Which time the data is read, from 0."""
        return max(0, self.trainer.position.next_index - 1) // self.trainer.order.samples


def is_own() -> bool:
    """Whether our trainer is what runs, its beginning included: a plan steps its optimizer once there, to have its state."""
    return _frame("") is not None


def own_step() -> OwnStep | None:
    """What our trainer's loop holds; None where another script is running."""
    frame = _frame(_STEPS)
    return OwnStep(frame.f_locals["t"], frame.f_locals.get("batch", b"")) if frame is not None else None


def _frame(name: str) -> FrameType | None:
    """The innermost frame of our trainer's loop, of this function if one is named."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _LOOP and name in ("", frame.f_code.co_name):
            return frame
        frame = frame.f_back
    return None


def state_of_trainer(trainer: Training) -> dict[str, str]:
    """Digests of what this rank holds, by name."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()  # new values travel in streams of their own
    parameters, optimizer = trainer.final_tensors()
    return {
        **{f"parameter {n}": short(t) for n, t in parameters.items()},
        **{f"optimizer {n}": short(t) for n, t in optimizer.items()},
    }
