"""What a Trainer counts: its TrainerState, the sums between two logs (trl's metrics with them), callbacks that export a state, and what
is left of each epoch. Needs transformers."""

from __future__ import annotations

from typing import Any

from transformers.trainer_callback import ExportableState

from ...data import Loader
from .history import History, read

_COUNTERS = (
    "epoch", "global_step", "num_input_tokens_seen", "total_flos", "best_metric", "best_global_step", "best_model_checkpoint",
)  # fmt: skip
_SUMS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged")


class Counters:
    """A trainer's counters, as part of a state."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._sums: dict[str, float] = {}
        self._history = History()

    def state_dict(self) -> dict[str, Any]:
        """What they are now; before `train` has begun there are no sums."""
        trainer = self._trainer
        callbacks = [c for c in trainer.callback_handler.callbacks if isinstance(c, ExportableState)]
        counters = {name: getattr(trainer.state, name) for name in _COUNTERS}
        return {
            "counters": {**counters, **self._logged(trainer.state.log_history)},
            "callbacks": {type(c).__name__: c.state()["attributes"] for c in callbacks},
            "sums": {n: float(getattr(trainer, n)) for n in _SUMS if hasattr(trainer, n)},
            **self._trl(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts back all but the sums, which the Trainer sets to zero before it begins."""
        counters = dict(state["counters"])
        if (text := counters.pop("logged", None)) is not None:
            counters["log_history"] = read(text)
        for name, value in counters.items():
            setattr(self._trainer.state, name, value)
        for callback in self._trainer.callback_handler.callbacks:
            for name, value in state["callbacks"].get(type(callback).__name__, {}).items():
                setattr(callback, name, value)
        self._sums = dict(state["sums"])
        if (trl := state.get("trl")) is not None and self._trl():
            self._trainer._total_train_tokens = trl["tokens"]
            for name, values in trl["metrics"].items():
                self._trainer._metrics["train"][name] = list(values)

    def _trl(self) -> dict[str, Any]:
        """Tokens since the beginning, and what is averaged at the next log; nothing for a Trainer that is not trl's."""
        metrics, tokens = (getattr(self._trainer, n, None) for n in ("_metrics", "_total_train_tokens"))
        if not isinstance(metrics, dict) or not isinstance(tokens, int | float):
            return {}
        return {
            "trl": {"tokens": tokens, "metrics": {n: list(v) for n, v in metrics.get("train", {}).items()}}
        }

    def _logged(self, history: list[Any]) -> dict[str, Any]:
        try:
            return {"logged": self._history.write(history)}
        except TypeError:  # a callback has logged what is no JSON
            return {"log_history": history}

    def put_sums(self) -> None:
        """Puts back the sums, once."""
        for name, value in self._sums.items():
            now = getattr(self._trainer, name)
            setattr(self._trainer, name, now + value if name == "_tr_loss" else type(now)(value))
        self._sums = {}


class Epochs:
    """What is left of each epoch in a Trainer's own count. Where nothing is skipped, and ranks and batch size are those of before, that
    is what it would count by itself."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def resume(self, loader: Any, steps: int) -> tuple[int, int]:
        """(epochs done, batches done of the next one) of a training that was restored; an undisturbed epoch has so many `steps`."""
        state, args = self._trainer.state, self._trainer.args
        done, accumulate = state.global_step, args.gradient_accumulation_steps
        if not _is_counted(loader):
            return done // steps, done % steps * accumulate
        epoch: int = loader.loader.epoch
        trained = self._trained(loader, epoch)
        if args.max_steps <= 0:  # it is to train so many epochs, and they have other steps than those before
            state.max_steps += done - epoch * steps - trained // accumulate
        return epoch, trained

    def count(
        self, loader: Any, epoch: int, steps_in_epoch: int, epochs_trained: int, steps_trained_in_current_epoch: int,
        resume_from_checkpoint: Any, **_: Any,
    ) -> dict[str, int]:  # fmt: skip
        """What `_run_epoch` is given instead for an epoch that ends earlier or later than it would think."""
        if not _is_counted(loader):
            return {}
        accumulate = self._trainer.args.gradient_accumulation_steps
        resumed = epoch == epochs_trained and resume_from_checkpoint is not None
        before, left = steps_trained_in_current_epoch if resumed else 0, loader.loader.batches_left(epoch)
        if before + left == steps_in_epoch:
            return {}
        updates = before // accumulate + -(-left // accumulate)
        return {"steps_in_epoch": before + left, "num_update_steps_per_epoch": updates}

    def _trained(self, loader: Any, epoch: int) -> int:
        """Batches that are behind the training, or skipped, in whole steps."""
        behind: int = len(loader) - loader.loader.batches_left(epoch)
        return behind - behind % int(self._trainer.args.gradient_accumulation_steps)


def _is_counted(loader: Any) -> bool:
    """Whether it is known how many batches an epoch has."""
    try:
        return isinstance(loader.loader, Loader) and len(loader) > 0
    except TypeError:
        return False
