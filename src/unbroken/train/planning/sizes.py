"""What a model is made of: its parameters by name and shape, and the arithmetic of a token."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..config import ModelConfig

_CUT = {"query": 0, "key": 0, "value": 0, "out": 1, "gate": 0, "up": 0, "down": 1, "embedding": 0, "head": 0}
"""The dimension of a matrix that tensor parallelism cuts; what is not here is whole on each rank."""


def parameter_shapes(c: ModelConfig, layers: Iterable[int] | None = None) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of some layers, in the order of the model; the first and last layer bring the ends."""
    held = list(range(c.layers) if layers is None else layers)
    width = c.dim // c.heads
    shapes: dict[str, tuple[int, ...]] = {}
    if 0 in held:
        shapes["embedding.weight"] = (c.vocab, c.dim)
    for i in held:
        b = f"blocks.{i}."
        shapes[b + "attention_norm.weight"] = (c.dim,)
        shapes[b + "attention.query.weight"] = (c.heads * width, c.dim)
        shapes[b + "attention.key.weight"] = (c.kv_heads * width, c.dim)
        shapes[b + "attention.value.weight"] = (c.kv_heads * width, c.dim)
        shapes[b + "attention.out.weight"] = (c.dim, c.heads * width)
        shapes[b + "forward_norm.weight"] = (c.dim,)
        if c.experts:
            shapes[b + "feed_forward.gate"] = (c.experts, c.hidden, c.dim)
            shapes[b + "feed_forward.up"] = (c.experts, c.hidden, c.dim)
            shapes[b + "feed_forward.down"] = (c.experts, c.dim, c.hidden)
            shapes[b + "feed_forward.router.weight"] = (c.experts, c.dim)
        else:
            shapes[b + "feed_forward.gate.weight"] = (c.hidden, c.dim)
            shapes[b + "feed_forward.up.weight"] = (c.hidden, c.dim)
            shapes[b + "feed_forward.down.weight"] = (c.dim, c.hidden)
    if c.layers - 1 in held:
        shapes["norm.weight"] = (c.dim,)
        shapes["head.weight"] = (c.vocab, c.dim)
    return shapes


def cut(name: str, shape: tuple[int, ...], tensor: int) -> tuple[int, ...]:
    """The shape of a rank's part of a parameter under tensor parallelism."""
    dim = cut_dimension(name, shape)
    return tuple(n // tensor if d == dim else n for d, n in enumerate(shape))


def cut_dimension(name: str, shape: tuple[int, ...]) -> int | None:
    """Which dimension of a parameter tensor parallelism cuts; None for one that is whole on each rank."""
    dim = _CUT.get(name.removesuffix(".weight").split(".")[-1])
    return None if dim is None else dim + len(shape) - 2  # experts lie one behind the other


def parameter_count(c: ModelConfig) -> int:
    """All parameters."""
    return sum(map(math.prod, parameter_shapes(c).values()))


def active_count(c: ModelConfig) -> int:
    """Parameters that are multiplied for each token: without the embedding, and of the experts those that are chosen."""
    n = parameter_count(c) - c.vocab * c.dim
    idle = max(0, c.experts - c.active_experts) if c.experts else 0
    return n - idle * 3 * c.layers * c.hidden * c.dim


def flops_per_token(c: ModelConfig, seq: int) -> float:
    """Floating-point operations of one token, forward and backward: 6 N + 12 L d T, causal attention counted whole.

    The formula of Narayanan et al. 2021 as the field writes it for MFU; N without the embedding.
    """
    return 6 * active_count(c) + 12 * c.layers * c.dim * seq


def layer_flops_per_token(c: ModelConfig, seq: int) -> float:
    """Of `flops_per_token` those of the blocks alone, without the head."""
    return flops_per_token(c, seq) - 6 * c.vocab * c.dim
