"""Parameters shared by ranks: each keeps a piece and gathers a block's when it is needed (FSDP2's fully_shard)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from .stage import Stage


def units(stage: Stage) -> list[tuple[nn.Module, ...]]:
    """What is gathered, reduced and published together: the embedding, each block, norm and head."""
    found: list[tuple[nn.Module, ...]] = [(b,) for b in stage.blocks.values()]
    if stage.embedding is not None:
        found.insert(0, (stage.embedding,))
    if stage.norm is not None and stage.head is not None:
        found.append((stage.norm, stage.head))
    return found


def share_parameters(stage: Stage, mesh: DeviceMesh, *, reshard: bool, gradient_dtype: torch.dtype) -> None:
    """Cuts a stage's parameters over the ranks of `mesh`, in place; gradients arrive cut and summed over those ranks."""
    if mesh.size() == 1:
        return
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(reduce_dtype=gradient_dtype)}
    found = units(stage)
    for i, unit in enumerate(found):
        # What the backward pass needs first is not freed: it would be gathered again at once.
        again = reshard and i < len(found) - 1
        fully_shard(unit[0] if len(unit) == 1 else list(unit), reshard_after_forward=again, **options)
    fully_shard(stage, reshard_after_forward=False, **options)
    for m in stage.modules():
        if isinstance(m, FSDPModule):
            # The loss is divided by all tokens already: sums, no means.
            m.set_gradient_divide_factor(1.0)
            m.set_force_sum_reduction_for_comms(True)
