"""What the backward pass computes again instead of keeping: nothing, all but matrix products, or whole blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..model import Block

_MATRIX_PRODUCTS = frozenset(
    op
    for name in ("mm", "bmm", "addmm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention",
                 "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention_for_cpu")
    if (packet := getattr(torch.ops.aten, name, None)) is not None
    for op in [packet.default]
)  # fmt: skip
"""Their results are kept: cheap to hold, dear to compute."""

_BUDGET = 0.8
"""Share of a compiled block's activations to keep: all that its matrix products and attention need (23.5 of 33 bytes for each
token and unit of width); with less, torch's partitioner computes attention again."""


class Recompute:
    """Calls a block so that its backward pass computes again what the plan says."""

    def __init__(self, what: str) -> None:
        self._options: dict[str, Any] | None = None
        self._selective = what == "selective"
        if what != "none":
            # The model draws no random numbers in its forward pass: none have to be kept.
            self._options = {"use_reentrant": False, "preserve_rng_state": False}
        if what == "selective":
            self._options = {
                **(self._options or {}),
                "context_fn": lambda: create_selective_checkpoint_contexts(_keep_matrix_products),
            }

    def __call__(self, block: nn.Module, *args: Tensor) -> Tensor:
        """block(*args)."""
        if self._options is None or not torch.is_grad_enabled():
            out: Tensor = block(*args)
            return out
        again: Tensor = checkpoint(block, *args, **self._options)
        return again

    def compile(self, blocks: Iterable[nn.Module]) -> None:
        """Compiles blocks. What they keep selectively is then for torch's compiler to choose, which sees inside them."""
        if self._selective:
            # What torch.compile's own setting means: https://pytorch.org/blog/activation-checkpointing-techniques/
            import torch._functorch.config as functorch

            functorch.activation_memory_budget = _BUDGET
            self._options = None
        for block in blocks:
            if self._options is None and not self._selective and type(block) is Block:
                # Each half by itself keeps the stream between them: as one, the compiler adds it up again in each of four kernels
                # and reads three tensors once more for the second norm's weight.
                block.attended = torch.compile(block.attended)  # type: ignore[method-assign]
                block.fed = torch.compile(block.fed)  # type: ignore[method-assign]
            else:
                block.compile()


def _keep_matrix_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _MATRIX_PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE
