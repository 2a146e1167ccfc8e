"""Megatron's own trainer: two lines before `pretrain`, and a kill costs the steps since the last snapshot.

    from unbroken.hooks.megatron import attach

    attach()
    pretrain(train_valid_test_datasets_provider, model_provider, model_type, forward_step)

Weights, optimizers with their masters, the schedule, iteration and consumed samples (from which Megatron finds its place in the data),
all generators. `--load` counts until there is a checkpoint of ours; `--save` stays as it is. A checkpoint is of one layout of
ranks. Its functions are called where Megatron calls its own for fault tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

from . import wrappers  # its optimizers
from .states.megatron import MegatronCounters, Trackers, refuse_unkept, unwrap
from .training import HookedTraining, check_version, folder_of

check_version("megatron-core", "0.19", "hooks-megatron")

__all__ = ["attach", "wrappers"]


def attach(directory: str | Path | None = None, **options: Any) -> HookedTraining:
    """Keeps the training of the next `pretrain` in this process: call it once, before.

    `directory` and `options` are those of `unbroken.Checkpointer` (default: the run's own folder under `unbroken run`, else
    `unbroken` here). Raises UsageError where another hook is at work; `pretrain` does for what cannot be kept.
    """
    training = HookedTraining("megatron", folder_of(directory, "."), **options)
    _Attached(import_module("megatron.training.training"), training)
    return training


class _Attached:
    """The seams of megatron.training; each calls what was there."""

    def __init__(self, megatron: Any, training: HookedTraining) -> None:
        self.megatron, self.training = megatron, training
        self.counters = MegatronCounters()
        seams = megatron.ft_integration
        self._around(megatron, "setup_model_and_optimizer", self._built)
        self._around(megatron, "train_step", self._trained)
        self._around(megatron, "cyclic_iter", self._iterated)
        self._around(megatron, "checkpoint_and_decide_exit", self._ended)
        self._around(seams, "on_training_step_start", self._begun)
        self._around(seams, "shutdown", self._over)
        training.during(megatron, "evaluate_and_print_results", "evaluating")
        training.during(megatron, "save_checkpoint_and_time", "checkpointing")

    def _around(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def both(*args: Any, **how: Any) -> Any:
            return ours(original, *args, **how)

        setattr(owner, name, both)

    def _built(self, setup: Callable[..., Any], *args: Any, **how: Any) -> Any:
        """Everything is built, and not yet what reads the data: restores it."""
        options = self.megatron.get_args()
        refuse_unkept(options)
        built = model, optimizer, scheduler = setup(*args, **how)
        self.counters.attach(options)
        state = {
            "models": [unwrap(chunk) for chunk in model], "optimizer": optimizer, "scheduler": scheduler, "counters": self.counters,
            "trackers": Trackers(),
        }  # fmt: skip
        if self.megatron.should_disable_forward_pre_hook(options):
            # Weights are gathered in the next forward pass: without this, a save would have those of before the step.
            self.training.before_save = lambda: self.megatron.force_param_sync(model, optimizer=optimizer)
        if self.training.begin(state) is not None:
            self.megatron.update_num_microbatches(options.consumed_train_samples, consistency_check=False)
        self.training.step = options.iteration
        return built

    def _iterated(self, cycle: Callable[..., Any], iterable: Any) -> Iterator[Any]:
        """An iterator that is made at its first batch draws from the generators then."""
        for batch in cycle(iterable):
            self.training.put_generators_back()
            yield batch

    def _begun(self, seam: Callable[[], Any]) -> Any:
        if self.megatron.get_args().dataloader_type != "cyclic":
            self.training.put_generators_back()
        return seam()

    def _trained(self, step: Callable[..., Any], *args: Any, **how: Any) -> Any:
        """Notes the loss, which the last pipeline stage has."""
        found = step(*args, **how)
        self.training.loss.note(next(iter(found[0].values()), None))
        return found

    def _ended(
        self, decide: Callable[..., Any], model: Any, optimizer: Any, scheduler: Any, iteration: int, operations: Any, *args: Any, **how: Any
    ) -> Any:  # fmt: skip
        """The iteration is complete, with its log and its evaluation."""
        leave = decide(model, optimizer, scheduler, iteration, operations, *args, **how)
        self.counters.count(iteration, operations)
        self.training.end_step(iteration)
        return leave

    def _over(self, seam: Callable[[], Any]) -> Any:
        """Everything is durable before Megatron says that it is done."""
        self.training.finish()
        return seam()
