"""Which of torch's attention kernels runs: those that the device has are tried once, the fastest is taken.

On one H200 cuDNN's was 11 % of a whole step faster than flash attention; which one wins depends on card, shape and versions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...errors import UsageError
from ..config import TrainConfig
from ..model import Attention
from ..model import attend as any_kernel
from .stage import Stage

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_TIMED = 5


def choose_attention(config: TrainConfig, device: torch.device, rank: int) -> str | None:
    """The kernel that all ranks use; None leaves it to torch, as `auto` does in deterministic mode and without a GPU.

    Raises UsageError, naming those that work here, for one that the device lacks.
    """
    asked = config.plan.attention
    if asked == "auto" and (device.type != "cuda" or config.run.mode == "deterministic"):
        return None
    c = config.model
    dtype = torch.bfloat16 if config.run.dtype == "bfloat16" else torch.float32
    heads = max(1, c.heads // config.plan.tensor)
    shape = (config.data.micro_batch or 1, heads, config.data.seq, c.dim // c.heads)
    if asked != "auto":
        one = (1, *shape[1:])
        if _seconds(asked, one, dtype, device, 1) is None:
            works = [n for n in BACKENDS if _seconds(n, one, dtype, device, 1) is not None]
            raise UsageError(
                f"--attention {asked} does not run on {device.type} with heads of {shape[-1]} in {config.run.dtype}",
                hint=f"Legal here: auto, {', '.join(works)}",
            )
        return asked
    found: list[str | None] = [None]
    if rank == 0:
        timed = {n: s for n in BACKENDS if (s := _seconds(n, shape, dtype, device, _TIMED)) is not None}
        found = [min(timed, key=lambda n: timed[n]) if timed else None]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(found, src=0, device=device)
    return found[0]


def use_attention(stage: Stage, name: str | None) -> None:
    """Makes every attention of a stage run this kernel; one that sees gathered keys stays with what fits its mask."""
    if name is None:
        return
    backend = BACKENDS[name]

    def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=k.shape[1] != q.shape[1]
            )

    for m in stage.modules():
        if isinstance(m, Attention) and m.attend is any_kernel:
            m.attend = attend


def _seconds(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, times: int
) -> float | None:
    """The median of a forward and backward pass; None where this kernel does not run here."""
    q, k, v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    taken = []
    try:
        with sdpa_kernel(BACKENDS[name]):
            for _ in range(times + 1):
                wait()
                began = time.perf_counter()
                F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
                wait()
                taken.append(time.perf_counter() - began)
    except RuntimeError:  # "No available kernel"
        return None
    return statistics.median(taken[1:])
