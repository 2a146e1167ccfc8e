"""Optimizers that other frameworks wrap around torch's, taken apart: import this where a Checkpointer is given one of them.

    import unbroken.hooks.wrappers
    checkpoints = unbroken.Checkpointer()
    state = {"model": model, "optimizer": megatrons_optimizer}

Each line: a class, and the parts that hold its state. Nothing of a framework is imported. The model's own weights are
saved beside: where the framework gathers them late (Megatron's overlapped gather), let it do so before a save.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..checkpoint.capture.adapters import register
from .training import Values


def _inner(wrapper: Any) -> Any:
    return wrapper.optimizer


def _masters(name: str) -> Callable[[Any], Any]:
    """The optimizer within, the copies in full precision that it steps, and the scaler of the loss."""

    def parts(wrapper: Any) -> Any:
        if getattr(wrapper, "is_stub_optimizer", False):
            return {}  # this rank has no parameters
        scaler = getattr(wrapper, "grad_scaler", None)
        return {
            "optimizer": wrapper.optimizer, "masters": getattr(wrapper, name),
            **({"scaler": scaler} if scaler is not None else {}),
        }  # fmt: skip

    return parts


def _zero(wrapper: Any) -> Any:
    """ZeRO 1 and 2: as above; the scaler has no state dict, its numbers are what it is."""
    scaler = wrapper.loss_scaler
    numbers = {k for k, v in vars(scaler).items() if isinstance(v, bool | int | float)}
    return {
        "optimizer": wrapper.optimizer, "masters": wrapper.single_partition_of_fp32_groups,
        "scaler": Values(lambda: {k: getattr(scaler, k) for k in sorted(numbers)}, lambda saved: vars(scaler).update(saved)),
    }  # fmt: skip


register("accelerate.optimizer.AcceleratedOptimizer", _inner)
register("lightning.pytorch.core.optimizer.LightningOptimizer", _inner)
register("pytorch_lightning.core.optimizer.LightningOptimizer", _inner)
register("torchft.optim.OptimizerWrapper", lambda wrapper: wrapper.optim)
register("torchtitan.components.optimizer.OptimizersContainer", lambda wrapper: list(wrapper.optimizers))
register("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer", _zero)
register(
    "megatron.core.optimizer.optimizer.ChainedOptimizer", lambda wrapper: list(wrapper.chained_optimizers)
)
register("megatron.core.optimizer.optimizer.FP32Optimizer", _inner)
register(
    "megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params",
    _masters("fp32_from_float16_groups"),
)
register(
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer",
    _masters("shard_fp32_from_float16_groups"),
)
