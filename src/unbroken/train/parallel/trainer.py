"""One rank of a training that a plan spreads: its stages, one update of its weights, and what a checkpoint has of it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...progress import Run
from ..checks.busy import BusyTime
from ..config import OptimConfig, TrainConfig, learning_rate
from ..corpus.mixture import MixedOrder, TokenMixture
from ..corpus.order import SampleOrder, SamplePosition
from ..corpus.samples import CorpusSamples, TrainingCorpus, text_samples
from ..corpus.tokens import Tokens
from ..planning.layout import check, micro_batches
from ..trainer import check_same_training, order_of, training_values
from ..world import World, hold_streams
from .attention import choose_attention, use_attention
from .context import positions, split_sequence
from .experts import Experts, balance
from .loss import NextToken, Preference
from .mesh import Mesh, open_mesh
from .pipeline import Pipeline, Shapes
from .shard import share_parameters, units
from .stage import MakeStage, Stage, draw_weights, fill_buffers
from .state import OptimizerState, Spread, load_weights
from .tensor import split_matrices
from .zero.one_pass import OnePass
from .zero.units import Zero

MakeOptimizer = Callable[[Iterable[nn.Parameter], Iterable[nn.Parameter], OptimConfig], torch.optim.Optimizer]
"""(weights to decay, others, configuration) -> an optimizer of torch that treats each element by itself."""

Rows = tuple[Tensor, Tensor]
"""Tokens and targets: (samples, places of the sequence), of int64."""

MakeLoss = Callable[..., NextToken]
"""(mesh of the ranks that share matrices, compile=...) -> the loss: `NextToken`, or a subclass of yours."""


@dataclass
class PlanTrainer:
    """One rank of a plan. Whoever wants another learning rate or order of the data puts theirs in its field."""

    config: TrainConfig
    world: World
    run: Run
    tokens: TrainingCorpus
    samples: CorpusSamples
    order: SampleOrder | MixedOrder
    position: SamplePosition
    mesh: Mesh
    stages: list[Stage]
    zero: Zero
    spread: Spread
    optimizer: torch.optim.Optimizer
    moments: OptimizerState
    loss: NextToken
    pipeline: Pipeline | None
    rate: Callable[[OptimConfig, int, int], float] = learning_rate
    step: int = 0
    busy: float = math.nan
    """Seconds that this rank's GPU worked on the last step's gradients; NaN without a GPU, and where its passes wait for other
    ranks inside: parameters, optimizer state or sequences that are shared, stages."""

    def __post_init__(self) -> None:
        layout = self.mesh.layout
        waits = layout.storage[0] > 1 or max(layout.storage[2:]) > 1 or layout.context > 1
        self._busy = BusyTime(torch.device("cpu") if waits else self.world.device)
        self._ahead: dict[tuple[int, ...], tuple[Rows, Rows]] = {}

    @property
    def parameter_count(self) -> int:
        """Parameters of the whole model."""
        return sum(shape.numel() for shape in self.spread.shapes.values())

    def state(self) -> dict[str, Any]:
        """The state as a checkpoint keeps it: each rank the rows that it updates, in float32, under the model's names."""
        theirs = self.stages[0].huggingface(self.config.model, self.config.data.seq)
        return self._tensors | {"training": training_values(self.config, self.step, self.tokens, theirs)}

    @cached_property
    def _tensors(self) -> dict[str, Any]:
        biases = {f"{n}.bias": m.bias for s in self.stages for n, m in s.named_modules() if isinstance(m, Experts)}  # fmt: skip
        return {
            "model": self.spread.rows(self.zero.weights) | self.spread.biases(biases),
            "optimizer": {k: self.spread.rows(m) for k, m in self.moments.tensors().items()},
        }

    def resume(self, step: int, training: dict[str, Any], position: SamplePosition) -> None:
        """Goes on from a checkpoint whose tensors are loaded already; raises InputError if it is of another training."""
        check_same_training(self.config, self.tokens, step, training)
        self.step = step
        self.position = position.skipping(self.position.skips)
        self.moments.set_step(step)
        self.zero.publish()

    def final_tensors(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """What this rank holds at the end: parameters, and optimizer state, by name."""
        moments = {f"{k}.{n}": t for k, m in self.moments.tensors().items() for n, t in m.items()}
        return {n: p for u in self.zero.units for n, p in zip(u.named, u.parts, strict=True)}, moments

    # --- one step

    def train_step(
        self, wait_for_copies: Callable[[], None], stop: bool
    ) -> tuple[float, Tensor, bool, bytes]:
        """One update. Returns (mean loss of the global batch, gradient norm, whether any rank wants to stop, this rank's
        tokens)."""
        indices, self.position = self.position.take(self.config.data.global_batch)
        chosen = [self.order[i] for i in indices]
        self.loss.total = self.samples.weight(chosen)
        began = monotonic()
        rows, there = self._ahead[key] if (key := tuple(chosen)) in self._ahead else self._read(chosen)
        self._ahead.clear()
        self.run.add_data_wait(monotonic() - began)
        with self.loss.scope(), self._busy:
            total = self._forward_and_backward(*there)
        self.zero.finish()
        norm = self.zero.clip(self.config.optim.clip)
        agreed = self._agree(total, float(stop), norm)
        wait_for_copies()
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.config.optim, self.step + 1, self.config.run.steps)
        self.zero.update(self.optimizer)
        if self.config.model.experts:
            for stage in self.stages:
                balance(stage, self.mesh.reading)
        self.step += 1
        self._read_ahead()
        # Read only now: while the device updates, the next step's kernels are launched.
        mean, stop_flag, size = agreed()
        self.busy = self._busy.take()
        return (
            mean,
            torch.tensor(size, dtype=torch.float64),
            stop_flag > 0,
            b"".join(r.numpy().tobytes() for r in rows),
        )

    def _forward_and_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.pipeline is not None:
            self.zero.expect(first=True, last=True)
            return self.pipeline.train(tokens, targets)
        n = micro_batches(self.mesh.layout, self.config.data)
        total = torch.zeros((), device=self.world.device)
        for i, (x, y) in enumerate(zip(tokens.chunk(n), targets.chunk(n), strict=True)):
            self.zero.expect(first=i == 0, last=i == n - 1)
            loss = self.loss(self.stages[0](x), y)
            loss.backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss on the held-out samples, the same on every rank."""
        first, count = self.order.samples, self.config.run.eval_samples
        self.loss.total = self.samples.weight(range(first, first + count))
        layout, data = self.mesh.layout, self.config.data
        n = micro_batches(layout, data)
        at_once = data.global_batch // (1 if self.pipeline is not None else n)
        total = torch.zeros((), device=self.world.device)
        with self.loss.scope():
            for start in range(first, first + count, at_once):
                rows = self._rows(range(start, min(start + at_once, first + count)))
                tokens, targets = (self._to_device(r) for r in rows)
                if self.pipeline is not None:
                    total += self.pipeline.evaluate(tokens, targets)
                else:
                    total += self.loss(self.stages[0](tokens), targets)
        return self._agree(total, 0.0, total)()[0]

    def _agree(self, total: Tensor, stop: float, norm: Tensor) -> Callable[[], list[float]]:
        """(sum of the losses, how many ask to stop) over all ranks, the same bits on each, and the norm, which all have; it
        waits where it is called, for nothing that comes after this call."""
        both = torch.full((2,), stop, dtype=torch.float64, device=self.world.device)
        # Ranks that share matrices have the same loss: one of them counts.
        both[0] = total if self.mesh.here.tensor == 0 else 0.0
        if self.world.size > 1:
            dist.all_reduce(both)
        told = torch.cat((both, norm.detach().double().reshape(1)))
        if not told.is_cuda:
            return told.tolist
        host = torch.empty(3, dtype=torch.float64, pin_memory=True)
        host.copy_(told, non_blocking=True)
        there = torch.cuda.current_stream().record_event()

        def read() -> list[float]:
            there.synchronize()
            values: list[float] = host.tolist()
            return values

        return read

    def _read(self, samples: Sequence[int]) -> tuple[Rows, Rows]:
        """This rank's share of a batch, on the host and on the device."""
        rows = self._rows(samples)
        return rows, (self._to_device(rows[0]), self._to_device(rows[1]))

    def _read_ahead(self) -> None:
        """Reads the next batch while a GPU still works on this one."""
        if self.world.device.type != "cuda" or self.step >= self.config.run.steps:
            return
        updated, began = torch.cuda.current_stream().record_event(), monotonic()
        with contextlib.suppress(Exception):  # raised by the step that it belongs to
            indices, _ = self.position.take(self.config.data.global_batch)
            chosen = [self.order[i] for i in indices]
            self._ahead[tuple(chosen)] = self._read(chosen)
        if updated.query():  # the GPU was done first: it waits for data
            self.run.add_data_wait(monotonic() - began)

    def _rows(self, samples: Sequence[int]) -> Rows:
        """This rank's share of a batch, at the places of the sequence that it sees: tokens and targets, of int64, on the host."""
        here, layout = self.mesh.here, self.mesh.layout
        each = len(samples) // layout.data
        mine = self.samples.rows(samples[here.data * each : (here.data + 1) * each])
        at = positions(self.config.data.seq, here.context, layout.context)
        tokens, targets = (torch.from_numpy(x)[:, at] for x in mine)
        return tokens, targets

    def _to_device(self, rows: Tensor) -> Tensor:
        if self.world.device.type != "cuda":
            return rows
        return rows.pin_memory().to(self.world.device, non_blocking=True)


def adamw(
    decayed: Iterable[nn.Parameter], others: Iterable[nn.Parameter], c: OptimConfig
) -> torch.optim.Optimizer:
    """torch's AdamW; fused on a GPU."""
    found: list[tuple[list[nn.Parameter], float]] = [(list(decayed), c.weight_decay), (list(others), 0.0)]
    groups = [{"params": p, "weight_decay": decay} for p, decay in found if p]
    cuda = any(w.is_cuda for p, _ in found for w in p)
    return torch.optim.AdamW(groups, lr=c.lr, betas=(c.beta1, c.beta2), eps=c.eps, fused=cuda)


@torch.no_grad()
def _preference(mesh: Mesh, beta: float, stage: Stage, samples: CorpusSamples) -> Preference:
    """The loss of preferences, which knows what the weights of now say of every answer."""
    loss = Preference(mesh.tensor, beta)
    for s in range(samples.count):
        tokens, targets = (torch.from_numpy(x).to(mesh.device) for x in samples.rows([s]))
        loss.remember(targets, stage(tokens))
    return loss


def build(
    config: TrainConfig,
    world: World,
    run: Run,
    tokens: Any,
    *,
    make_optimizer: MakeOptimizer = adamw,
    make_stage: MakeStage = Stage,
    make_loss: MakeLoss = NextToken,
) -> PlanTrainer:
    """A rank at step 0, of a model, loss, optimizer and data (`Tokens`, or any `TrainingCorpus` with `samples`) of your own where they are given.

    Raises UsageError, with the legal values, for a plan that does not fit; InputError for the text.
    """
    plan, c = config.plan, config.data
    layout = check(config, world.size)
    samples: CorpusSamples = text_samples(tokens, c.seq) if isinstance(tokens, Tokens) else tokens.samples
    order: SampleOrder | MixedOrder = order_of(samples.count, config, f"{tokens.count} bytes")
    if isinstance(tokens, TokenMixture):
        order = tokens.order(config.run.eval_samples if config.run.eval_every else 0, c.seed)
    mesh = open_mesh(layout, world.rank, world.device)
    run.set_peers(mesh.here.pipeline)
    low = config.run.dtype == "bfloat16"
    gradients = torch.bfloat16 if plan.gradient_dtype == "bfloat16" else torch.float32
    kernel = choose_attention(config, world.device, world.rank)
    cut = layout.layers(config.model.layers)
    if plan.compile and world.device.type == "cuda":
        hold_streams()
    stages = []
    for layers in cut[mesh.here.pipeline :: layout.pipeline]:
        with torch.device("meta"):
            stage = make_stage(config.model, layers, recompute=plan.recompute)
        stage.to(torch.bfloat16 if low else torch.float32)
        split_sequence(stage, mesh.group("context"))
        use_attention(stage, kernel)
        split_matrices(stage, mesh.tensor)
        if plan.compile:
            stage.compile_parts()
        share_parameters(stage, mesh.shard, reshard=plan.reshard, gradient_dtype=gradients)
        stage.to_empty(device=world.device)
        stage.set_positions(config.model, positions(c.seq, mesh.here.context, layout.context), world.device)
        fill_buffers(stage)
        stages.append(stage)
    names = {p: n for s in stages for n, p in s.named_parameters()}
    zero = Zero([u for s in stages for u in units(s)], names, mesh, gradients)
    spread = Spread(mesh, config.model, make_stage)
    draw_weights(spread.own_rows(zero.weights), spread.shapes, config.model, c.seed)
    if config.run.weights_from is not None:
        load_weights(spread.own_rows(zero.weights), config.run.weights_from, config.model)
    zero.publish()
    matrices = {n for s in stages for n, p in s.named_parameters() if p.ndim > 1}
    weights = zero.weights
    optimizer = make_optimizer(
        [w for n, w in weights.items() if n in matrices],
        [w for n, w in weights.items() if n not in matrices],
        config.optim,
    )
    moments = OptimizerState(optimizer, weights)
    if plan.compile and low and isinstance(optimizer, torch.optim.AdamW) and OnePass.can(optimizer):
        zero.one_pass = OnePass(optimizer)
    loss = (
        make_loss(mesh.tensor, compile=plan.compile)
        if c.task != "dpo"
        else _preference(mesh, c.beta, stages[0], samples)
    )
    pipeline = None
    if layout.pipeline > 1:
        n = micro_batches(layout, c, plan.schedule)
        t, time = layout.tensor, c.seq // layout.context
        shapes = Shapes(
            c.global_batch // layout.data // n, time, time // t, config.model.dim, config.model.vocab // t,
            torch.bfloat16 if low else torch.float32,
        )  # fmt: skip
        pipeline = Pipeline(stages, mesh, plan.schedule, n, loss, shapes)
    else:
        zero.hook()
    return PlanTrainer(
        config, world, run, tokens, samples, order, SamplePosition().skipping([*c.skips, *run.skips]), mesh, stages, zero, spread, optimizer,
        moments, loss, pipeline,
    )  # fmt: skip
