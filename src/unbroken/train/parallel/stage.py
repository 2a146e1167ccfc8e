"""The layers that one pipeline stage holds, under the names that they have in the whole model, initialised on meta."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ...checkpoint.format.sharding import describe
from ..config import ModelConfig
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
        self.blocks = nn.ModuleDict({str(i): _block(c) for i in held})
        self.norm = RMSNorm(c.dim, c.norm_eps) if self.last else None
        self.head = nn.Linear(c.dim, c.vocab, bias=False) if self.last else None
        self._recompute = Recompute(recompute)
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)

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


def _block(c: ModelConfig) -> Block:
    block = Block(c)
    if c.experts:
        block.feed_forward = Experts(c)  # type: ignore[assignment]
    return block


def parameter_indices(c: ModelConfig) -> Mapping[str, int]:
    """The place of each parameter in the whole model: what its first values are drawn from."""
    with torch.device("meta"):
        whole = Stage(c, range(c.layers))
    return {name: i for i, (name, _) in enumerate(whole.named_parameters())}


@torch.no_grad()
def draw_weights(weights: Mapping[str, Tensor], c: ModelConfig, seed: int) -> None:
    """Gives weights (what this rank holds of them, by name) their first values: the same ones on every layout.

    One tensor at a time is whole.
    """
    indices = parameter_indices(c)
    for name, weight in weights.items():
        sharding, pieces = describe(weight, key=name)
        device = pieces[0].device if pieces else torch.device("cpu")
        whole = torch.ones(sharding.shape, device=device)
        if whole.ndim > 1:
            draw(whole, name, indices[name], c.layers, seed)
        for (start, size), piece in zip(sharding.boxes, pieces, strict=True):
            piece.copy_(whole[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))])
