"""Pipeline parallelism: stages on different ranks, micro-batches through them in one of torch's schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from .mesh import Mesh

_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}


@dataclass(frozen=True)
class Shapes:
    """What travels between stages for one micro-batch, on this rank."""

    batch: int
    time: int
    """Tokens of a sequence that this rank sees."""
    piece: int
    """Of those, the part of the stream that it has between blocks."""
    dim: int
    vocab: int
    dtype: torch.dtype

    def tokens(self) -> Tensor:
        """What the first stage takes."""
        return torch.empty(self.batch, self.time, dtype=torch.int64, device="meta")

    def stream(self) -> Tensor:
        """What one stage gives the next."""
        return torch.empty(
            self.batch, self.piece, self.dim, dtype=self.dtype, device="meta", requires_grad=True
        )

    def logits(self) -> Tensor:
        """What the last stage gives."""
        return torch.empty(
            self.batch, self.time, self.vocab, dtype=self.dtype, device="meta", requires_grad=True
        )


class Pipeline:
    """This rank's stages and the schedule that runs them."""

    def __init__(
        self, stages: Sequence[nn.Module], mesh: Mesh, schedule: str, micro_batches: int,
        loss: Callable[[Tensor, Tensor], Tensor], shapes: Shapes,
    ) -> None:  # fmt: skip
        n, mine, group = mesh.layout.pipeline, mesh.here.pipeline, mesh.group("pipeline")
        parts = []
        for i, s in enumerate(stages):
            at, count = mine + i * n, n * len(stages)
            takes = shapes.tokens() if at == 0 else shapes.stream()
            gives = shapes.logits() if at == count - 1 else shapes.stream()
            # Told the shapes, torch need not run each stage once to learn them.
            parts.append(
                PipelineStage(s, at, count, mesh.device, input_args=takes, output_args=gives, group=group)
            )
        self._first, self._last = mine == 0, mine == n - 1
        several = schedule in ("interleaved", "zero-bubble")
        self._schedule = _SCHEDULES[schedule](
            parts if several else parts[0], micro_batches, loss_fn=loss, scale_grads=False
        )

    def train(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """All micro-batches forward and backward; gradients stay in `.grad`. Returns this rank's sum of losses."""
        return self._run(self._schedule.step, tokens, targets)

    def evaluate(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """All micro-batches forward. Returns this rank's sum of losses."""
        return self._run(self._schedule.eval, tokens, targets)

    def _run(self, step: Callable[..., Any], tokens: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        step(
            *([tokens] if self._first else []),
            **({"target": targets, "losses": losses} if self._last else {}),
        )
        return torch.stack([x.detach() for x in losses]).sum() if losses else tokens.new_zeros((), dtype=torch.float32)  # fmt: skip
