"""RMSNorm beside a residual stream, with a backward pass of one kernel."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _backward(
    dy, x, weight, dpass, dx, partial, rows, eps, EACH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    first = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(EACH):
        row = first + i * tl.num_programs(0)
        at = row.to(tl.int64) * WIDTH + columns
        here = inside & (row < rows)
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        grad = tl.load(dy + at, mask=here, other=0.0).to(tl.float32)
        beside = tl.load(dpass + at, mask=here, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
        unit = value * scale
        total += grad * unit
        grad = grad * w
        inner = tl.sum(grad * unit, 0) / WIDTH
        tl.store(dx + at, ((grad - unit * inner) * scale + beside).to(dx.dtype.element_ty), mask=here)
    tl.store(partial + first * WIDTH + columns, total, mask=inside)


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Any:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return x.view_as(x), F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dpass: Tensor, dy: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        width = x.shape[-1]
        rows = x.numel() // width
        programs = min(rows, 528)
        dx = torch.empty_like(x)
        partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
        _backward[(programs,)](
            dy.contiguous(), x, weight, dpass.contiguous(), dx, partial, rows, ctx.eps, -(-rows // programs), width, triton.next_power_of_2(width),
            num_warps=4 if width <= 2048 else 8,
        )  # fmt: skip
        return dx, partial.sum(0).to(weight.dtype), None


def fork(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x (..., dim) as it is, and normalised."""
    return _Fork.apply(x, weight, eps)
