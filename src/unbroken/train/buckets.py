"""Parameters, gradients and moments in fixed flat buckets, and the reduction of the gradients in a fixed order.

Torch's DistributedDataParallel rebuilds its buckets after the first backward pass, so a run that resumes at step N
adds its gradients in another grouping than the run that came to N undisturbed: with three ranks and more the sums
differ in their last bits. Here the buckets follow from the model alone and are reduced in their order, whether
after the backward pass or during it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ALIGN = 16
"""Elements: each tensor starts on a 64-byte line, so that kernels take the same path in every process."""
SCALARS = 2
"""Values that ride along with the last bucket: the loss and the request to stop."""


@dataclass
class Bucket:
    """Flat float32 buffers of equal layout; the model's parameters and gradients are views of them."""

    weights: Tensor
    gradients: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    decayed: bool
    missing: int = 0
    """Parameters whose gradient of this backward pass is not there yet."""
    members: int = 0


class Buckets:
    """The model's parameters moved into fixed buckets, last layer first, matrices and vectors apart."""

    def __init__(self, model: nn.Module, bucket_bytes: float, device: torch.device) -> None:
        named = list(model.named_parameters())
        self.model = model
        self.buckets: list[Bucket] = []
        self.exp_avg: dict[str, Tensor] = {}
        self.exp_avg_sq: dict[str, Tensor] = {}
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        plan = self._plan(named, bucket_bytes)
        for last, (decayed, members) in ((i == len(plan) - 1, p) for i, p in enumerate(plan)):
            self._fill(members, decayed, device, SCALARS if last else 0)
        self.scalars = self.buckets[-1].gradients[-SCALARS:]
        self._next = 0
        self._pending: list[Any] = []
        self.before_reduce: Callable[[int, Tensor], None] = _nothing
        """Called with each bucket's number and gradients before they are reduced, also where there is one rank."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @staticmethod
    def _plan(
        named: list[tuple[str, nn.Parameter]], bucket_bytes: float
    ) -> list[tuple[bool, list[tuple[str, nn.Parameter]]]]:
        plan: list[tuple[bool, list[tuple[str, nn.Parameter]]]] = []
        for decayed in (True, False):
            size = float("inf")
            for name, p in reversed(named):
                if (p.ndim >= 2) is not decayed:
                    continue
                if size + 4 * p.numel() > bucket_bytes:
                    plan.append((decayed, []))
                    size = 0
                plan[-1][1].append((name, p))
                size += 4 * p.numel()
        return plan

    def _fill(
        self, members: list[tuple[str, nn.Parameter]], decayed: bool, device: torch.device, extra: int
    ) -> None:
        size = sum(_aligned(p.numel()) for _, p in members)
        flat = [torch.zeros(size + n, device=device) for n in (0, extra, 0, 0)]
        bucket = Bucket(flat[0], flat[1], flat[2], flat[3], decayed=decayed, members=len(members))
        at = 0
        for name, p in members:
            w, g, m, v = (x[at : at + p.numel()].view(p.shape) for x in flat)
            w.copy_(p.detach())
            p.data, p.grad = w, g
            self.exp_avg[name], self.exp_avg_sq[name] = m, v
            self._bucket_of[p] = bucket
            at += _aligned(p.numel())
        self.buckets.append(bucket)

    def zero(self) -> None:
        """Sets every gradient to zero."""
        for b in self.buckets:
            b.gradients.zero_()

    def hook(self) -> None:
        """From now on `expect` makes each bucket's reduction start during the backward pass."""
        for p in self._bucket_of:
            p.register_post_accumulate_grad_hook(self._ready)

    def expect(self) -> None:
        """Says that the next backward pass is the step's last: its gradients are final."""
        for b in self.buckets:
            b.missing = b.members
        self._next, self._pending = 0, []

    def _ready(self, p: Tensor) -> None:
        bucket = self._bucket_of[p]  # type: ignore[index]
        if not bucket.missing:
            return
        bucket.missing -= 1
        # A bucket starts only after all before it: the order on the wire is the same on every rank and in every run.
        while self._next < len(self.buckets) - 1 and not self.buckets[self._next].missing:
            self._launch()

    def reduce(self, world_size: int) -> None:
        """Replaces every gradient, and the scalars, by its mean over the ranks; the same bits on every rank."""
        if world_size == 1:
            for i, b in enumerate(self.buckets):
                self.before_reduce(i, b.gradients)
            return
        while self._next < len(self.buckets):
            self._launch()
        for work in self._pending:
            work.wait()
        self._next, self._pending = 0, []
        for b in self.buckets:
            b.gradients.div_(world_size)

    def _launch(self) -> None:
        import torch.distributed as dist

        gradients = self.buckets[self._next].gradients
        with self._beside():
            self.before_reduce(self._next, gradients)
            self._pending.append(dist.all_reduce(gradients, async_op=True))
        self._next += 1

    def _beside(self) -> AbstractContextManager[object]:
        """What is launched in it begins once the device has come so far as now, beside the backward pass that goes on: reading a
        bucket takes a hundredth of a step's time. Whoever waits for the reduction has waited for it too."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)

    def norm(self) -> Tensor:
        """The norm of all gradients, where they lie."""
        parts = [torch.linalg.vector_norm(self._only_gradients(b)) for b in self.buckets]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(parts))
        return norm

    def clip(self, norm: Tensor, limit: float) -> None:
        """Scales the gradients, which have this norm, to one of at most `limit` (0: no limit)."""
        if limit:
            scale = (limit / (norm + 1e-6)).clamp(max=1.0)
            for b in self.buckets:
                self._only_gradients(b).mul_(scale)

    @staticmethod
    def _only_gradients(b: Bucket) -> Tensor:
        return b.gradients[: b.weights.numel()]

    @torch.no_grad()
    def adamw(
        self, step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        """One AdamW update (Loshchilov and Hutter 2019) in place; `step` counts from 1."""
        b1, b2 = betas
        root = (1 - b2**step) ** 0.5
        for b in self.buckets:
            g = self._only_gradients(b)
            if b.decayed:
                b.weights.mul_(1 - lr * weight_decay)
            b.exp_avg.lerp_(g, 1 - b1)
            b.exp_avg_sq.mul_(b2).addcmul_(g, g, value=1 - b2)
            denominator = b.exp_avg_sq.sqrt().div_(root).add_(eps)
            b.weights.addcdiv_(b.exp_avg, denominator, value=-lr / (1 - b1**step))

    def parameters(self) -> Mapping[str, Tensor]:
        """The weights by name, without gradient history."""
        return {name: p.detach() for name, p in self.model.named_parameters()}


def _nothing(number: int, gradients: Tensor) -> None:
    return


def _aligned(n: int) -> int:
    return (n + ALIGN - 1) // ALIGN * ALIGN
