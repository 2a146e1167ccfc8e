"""What a step costs under a plan: communication by kind and link, and the time that is not hidden behind arithmetic.

Rings: a collective of n ranks on V bytes takes V (n-1)/n / bandwidth + (n-1) latency for each of its messages (a block of
the model each); all-reduce twice that. A ring that leaves the node has the node's link, shared with the rings of the
other GPUs there (Thakur et al. 2005; AMSP, arXiv 2311.00257, reckons so too).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ..config import ModelConfig, PlanConfig
from .hardware import Hardware
from .layout import ParallelLayout
from .sizes import cut, flops_per_token, parameter_shapes

BACKWARD = 2 / 3
"""Share of the arithmetic without recomputation that is the backward pass."""


@dataclass(frozen=True)
class Traffic:
    """One kind of communication of a step, as one GPU sees it."""

    what: str
    ranks: int
    between_nodes: bool
    bytes: float
    """Sent by a GPU in a step."""
    seconds: float
    hidden: float
    """Of those, the seconds that a computation beside it covers."""


@dataclass(frozen=True)
class StepCost:
    """One step under a plan, in seconds of the GPU that everybody waits for."""

    compute: float
    bubble: float
    update: float
    traffic: tuple[Traffic, ...]
    taken: float
    """Slowdown of the computation by collectives beside it."""

    @property
    def exposed(self) -> float:
        """Communication that nothing covers."""
        return sum(t.seconds - t.hidden for t in self.traffic)

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute + self.bubble + self.update + self.exposed + self.taken


@dataclass(frozen=True)
class TrainingWorkload:
    """What is trained in a step."""

    model: ModelConfig
    seq: int
    global_batch: int
    """Samples of a step."""
    micro_batch: int
    bytes_of_element: int = 2
    publish_beside_forward: bool = True
    """Whether new values travel beside the next forward pass, as they do here, or before it."""


def cost(layout: ParallelLayout, plan: PlanConfig, work: TrainingWorkload, hw: Hardware) -> StepCost:
    """The cost of a step. Raises nothing: whether the plan is legal and fits is for `search` to say."""
    m, t = work.model, layout.tensor
    micro = max(1, work.global_batch // (layout.data * work.micro_batch))
    tokens = work.global_batch * work.seq
    plain = tokens * flops_per_token(m, work.seq) / layout.world / hw.flops
    again = {"none": 0.0, "selective": 0.02, "full": 1 / 3}[plan.recompute]
    compute = plain * (1 + again)
    # Zero-bubble schedules fill two thirds of the gaps with gradients of weights (Qi et al. 2023).
    gaps = (layout.pipeline - 1) / (micro * layout.stages) / (3 if plan.schedule == "zero-bubble" else 1)
    rings = _Rings(layout, hw)
    elements = _largest(m, layout.pipeline, layout.stages, t)
    weights, units = elements * work.bytes_of_element, m.layers / layout.pipeline + 2
    gradients = elements * (2 if plan.gradient_dtype == "bfloat16" else 4)
    p, g, o = (layout.parameters, layout.gradients // layout.parameters, layout.optimizer // layout.gradients)
    replicas = layout.copies // layout.optimizer
    found: list[Traffic] = []

    def add(what: str, axis: str, n: int, size: float, messages: float, window: float, *, twice: bool = False) -> None:  # fmt: skip
        if n > 1:
            found.append(rings.traffic(what, axis, n, size, messages, window, twice=twice))

    forward, backward = plain * (1 - BACKWARD), plain * BACKWARD + plain * again
    gathers = 2 if plan.reshard or micro > 1 else 1
    add("parameters gathered", "shard", p, weights * gathers * micro, units * gathers * micro, compute)
    every = backward / micro * (micro if g * p > 1 else 1)
    add("gradients to their copy", "shard", p, gradients * micro, units * micro, every)
    add("gradients to their group", "gradients", g, gradients / p * micro, units * micro, every)
    last = backward / micro
    share = gradients / (p * g)
    add("gradients to the optimizer's group", "optimizer", o, share, units, last)
    rest = max(0.0, last - sum(x.seconds for x in found if x.what.endswith("optimizer's group")))
    add("gradients over replicas", "replicate", replicas, share / o, units, rest, twice=True)
    beside = forward / micro if work.publish_beside_forward and p == 1 else 0.0
    add("new values in the optimizer's group", "optimizer", o, weights / (p * g), units, beside)
    beside = max(
        0.0, beside - sum(x.seconds for x in found if x.what.startswith("new values")) if beside else 0.0
    )
    add("new values in the gradients' group", "gradients", g, weights / p, units, beside)
    stream = work.micro_batch * work.seq / layout.context * m.dim * work.bytes_of_element
    layers = m.layers / layout.pipeline
    passes = 8 * (1.5 if plan.recompute == "full" else 1)
    add("stream between matrices", "tensor", t, stream * passes * layers * micro, passes * layers * micro, 0)
    heads = 2 * m.kv_heads / m.heads / t
    add("keys and values", "context", layout.context, stream * layout.context * heads * 2 * layers * micro, 4 * layers * micro, 0)  # fmt: skip
    if layout.pipeline > 1:
        hops = 2 * micro * layout.stages
        found.append(rings.hop("stream between stages", stream / t * hops, hops, compute))
    update = elements / layout.optimizer * 28 / hw.memory_bandwidth
    hidden = sum(x.hidden for x in found)
    return StepCost(compute, compute * gaps, update, tuple(found), hw.taken * hidden)


@functools.lru_cache(4096)
def _largest(m: ModelConfig, pipeline: int, stages: int, tensor: int) -> int:
    """Parameters of the pipeline rank that holds most, as tensor parallelism cuts them."""
    cuts = ParallelLayout(pipeline, pipeline, 1, 1, 1, 1, 1, stages).layers(m.layers)
    return max(
        sum(
            math.prod(cut(n, s, tensor)) for r in cuts[i::pipeline] for n, s in parameter_shapes(m, r).items()
        )
        for i in range(pipeline)
    )


class _Rings:
    """Times of collectives along the axes of a layout."""

    def __init__(self, layout: ParallelLayout, hw: Hardware) -> None:
        self._layout, self._hw = layout, hw

    def _stride(self, axis: str) -> int:
        t, c = self._layout.tensor, self._layout
        return {
            "tensor": 1,
            "context": t,
            "shard": t,
            "gradients": t * c.parameters,
            "optimizer": t * c.gradients,
            "replicate": t * c.optimizer,
        }[axis]

    def traffic(
        self, what: str, axis: str, n: int, size: float, messages: float, window: float, *, twice: bool
    ) -> Traffic:
        """n ranks along an axis share `size` bytes in `messages` collectives; `window` seconds of arithmetic can cover them."""
        near = min(n, max(1, self._hw.gpus_per_node // self._stride(axis)))
        far = n > near
        bandwidth = self._hw.between.bandwidth * near / self._hw.gpus_per_node if far else self._hw.inside.bandwidth  # fmt: skip
        latency = (self._hw.between if far else self._hw.inside).latency
        rounds = 2 if twice else 1
        moved = rounds * size * (n - 1) / n
        seconds = moved / bandwidth + rounds * messages * (n - 1) * latency
        return Traffic(what, n, far, moved, seconds, min(seconds, window))

    def hop(self, what: str, size: float, messages: float, window: float) -> Traffic:
        """Messages to the next stage."""
        far = self._layout.world // self._layout.pipeline >= self._hw.gpus_per_node
        link = self._hw.between if far else self._hw.inside
        bandwidth = link.bandwidth / self._hw.gpus_per_node if far else link.bandwidth
        seconds = size / bandwidth + messages * link.latency
        return Traffic(what, 2, far, size, seconds, min(seconds, window))
