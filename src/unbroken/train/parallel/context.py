"""Context parallelism: each rank has some of every sequence, and sees the keys and values of what came before it.

A sequence is cut in 2 n chunks; rank i of n has chunks i and 2n-1-i, so that all have the same work under a causal
mask. Keys and values are gathered, as for Llama 3 (arXiv 2407.21783, section 3.3.2): they are small under grouped
queries, and the attention over them is torch's own, with its deterministic backward pass. (torch's ring attention has no
kernels for the processor, so its equality could not be tested there.)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.nn.attention.bias import causal_lower_right

from ...errors import UsageError
from ..model import Attention, attend
from .stage import Stage

# torch 2.13 gave it another name; the old one warns.
_all_gather = (
    getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
)


def positions(seq: int, index: int, size: int) -> Tensor:
    """The places in a sequence that rank `index` of `size` has, in its order."""
    if size == 1:
        return torch.arange(seq)
    chunks = torch.arange(seq).chunk(2 * size)
    return torch.cat((chunks[index], chunks[2 * size - 1 - index]))


def split_sequence(stage: Stage, group: dist.ProcessGroup) -> None:
    """Makes every attention of a stage see the whole sequence, of which this rank has its chunks."""
    if group.size() == 1:
        return
    over = _GatheredAttention(group)
    for block in stage.blocks.values():
        found = [m for m in block.modules() if isinstance(m, Attention)]
        if not found:
            raise UsageError(
                f"--context {group.size()} needs `Attention` of unbroken.train.model in each block, and this model has none",
                hint="Let your attention be a subclass that calls self.attend(q, k, v, 0.0)",
            )
        for m in found:
            m.attend = over


class _GatheredAttention:
    """Causal attention of this rank's queries to the keys and values of all ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._size, self._index = group, group.size(), group.rank()
        places = torch.cat([positions(2 * self._size, i, self._size) for i in range(self._size)])
        self._natural = places.argsort().tolist()
        """Where chunk 0, 1, ... lies in what was gathered."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        k, v = (self._whole(z) for z in (k, v))
        chunk = q.shape[2] // 2
        outs = []
        for part, place in zip(
            q.split(chunk, 2), (self._index, 2 * self._size - 1 - self._index), strict=True
        ):
            seen = (place + 1) * chunk
            outs.append(_attend_to_end(part, k[:, :, :seen], v[:, :, :seen], dropout))
        return torch.cat(outs, 2)

    def _whole(self, z: Tensor) -> Tensor:
        gathered = _all_gather(z.contiguous(), 2, self._group)
        chunks = gathered.chunk(2 * self._size, 2)
        return torch.cat([chunks[i] for i in self._natural], 2)


def _attend_to_end(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Attention of the last queries of a sequence to all of it."""
    if q.shape[2] == k.shape[2]:
        return attend(q, k, v, dropout)
    groups = q.shape[1] // k.shape[1]
    k, v = (z.repeat_interleave(groups, 1) for z in (k, v))
    mask = causal_lower_right(q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
