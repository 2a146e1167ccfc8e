"""A Llama-style decoder in plain PyTorch: RMSNorm, rotary positions, grouped causal attention, SwiGLU.

Weights are drawn from a generator of each parameter's own, seeded by (seed, index), so that every rank has the
same ones without a broadcast, on any device.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig
from .corpus.order import mix


class Attention(nn.Module):
    """Causal self-attention with rotary positions; keys and values are shared by groups of query heads."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = c.heads, c.kv_heads, c.dim // c.heads
        self.dropout = c.dropout
        self.query = nn.Linear(c.dim, c.heads * self.width, bias=False)
        self.key = nn.Linear(c.dim, c.kv_heads * self.width, bias=False)
        self.value = nn.Linear(c.dim, c.kv_heads * self.width, bias=False)
        self.out = nn.Linear(c.heads * self.width, c.dim, bias=False)
        self.attend = attend
        """A plan with context parallelism puts its own here."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (batch, time, dim) -> (batch, time, dim)."""
        b, t, _ = x.shape
        # Tensor parallelism leaves this rank some of the heads: they are counted here.
        q = rotate(self.query(x).view(b, t, -1, self.width), cos, sin).transpose(1, 2)
        k = rotate(self.key(x).view(b, t, -1, self.width), cos, sin).transpose(1, 2)
        v = self.value(x).view(b, t, -1, self.width).transpose(1, 2)
        y = self.attend(q, k, v, self.dropout if self.training else 0.0)
        out: Tensor = self.out(y.transpose(1, 2).reshape(b, t, -1))
        return out


def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Causal attention of q (batch, heads, time, width) to k and v, whose heads divide q's."""
    if k.shape[1] != q.shape[1]:
        k, v = (_repeat(z, q.shape[1] // k.shape[1]) for z in (k, v))
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(c.dim, c.hidden, bias=False)
        self.up = nn.Linear(c.dim, c.hidden, bias=False)
        self.down = nn.Linear(c.hidden, c.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., dim) -> (..., dim)."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (Zhang and Sennrich 2019), in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        """x (..., dim) -> (..., dim), in the type of x."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the stream."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(c.dim, c.norm_eps), Attention(c)
        self.forward_norm, self.feed_forward = RMSNorm(c.dim, c.norm_eps), FeedForward(c)
        self.dropout = c.dropout

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (batch, time, dim) -> (batch, time, dim)."""
        return self.fed(self.attended(x, cos, sin))

    def attended(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The first half: x and what attention adds to it."""
        return x + self._drop(self.attention(self.attention_norm(x), cos, sin))

    def fed(self, x: Tensor) -> Tensor:
        """The second half: x and what the feed-forward network adds to it."""
        return x + self._drop(self.feed_forward(self.forward_norm(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Decoder(nn.Module):
    """Tokens in, mean cross-entropy of the next token out."""

    cos: Tensor
    sin: Tensor

    def __init__(self, c: ModelConfig, seq: int, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(c.vocab, c.dim)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.dim, c.norm_eps)
        self.head = nn.Linear(c.dim, c.vocab, bias=False)
        self.vocab = c.vocab
        cos, sin = rotary(seq, c.dim // c.heads, c.rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._draw(c, seed)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens and targets (batch, time) of int64 -> scalar float32: the mean loss in nats."""
        x = self.embedding(tokens)
        t = tokens.shape[1]
        cos, sin = self.cos[:t], self.sin[:t]
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.view(-1, self.vocab), targets.reshape(-1))

    @torch.no_grad()
    def _draw(self, c: ModelConfig, seed: int) -> None:
        for i, (name, p) in enumerate(self.named_parameters()):
            if p.ndim == 1:
                p.fill_(1.0)
                continue
            draw(p, name, i, c.layers, seed)


def draw(weight: Tensor, name: str, index: int, layers: int, seed: int) -> None:
    """Fills a matrix with its first values: a pure function of (seed, index of the parameter in the model, device type)."""
    g = torch.Generator(weight.device).manual_seed(mix(mix(seed) ^ index) >> 1)
    last = name.endswith((".out.weight", ".down.weight"))
    weight.normal_(0.0, 0.02 / (math.sqrt(2 * layers) if last else 1.0), generator=g)


def rotary(seq: int, width: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines (seq, 1, width / 2) of the rotary positions (Su et al. 2021)."""
    frequency = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(seq, dtype=torch.float64)[:, None, None] * frequency
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (batch, time, heads, width) with each half-pair turned by its position's angle."""
    a, b = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def _repeat(x: Tensor, times: int) -> Tensor:
    b, h, t, w = x.shape
    return x[:, :, None].expand(b, h, times, t, w).reshape(b, h * times, t, w)
