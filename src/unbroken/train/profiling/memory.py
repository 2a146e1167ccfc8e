"""What a rank holds, in bytes of storages by category."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..parallel.trainer import PlanTrainer


def held_bytes(trainer: PlanTrainer) -> dict[str, int]:
    """Parameters, gradients and optimizer state between two steps, each storage counted once; weights that are the
    parameters themselves count there."""
    units, moments = trainer.zero.units, trainer.moments.tensors()
    parts = _storages(p for u in units for p in u.parts)
    state = _storages([t for m in moments.values() for t in m.values()] + list(trainer.zero.weights.values()))
    return {
        "parameters": sum(parts.values()),
        "gradients": sum(u.gradient_bytes for u in units),
        "optimizer": sum(n for at, n in state.items() if at not in parts),
    }


def peak_bytes(held: dict[str, int], device: torch.device) -> dict[str, int]:
    """What a step takes beyond `held` at its peak, since the statistics were reset: activations, gathered parameters and
    buffers, which torch's allocator does not tell apart. Empty where no allocator counts."""
    if device.type != "cuda":
        return {}
    return {"activations": max(0, torch.cuda.max_memory_allocated(device) - sum(held.values()))}


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    return {s.data_ptr(): s.nbytes() for t in tensors if (s := t.untyped_storage()).nbytes()}
