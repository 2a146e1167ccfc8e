"""What a Trainer counts: its TrainerState, the sums between two logs, and callbacks that export a state. Needs transformers."""

from __future__ import annotations

from typing import Any

from transformers.trainer_callback import ExportableState

_COUNTERS = (
    "epoch", "global_step", "num_input_tokens_seen", "total_flos", "log_history", "best_metric", "best_global_step",
    "best_model_checkpoint",
)  # fmt: skip
_SUMS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged")


class Counters:
    """A trainer's counters, as part of a state."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._sums: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        """What they are now; before `train` has begun there are no sums."""
        trainer = self._trainer
        callbacks = [c for c in trainer.callback_handler.callbacks if isinstance(c, ExportableState)]
        return {
            "counters": {name: getattr(trainer.state, name) for name in _COUNTERS},
            "callbacks": {type(c).__name__: c.state()["attributes"] for c in callbacks},
            "sums": {n: float(getattr(trainer, n)) for n in _SUMS if hasattr(trainer, n)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts back all but the sums, which the Trainer sets to zero before it begins."""
        for name, value in state["counters"].items():
            setattr(self._trainer.state, name, value)
        for callback in self._trainer.callback_handler.callbacks:
            for name, value in state["callbacks"].get(type(callback).__name__, {}).items():
                setattr(callback, name, value)
        self._sums = dict(state["sums"])

    def put_sums(self) -> None:
        """Puts back the sums, once."""
        for name, value in self._sums.items():
            now = getattr(self._trainer, name)
            setattr(self._trainer, name, now + value if name == "_tr_loss" else type(now)(value))
        self._sums = {}
