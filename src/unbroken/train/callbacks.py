"""What a training does besides: a class of yours that is called at each step, and whose state a checkpoint keeps.

class Best(Callback):
    def __init__(self):
        self.loss = float("inf")
    def on_evaluation(self, training, loss):
        self.loss = min(self.loss, loss)
    def state_dict(self):
        return {"loss": self.loss}
    def load_state_dict(self, state):
        self.loss = state["loss"]

sys.exit(train(parse(sys.argv[1:]), callbacks=[Best()]))      # train of train/loop.py, parse of train/config.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from .training import Training


class Callback:
    """Does nothing; override what you need. Every rank has one of its own, and calls it at the same moments."""

    def on_start(self, training: Training) -> None:
        """Before the first step, after what was saved is there again."""

    def on_step(self, training: Training, loss: float, norm: Tensor) -> None:
        """After each update, before it may be saved: mean loss of the global batch, norm of its gradient."""

    def on_evaluation(self, training: Training, loss: float) -> None:
        """After each evaluation on held-out samples."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, of this rank's: tensors, numbers, texts, in dictionaries and lists."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave."""


def by_name(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Callbacks by the names of their classes, as a checkpoint has them. Raises UsageError for two of one class."""
    found = {type(c).__name__: c for c in callbacks}
    if len(found) < len(callbacks):
        raise UsageError(
            f"two callbacks of one name among {', '.join(type(c).__name__ for c in callbacks)}: their states could not be told apart",
            hint="Give each a class of its own",
        )
    return found
