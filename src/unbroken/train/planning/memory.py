"""Bytes that a rank holds under a plan, by category. State is exact, padding and all; activations are an estimate."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ..config import ModelConfig, PlanConfig
from .layout import Coordinate, ParallelLayout
from .sizes import cut, parameter_shapes

KEPT_OF_BLOCK = {"none": 34.0, "selective": 18.0, "full": 2.0}
"""Bytes kept of a block for each token and unit of width in 16 bits (Korthikanti et al. 2022, table 2, for a GELU block;
flash attention keeps no scores). A SwiGLU block of the same parameters keeps about as much."""


@dataclass(frozen=True)
class Held:
    """Bytes of one rank."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int = 0
    gathered: int = 0
    """Parameters of the blocks that are whole for the moment."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.gathered


def state_bytes(
    layout: ParallelLayout, here: Coordinate, model: ModelConfig, *, parameter: int, gradient: int
) -> Held:
    """What a rank keeps between steps; `parameter` and `gradient` are bytes of an element.

    A tensor is cut along its first dimension by torch's chunk rule, over the ranks of the parameters, then of the
    gradients, then of the optimizer. Parameters and gradients are padded to equal parts; moments are not. Adam keeps two
    moments in float32, and the weights themselves where the parameters are of 16 bits.
    """
    _, _, o, g, s, t = layout.storage
    cuts = layout.layers(model.layers)
    p_bytes = g_bytes = o_bytes = 0
    for stage in cuts[here.pipeline :: layout.pipeline]:
        for shape in _cut_shapes(model, stage, t):
            columns = math.prod(shape[1:])
            p_bytes += parameter * columns * -(-shape[0] // s)
            rows = _chunk(shape[0], s, here.shard)
            g_bytes += gradient * columns * -(-rows // g)
            rows = _chunk(_chunk(rows, g, here.gradients), o, here.optimizer)
            o_bytes += (8 if parameter == 4 else 12) * columns * rows
    return Held(p_bytes, g_bytes, o_bytes)


def step_bytes(
    layout: ParallelLayout, here: Coordinate, model: ModelConfig, plan: PlanConfig, *, seq: int, micro_batch: int,
    micro_batches: int, low: bool = True,
) -> Held:  # fmt: skip
    """What a rank needs at the peak of a step: its state, activations of the micro-batches in flight, whole blocks."""
    gradient = 2 if plan.gradient_dtype == "bfloat16" else 4
    state = state_bytes(layout, here, model, parameter=2 if low else 4, gradient=gradient)
    cuts = layout.layers(model.layers)[here.pipeline :: layout.pipeline]
    tokens = micro_batch * seq / layout.context
    in_flight = min(micro_batches, _in_flight(layout, here)) if plan.schedule != "gpipe" else micro_batches
    layers = sum(map(len, cuts)) / layout.stages
    scale = (1 if low else 2) * tokens * model.dim / layout.tensor
    kept = KEPT_OF_BLOCK[plan.recompute] * scale * layers * in_flight
    if plan.recompute == "full":
        kept += KEPT_OF_BLOCK["none"] * scale  # the block that is being computed again
    if any(model.layers - 1 in c for c in cuts):
        kept += 10 * tokens * model.vocab / layout.tensor  # logits in 16 bits, their float32 and its gradient
    block = _block_elements(model, layout.tensor)
    whole = 0.0
    if layout.parameters > 1:
        # Two blocks at a time: one computes, the next one arrives. Their gradients are whole too, until they leave.
        count = 2 if plan.reshard else sum(map(len, cuts))
        whole = block * (count * (2 if low else 4) + 2 * gradient)
    return Held(state.parameters, state.gradients, state.optimizer, int(kept), int(whole))


@functools.lru_cache(4096)
def _cut_shapes(model: ModelConfig, layers: range, tensor: int) -> tuple[tuple[int, ...], ...]:
    return tuple(cut(n, s, tensor) for n, s in parameter_shapes(model, layers).items())


def _in_flight(layout: ParallelLayout, here: Coordinate) -> int:
    """Micro-batches that a rank has begun and not ended under 1F1B; with several stages a rank each counts in part."""
    if layout.pipeline == 1:
        return 1
    first = layout.pipeline - here.pipeline
    return first if layout.stages == 1 else first + (layout.stages - 1) * layout.pipeline


@functools.lru_cache(256)
def _block_elements(model: ModelConfig, tensor: int) -> int:
    shapes = parameter_shapes(model, [1] if model.layers > 2 else [0])
    return sum(math.prod(cut(n, s, tensor)) for n, s in shapes.items() if n.startswith("blocks."))


def _chunk(rows: int, parts: int, index: int) -> int:
    """Rows of part `index` by torch's chunk rule."""
    each = -(-rows // parts)
    return max(0, min(each, rows - index * each))
