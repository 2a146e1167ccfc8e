"""Optimizers that other frameworks wrap around torch's, taken apart: import this where a Checkpointer is given one of them.

    import unbroken.hooks.wrappers
    checkpoints = unbroken.Checkpointer()
    state = {"model": model, "optimizer": megatrons_optimizer}

Each line: a class, and the parts that hold its state. Nothing of a framework is imported. The model's own weights are
saved beside: where the framework gathers them late (Megatron's overlapped gather), let it do so before a save.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from ..checkpoint.capture.adapters import register
from .training import Values


def _inner(wrapper: Any) -> Any:
    return wrapper.optimizer


def _contained(wrapper: Any) -> Any:
    return list(wrapper.optimizers)


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
    return {
        "optimizer": wrapper.optimizer, "masters": wrapper.single_partition_of_fp32_groups, "scaler": _numbers(wrapper.loss_scaler),
    }  # fmt: skip


def _numbers(scaler: Any) -> Values:
    names = sorted(k for k, v in vars(scaler).items() if isinstance(v, bool | int | float))
    return Values(lambda: {k: getattr(scaler, k) for k in names}, lambda saved: vars(scaler).update(saved))


def _zero_3(wrapper: Any) -> Any:
    """ZeRO 3: between steps the groups of the optimizer within are empty, and the weights are this rank's shards."""
    inner = copy.copy(wrapper.optimizer)  # the same state, in groups that can be saved
    inner.param_groups = [dict(g, params=[]) for g in wrapper.optimizer.param_groups]
    for number, master in enumerate(wrapper.fp32_partitioned_groups_flat):
        inner.param_groups[wrapper.sub_group_to_group_id[number]]["params"].append(master)
    return {
        "optimizer": inner, "masters": wrapper.fp32_partitioned_groups_flat, "shards": wrapper.fp16_partitioned_groups_flat,
        "groups": Values(lambda: _plain(wrapper.optimizer), lambda saved: _put(wrapper.optimizer, saved)),
        "scaler": _numbers(wrapper.loss_scaler),
    }  # fmt: skip


def _plain(optimizer: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def _put(optimizer: Any, saved: list[dict[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        group.update(values)


register("accelerate.optimizer.AcceleratedOptimizer", _inner)
register("lightning.pytorch.core.optimizer.LightningOptimizer", _inner)
register("pytorch_lightning.core.optimizer.LightningOptimizer", _inner)
register("torchft.optim.OptimizerWrapper", lambda wrapper: wrapper.optim)
register("torchtitan.components.optimizer.optimizer.OptimizersContainer", _contained)
register("torchtitan.components.optimizer.OptimizersContainer", _contained)  # before 0.3
register("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer", _zero)
register("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3", _zero_3)
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
