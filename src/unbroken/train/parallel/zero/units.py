"""Hierarchical ZeRO: gradients and optimizer state in groups of their own, wider than the parameters'.

FSDP2 leaves each rank the gradients of its piece of the parameters. Here they go on: every micro-batch they are
reduce-scattered over the ranks that share one copy of the gradients and added up there; after the last one they are
reduce-scattered over those that share an optimizer state and summed over its replicas. torch's optimizer updates the
rows that are left to a rank, and two all-gathers publish them. All this in units (a block each), beside the backward
pass where gradients arrive, and beside the next forward pass, which waits for a unit when it comes to it. The update goes
unit by unit, too: gradients of 32 bits are there for one at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..mesh import Mesh
from .one_pass import OnePass
from .split import Split, empty_parts, split_of

# torch 2.13 gave them other names; the old ones warn on every call.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Unit:
    """Parameters whose gradients and new values travel together, and this rank's rows of them."""

    def __init__(self, named: Mapping[str, nn.Parameter], mesh: Mesh, gradient_dtype: torch.dtype) -> None:
        here, (_, self.replicas, o, g, _, _) = mesh.here, mesh.layout.storage
        self.named = named
        self._mesh, self._gradients_at, self._optimizer_at = mesh, here.gradients, here.optimizer
        self.parts = [_local(p) for p in named.values()]
        self.to_gradients = split_of(self.parts, g)
        kept = [(b - a, *p.shape[1:]) for (a, b), p in zip(self.to_gradients.rows(here.gradients), self.parts, strict=True)]  # fmt: skip
        # The groups beside this one may keep more rows: all pack alike.
        self.to_optimizer = Split(tuple(kept), o, self.to_gradients.each)
        like = self.parts[0]
        # Nobody to share with: the gradients stay where the backward pass wrote them, nothing is copied.
        self._in_place = (g, o, self.replicas) == (1, 1, 1) and gradient_dtype == like.dtype
        self._grads: list[Tensor] = []
        size = 0 if self._in_place else self.to_gradients.total
        self.sum = torch.zeros(size, dtype=gradient_dtype, device=like.device)
        """Gradients added up so far: this rank's share of them."""
        self._own = self.sum[: self.to_optimizer.total]
        self.weights = self._rows_to_update()
        self.ready: Any = None
        """When the new values are there: an event of the stream that gathers."""

    def _rows_to_update(self) -> dict[str, nn.Parameter]:
        """What the optimizer works on, in float32: rows of the parameters themselves where they are that."""
        rows = [
            p[a + c : a + d].detach()
            for p, (a, _), (c, d) in zip(
                self.parts,
                self.to_gradients.rows(self._gradients_at),
                self.to_optimizer.rows(self._optimizer_at),
                strict=True,
            )
        ]
        return {n: nn.Parameter(r if r.dtype == torch.float32 else r.float()) for n, r in zip(self.named, rows, strict=True)}  # fmt: skip

    def add(self, first: bool, last: bool) -> None:
        """Takes the parameters' gradients of one micro-batch, shared out, into the sum."""
        grads = [_gradient(p, part) for p, part in zip(self.named.values(), self.parts, strict=True)]
        split = self.to_gradients
        if self._in_place:
            if first:
                self._grads = grads
            else:
                torch._foreach_add_(self._grads, grads)
        elif split.size > 1:
            got = self.sum if first else torch.zeros_like(self.sum)
            self._scatter(split, self._gradients_at, grads, got, "gradients")
            if not first:
                self.sum.add_(got)
        elif first and last and self.to_optimizer.size > 1:
            self._grads = grads  # summed over the others from where they lie
        else:
            kept = split.views(self.sum, 0)
            torch._foreach_copy_(kept, grads) if first else torch._foreach_add_(kept, grads)
        for p in self.named.values():
            p.grad = None

    def reduce(self) -> None:
        """After the last micro-batch: the gradients of the rows to update, summed over all copies of the model."""
        split = self.to_optimizer
        if split.size > 1:
            kept = self._grads or self.to_gradients.views(self.sum, self._gradients_at)
            # `_own` lies in the sum.
            own = self._own if self._grads else torch.zeros_like(self._own)
            self._scatter(split, self._optimizer_at, kept, own, "optimizer")
            self._grads = []
            if own is not self._own:
                self._own.copy_(own)
        if self.replicas > 1:
            dist.all_reduce(self._own, group=self._mesh.group("replicate"))

    def reduced(self) -> list[Tensor]:
        """Gradients of the rows to update, in the order of `weights`."""
        return self._grads if self._in_place else self.to_optimizer.views(self._own, self._optimizer_at)

    def give_gradients(self, scale: Tensor | None) -> None:
        """Sets `.grad` of the weights, in float32, scaled."""
        for w, g in zip(self.weights.values(), self.reduced(), strict=True):
            w.grad = g.float() if scale is None else g.float().mul_(scale)

    def drop_gradients(self) -> None:
        """Lets go of the gradients that were used, and of what `give_gradients` set."""
        self._grads = []
        for w in self.weights.values():
            w.grad = None

    @property
    def gradient_bytes(self) -> int:
        """What the gradients take from a backward pass to the update."""
        return sum(p.nbytes for p in self.parts) if self._in_place else self.sum.nbytes

    @property
    def low(self) -> bool:
        """Whether the parameters have 16 bits; else the optimizer updates the parameters themselves."""
        return self.parts[0].dtype != torch.float32

    def rows(self) -> tuple[list[Tensor], list[Tensor]]:
        """Of each parameter what this rank keeps gradients of, and what it updates."""
        kept = [p[a:b] for p, (a, b) in zip(self.parts, self.to_gradients.rows(self._gradients_at), strict=True)]  # fmt: skip
        return kept, [k[a:b] for k, (a, b) in zip(kept, self.to_optimizer.rows(self._optimizer_at), strict=True)]  # fmt: skip

    def round(self) -> None:
        """Copies updated rows to the parameters of 16 bits."""
        if self.low:
            torch._foreach_copy_(self.rows()[1], [w.detach() for w in self.weights.values()])

    def publish(self) -> None:
        """Brings the updated rows to all ranks that hold the parameters."""
        like = self.parts[0]
        outer, inner = self.to_optimizer, self.to_gradients
        kept, mine = self.rows()
        if outer.size > 1:
            self._gather(outer, self._optimizer_at, mine, kept, "optimizer", like)
        if inner.size > 1:
            self._gather(inner, self._gradients_at, kept, self.parts, "gradients", like)

    def _scatter(self, split: Split, index: int, grads: list[Tensor], into: Tensor, axis: str) -> None:
        """The sum over a group of its ranks' gradients, of each parameter part `index` of its rows; `into` is no part of them."""
        group = self._mesh.group(axis)
        if split.even and all(g.dtype == into.dtype for g in grads):
            with _together(group, into.device):
                for mine, whole in zip(split.views(into, index), grads, strict=True):
                    _reduce_scatter(mine.view(-1), whole.contiguous().view(-1), group=group)
            return
        sent = split.pack(grads, empty_parts(split, into, into.dtype))
        _reduce_scatter(into, sent.view(-1), group=group)

    def _gather(self, split: Split, index: int, mine: list[Tensor], into: list[Tensor], axis: str, like: Tensor) -> None:  # fmt: skip
        group = self._mesh.group(axis)
        if split.even and all(t.is_contiguous() for t in into):
            with _together(group, like.device):
                for rows, whole in zip(mine, into, strict=True):
                    _all_gather(whole.view(-1), rows.view(-1), group=group)
            return
        sent = torch.zeros(split.total, dtype=like.dtype, device=like.device)
        for view, rows in zip(split.views(sent, index), mine, strict=True):
            view.copy_(rows)
        got = torch.empty(split.size, split.total, dtype=like.dtype, device=like.device)
        _all_gather(got.view(-1), sent, group=group)
        split.unpack(got, into)


def _together(group: Any, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Collectives of one kind in one launch, where there are launches."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    together: contextlib.AbstractContextManager[Any] = dist._coalescing_manager(group)  # type: ignore[attr-defined]
    return together


class Zero:
    """All units of what a rank holds; their collectives run beside the computation."""

    def __init__(
        self, modules: Sequence[tuple[nn.Module, ...]], names: Mapping[nn.Parameter, str], mesh: Mesh,
        gradient_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._mesh = mesh
        alone = mesh.layout.storage[1:4] == (1, 1, 1)
        self._stream = torch.cuda.Stream() if mesh.device.type == "cuda" and not alone else None
        self._scale: Tensor | None = None
        self.one_pass: OnePass | None = None
        """What updates in one pass over memory, where the optimizer can."""
        self.units = [
            Unit({names[p]: p for m in unit for p in m.parameters()}, mesh, gradient_dtype)
            for unit in modules
        ]
        self._missing: dict[int, int] = {}
        self._turn = -1
        """The unit whose gradients travel next: the last one first, as backward passes make them. The same order on every rank, also
        where one of them does not use a parameter."""
        self._first = self._last = False
        self._hooked = False
        for unit, owners in zip(self.units, modules, strict=True):
            for m in owners:
                m.register_forward_pre_hook(lambda _, __, u=unit: self._wait_for(u), prepend=True)

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """What the optimizer updates here, by the names that the parameters have."""
        return {n: w for u in self.units for n, w in u.weights.items()}

    # --- gradients

    def hook(self) -> None:
        """From now on each unit's gradients travel as soon as a backward pass has made them."""
        self._hooked = True
        for i, unit in enumerate(self.units):
            for p in unit.named.values():
                p.register_post_accumulate_grad_hook(lambda _, i=i: self._arrived(i))

    def expect(self, first: bool, last: bool) -> None:
        """Says which backward pass of the step comes next."""
        self._take_rest()
        self._first, self._last = first, last
        self._missing = {i: len(u.named) for i, u in enumerate(self.units)}
        self._turn = len(self.units) - 1

    def _arrived(self, i: int) -> None:
        self._missing[i] -= 1
        self._take_next()

    def _take_next(self, rest: bool = False) -> None:
        while self._turn >= 0 and (rest or not self._missing[self._turn]):
            unit, self._turn = self.units[self._turn], self._turn - 1
            with self._beside(unit):
                self._take(unit)

    def _take_rest(self) -> None:
        """Units of which a parameter was not used in the last backward pass, and those behind them."""
        if self._hooked:
            self._take_next(rest=True)

    def _take(self, unit: Unit) -> None:
        unit.add(self._first, self._last)
        if self._last:
            unit.reduce()

    def finish(self) -> None:
        """After the last backward pass: every gradient is there, for whoever reads it next."""
        if not self._hooked:
            for unit in self.units:
                self._take(unit)
        self._take_rest()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def clip(self, limit: float) -> Tensor:
        """The norm of the gradients over the whole model; the next update scales them to one of at most `limit` (0: none)."""
        grads = [g for u in self.units for g in u.reduced() if g.numel()]
        square = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        if grads:
            norms = torch.stack(torch._foreach_norm(grads, 2.0, dtype=torch.float32)).double()
            square = (norms.square() * self._shares).sum()
        if dist.get_world_size() > 1:
            dist.all_reduce(square)
        norm = square.sqrt()
        self._scale = (limit / (norm + 1e-6)).clamp(max=1.0).float() if limit else None
        return norm

    @cached_property
    def _shares(self) -> Tensor:
        """What each gradient here counts for: ranks that hold the same rows count them once, together.

        Made once: a number that is brought to a GPU at each step makes the processor wait for all that was launched before.
        """
        pairs = [(p, g) for u in self.units for p, g in zip(u.named.values(), u.reduced(), strict=True)]
        counted = [1 / self._holders(p) for p, g in pairs if g.numel()]
        return torch.tensor(counted, dtype=torch.float64).to(self._mesh.device)

    def _holders(self, p: nn.Parameter) -> int:
        cut = isinstance(p, DTensor) and any(
            pl.is_shard() for pl, axis in zip(p.placements, p.device_mesh.mesh_dim_names or (), strict=True) if axis == "tensor"
        )  # fmt: skip
        return self._mesh.layout.storage[1] * (1 if cut else self._mesh.layout.tensor)

    # --- new values

    @torch.no_grad()
    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of the optimizer on each unit's rows, and their new values to all ranks that hold the parameters."""
        if self.one_pass is not None:
            self.one_pass.begin(self._mesh.device)
        for unit in self.units:
            if self.one_pass is not None:
                scale = self._scale if self._scale is not None else torch.ones((), device=self._mesh.device)
                self.one_pass.update(zip(unit.weights.values(), unit.reduced(), unit.rows()[1], strict=True), scale)  # fmt: skip
            else:
                unit.give_gradients(self._scale)
                optimizer.step()  # touches what has a gradient
                unit.round()
            unit.drop_gradients()
            self._publish(unit)
        self._wait_for_shards()

    @torch.no_grad()
    def publish(self) -> None:
        """After a restore: brings the new values to all ranks that hold the parameters."""
        for unit in self.units:
            unit.round()
            self._publish(unit)
        self._wait_for_shards()

    def _publish(self, unit: Unit) -> None:
        with self._beside(unit, published=True):
            unit.publish()

    def _wait_for_shards(self) -> None:
        """FSDP gathers in streams of its own, which wait for the current one once, before the first block."""
        if self._stream is not None and self._mesh.shard.size() > 1:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _wait_for(self, unit: Unit) -> None:
        if unit.ready is not None:
            torch.cuda.current_stream().wait_event(unit.ready)

    @contextlib.contextmanager
    def _beside(self, unit: Unit, published: bool = False) -> Iterator[None]:
        """On a GPU: in a stream of its own, after all that was issued so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for p in unit.named.values():
                if p.grad is not None:
                    _local(p.grad).record_stream(self._stream)
            yield
            if published:
                unit.ready = self._stream.record_event()


def _local(t: Tensor) -> Tensor:
    out: Tensor = t.to_local() if isinstance(t, DTensor) else t
    return out.detach()


def _gradient(p: nn.Parameter, part: Tensor) -> Tensor:
    """A parameter's gradient as it is cut; zeros where the backward pass did not come to it."""
    g = p.grad
    if g is None:
        return torch.zeros_like(part)
    if isinstance(g, DTensor) and isinstance(p, DTensor) and g.placements != p.placements:
        g = g.redistribute(placements=p.placements)  # sums that are spread over ranks
    return _local(g)
