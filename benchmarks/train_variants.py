"""Changes to our trainer that benchmarks/train.py tries one by one (`--parts variants`): what each is worth is measured there."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unbroken.train import model
from unbroken.train.parallel import trainer as plans


def use(name: str) -> None:
    """Makes trainers that are opened from now on have these changes, joined by +."""
    for part in name.split("+") if name else ():
        CHANGES[part]()


def tuned() -> None:
    """Inductor tries neighbours of each kernel's block sizes."""
    torch._inductor.config.coordinate_descent_tuning = True


def pointwise() -> None:
    """Inductor tries more configurations of pointwise kernels and reductions."""
    torch._inductor.config.max_autotune_pointwise = True


def split_tuned() -> None:
    """Inductor tries how many rows a program of a backward norm takes."""
    torch._inductor.config.triton.mix_order_reduction_autotune_split_size = True


def unmixed() -> None:
    """Inductor makes two kernels of a norm's backward pass."""
    torch._inductor.config.triton.mix_order_reduction = False


def multi_kernel() -> None:
    """Inductor chooses between persistent and looped reductions by a measurement."""
    os.environ["TORCHINDUCTOR_MULTI_KERNEL"] = "1"
    torch._inductor.config.triton.multi_kernel = 1


def lt() -> None:
    """cuBLASLt for all products."""
    torch.backends.cuda.preferred_blas_library("cublaslt")


def gemm() -> None:
    """Inductor tries Triton's products beside cuBLAS'."""
    torch._inductor.config.max_autotune_gemm = True


class Together(torch.autograd.Function):
    """x times several matrices that lie one behind the other in memory: one product forward, two backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: Tensor, *weights: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, whole)
        ctx.rows = [w.shape[0] for w in weights]
        return F.linear(x, whole)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x, whole = ctx.saved_tensors
        flat = dy.flatten(0, -2)
        dw = flat.t() @ x.flatten(0, -2)
        return dy @ whole, None, *dw.split(ctx.rows)


def behind(*linears: nn.Linear) -> Tensor:
    """Puts the weights of these layers into one tensor, of which they become views."""
    whole = torch.cat([m.weight.detach() for m in linears])
    at = 0
    for m in linears:
        m.weight.data = whole[at : at + m.out_features]
        at += m.out_features
    return whole


def join_attention() -> None:
    """Query, key and value as one product."""

    def forward(self: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        parts = (self.query, self.key, self.value)
        y = Together.apply(x, self.whole, *(m.weight for m in parts))
        q, k, v = y.split([m.out_features for m in parts], -1)
        q = model.rotate(q.unflatten(-1, (-1, self.width)), cos, sin).transpose(1, 2)
        k = model.rotate(k.unflatten(-1, (-1, self.width)), cos, sin).transpose(1, 2)
        v = v.unflatten(-1, (-1, self.width)).transpose(1, 2)
        y = self.attend(q, k, v, 0.0)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))

    model.Attention.forward = forward  # type: ignore[method-assign]
    after_allocation(lambda m: isinstance(m, model.Attention), lambda m: behind(m.query, m.key, m.value))


def join_gates() -> None:
    """Gate and up as one product."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = Together.apply(x, self.whole, self.gate.weight, self.up.weight)
        gate, up = y.chunk(2, -1)
        return self.down(F.silu(gate) * up)

    model.FeedForward.forward = forward  # type: ignore[method-assign]
    after_allocation(lambda m: isinstance(m, model.FeedForward), lambda m: behind(m.gate, m.up))


def after_allocation(fits: Any, make: Any) -> None:
    """Sets `whole` of modules once they have their memory."""
    before = plans.share_parameters

    def share(stage: Any, *args: Any, **kwargs: Any) -> None:
        before(stage, *args, **kwargs)
        stage.to_empty(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        stage.to_empty = lambda **_: stage
        for m in stage.modules():
            if fits(m):
                m.whole = make(m)

    plans.share_parameters = share


def graph() -> None:
    """Forward and backward pass as one CUDA graph, captured at the fourth step."""
    plain = plans.PlanTrainer._forward_and_backward

    def replayed(self: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        self.passes = getattr(self, "passes", 0) + 1
        if self.passes < 3:
            return plain(self, tokens, targets)
        if self.passes == 3:
            self.static = (tokens.clone(), targets.clone())
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            self.graph = torch.cuda.CUDAGraph()
            drop = type(self.zero.units[0]).drop_gradients
            type(self.zero.units[0]).drop_gradients = lambda _: (
                None
            )  # the graph writes to the same ones again
            del drop
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.total = plain(self, *self.static)
        for static, new in zip(self.static, (tokens, targets), strict=True):
            static.copy_(new)
        self.graph.replay()
        return self.total

    plans.PlanTrainer._forward_and_backward = replayed  # type: ignore[method-assign]


def norm() -> None:
    """Norms whose backward pass is one kernel of our own, which also adds the gradient of the stream beside it."""
    from norm_kernel import fork

    def forward(self: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x, y = fork(x, self.attention_norm.weight, self.attention_norm.eps)
        x = x + self.attention(y, cos, sin)
        x, y = fork(x, self.forward_norm.weight, self.forward_norm.eps)
        return x + self.feed_forward(y)

    model.Block.forward = forward  # type: ignore[method-assign]


CHANGES = {
    "tuned": tuned, "pointwise": pointwise, "split": split_tuned, "unmixed": unmixed, "multi": multi_kernel, "lt": lt, "gemm": gemm,
    "qkv": join_attention, "gates": join_gates, "graph": graph, "norm": norm,
}  # fmt: skip
