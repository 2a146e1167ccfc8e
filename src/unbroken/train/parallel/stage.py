"""The layers that one pipeline stage holds, under the names that they have in the whole model, initialised on meta."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.format.sharding import describe
from ...errors import UsageError
from ..config import ModelConfig
from ..huggingface.names import description
from ..model import Block, RMSNorm, draw, rotary
from .experts import Experts
from .recompute import Recompute


class Stage(nn.Module):
    """Some layers of a decoder; the first stage has the embedding, the last one the norm and the head.

    Its parameters are named as in `Decoder`, so that any stage finds its own in any checkpoint.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, c: ModelConfig, layers: Iterable[int], *, recompute: str = "none") -> None:
        super().__init__()
        held = list(layers)
        self.first, self.last = 0 in held, c.layers - 1 in held
        self.embedding = nn.Embedding(c.vocab, c.dim) if self.first else None
        self.blocks = nn.ModuleDict({str(i): self.block(c) for i in held})
        self.norm = RMSNorm(c.dim, c.norm_eps) if self.last else None
        self.head = nn.Linear(c.dim, c.vocab, bias=False) if self.last else None
        self._recompute = Recompute(recompute)
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)

    def block(self, c: ModelConfig) -> nn.Module:
        """One layer, called with (stream (batch, time, dim), cosines, sines of the positions) and giving the stream.

        A model of your own is a subclass that gives blocks of its own here. It keeps its state in parameters, draws no random
        numbers, uses the same parameters on every rank in each step (gradients are shared in the order of their use), and fills
        buffers, which no checkpoint keeps, in a method `reset`.
        """
        block = Block(c)
        if c.experts:
            block.feed_forward = Experts(c)  # type: ignore[assignment]
        return block

    def huggingface(self, c: ModelConfig, seq: int) -> dict[str, Any] | None:
        """What Hugging Face calls this model (`huggingface/names.py`); a subclass with other parameters says its own, or None."""
        return description(c, seq) if type(self).block is Stage.block else None

    def forward(self, x: Tensor) -> Tensor:
        """tokens (batch, time) or the stream (batch, time, dim) -> the stream, or logits (batch, time, vocab) at the end."""
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = self._recompute(block, x, self.cos, self.sin)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x

    def compile_parts(self) -> None:
        """Each block and the last norm become code of torch's compiler at their first call: one compilation for all blocks."""
        self._recompute.compile(self.blocks.values())
        if self.norm is not None:
            self.norm.compile()

    def set_positions(self, c: ModelConfig, positions: Tensor, device: torch.device) -> None:
        """The places in the sequence of the tokens that this rank sees."""
        cos, sin = rotary(int(positions.max()) + 1, c.dim // c.heads, c.rope_base)
        self.cos, self.sin = cos[positions].to(device), sin[positions].to(device)


MakeStage = Callable[..., Stage]
"""(configuration, layers, recompute=...) -> the stage: `Stage`, or a class of your own."""


def parameter_shapes(make: MakeStage, c: ModelConfig, layers: Iterable[int]) -> dict[str, torch.Size]:
    """Shapes of the parameters of some layers, in the order of the model."""
    with torch.device("meta"):
        return {name: p.shape for name, p in make(c, layers).named_parameters()}


def fill_buffers(stage: Stage) -> None:
    """Gives what was made on meta its values. Raises UsageError for buffers that nothing fills, or that a checkpoint had to keep."""
    for name, m in stage.named_modules():
        own = dict(m.named_buffers(recurse=False)) if m is not stage else {}
        if own and not hasattr(m, "reset"):
            raise UsageError(
                f"the model has a buffer '{next(iter(own))}' in {name}, which nothing fills",
                hint="Fill it in a method `reset` of that module, which is called when its memory is there",
            )
        if own and not isinstance(m, Experts) and not own.keys() <= m._non_persistent_buffers_set:
            raise UsageError(
                f"the model has a buffer in {name} that is to be kept, and checkpoints of plans keep parameters alone",
                hint="Make it a parameter, or register it with persistent=False",
            )
        if own:
            m.reset()


@torch.no_grad()
def draw_weights(weights: Mapping[str, Tensor], names: Iterable[str], c: ModelConfig, seed: int) -> None:
    """Gives weights (what this rank holds of them, by name) their first values: the same ones on every layout. `names` are those
    of the whole model, in its order.

    One tensor at a time is whole. It is drawn where it lies: a GPU draws other values than a processor.
    """
    indices = {name: i for i, name in enumerate(names)}
    for name, weight in weights.items():
        sharding, pieces = describe(weight, key=name)
        device = pieces[0].device if pieces else torch.device("cpu")
        whole = torch.full(sharding.shape, 0.0 if name.endswith("bias") else 1.0, device=device)
        if whole.ndim > 1:
            draw(whole, name, indices[name], c.layers, seed)
        for (start, size), piece in zip(sharding.boxes, pieces, strict=True):
            piece.copy_(whole[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))])
