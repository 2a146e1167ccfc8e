"""Mixture of experts: each token goes to some of a block's feed-forwards, kept in balance without a loss of its own."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from ..config import ModelConfig

BALANCE = 1e-3
"""How far an expert's bias moves in a step (DeepSeek-V3, section 2.1.2)."""


class Experts(nn.Module):
    """SwiGLU experts behind a sigmoid router (DeepSeek-V3): a bias of each expert, not trained, evens out their load.

    The choice of a token depends on that token and the bias alone, so it is the same on every plan.
    """

    bias: Tensor
    load: Tensor
    grouped = True
    """Whether all experts are one product where torch has it: 16 bits on a GPU."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.active = c.active_experts
        self.router = nn.Linear(c.dim, c.experts, bias=False)
        self.gate = nn.Parameter(torch.empty(c.experts, c.hidden, c.dim))
        self.up = nn.Parameter(torch.empty(c.experts, c.hidden, c.dim))
        self.down = nn.Parameter(torch.empty(c.experts, c.dim, c.hidden))
        self.register_buffer("bias", torch.zeros(c.experts))
        self.register_buffer("load", torch.zeros(c.experts), persistent=False)

    def reset(self) -> None:
        """Every expert is chosen by its score alone again."""
        self.bias.zero_()
        self.load.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, time, dim) -> (batch, time, dim): under tensor parallelism this rank's share of the sum."""
        tokens = x.reshape(-1, x.shape[-1])
        scores = F.linear(tokens, _local(self.router.weight)).float().sigmoid()
        chosen = (scores.detach() + self.bias).topk(self.active, dim=-1).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = F.one_hot(flat, self.bias.numel()).sum(0)
        if (
            torch.is_grad_enabled()
        ):  # neither held-out samples nor a pipeline that learns its shapes steer the balance
            self.load += counts
        outs = self._each(tokens[order // self.active], counts)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        # Sorted back and summed in a fixed order: no two threads add to one place.
        y = outs[back].view(-1, self.active, x.shape[-1]) * weights.unsqueeze(-1).to(outs.dtype)
        return y.sum(1).view(x.shape)

    def _each(self, tokens: Tensor, counts: Tensor) -> Tensor:
        gate, up, down = (_local(w) for w in (self.gate, self.up, self.down))
        if self.grouped and tokens.is_cuda and tokens.dtype == torch.bfloat16:
            ends = counts.cumsum(0).to(torch.int32)
            hidden = F.silu(F.grouped_mm(tokens, gate.transpose(1, 2), offs=ends))
            hidden = hidden * F.grouped_mm(tokens, up.transpose(1, 2), offs=ends)
            return F.grouped_mm(hidden, down.transpose(1, 2), offs=ends)
        parts = tokens.split(counts.tolist())
        return torch.cat(
            [
                F.linear(F.silu(F.linear(p, gate[i])) * F.linear(p, up[i]), down[i])
                for i, p in enumerate(parts)
            ]
        )


def balance(stage: nn.Module, mesh: DeviceMesh) -> None:
    """After a step: moves each expert's bias against its load, counted over all tokens of the global batch."""
    for m in stage.modules():
        if isinstance(m, Experts):
            for axis in ("data", "context"):
                dist.all_reduce(m.load, group=mesh.get_group(axis))
            m.bias += BALANCE * (m.load.mean() - m.load).sign()
            m.load.zero_()


def _local(w: Tensor) -> Tensor:
    """This rank's part of a weight. Each rank computes a share of the sum, so gradients of what is replicated are too."""
    if not isinstance(w, DTensor):
        return w
    return w.to_local(grad_placements=[Partial() if p.is_replicate() else p for p in w.placements])
