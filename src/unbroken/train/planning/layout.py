"""A plan laid out on ranks: who holds which layers, shares which matrix, sequence, parameter, gradient and moment.

Ranks are numbered with the pipeline outermost and tensor parallelism innermost, so that those who talk most are
nearest. Between the two lie the *copies*: all ranks that hold the same part of the model, data x context of them.
The copies are dealt into nested groups: `parameters` neighbours share one copy of the parameters, `gradients` of them
one of the gradients, `optimizer` of them one optimizer state; each size divides the next. (In the words of FSDP:
shard = parameters, replicate = copies / parameters.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ...errors import UsageError
from ..config import DataConfig, ModelConfig, PlanConfig, TrainConfig


@dataclass(frozen=True)
class Coordinate:
    """Where one rank stands on each axis."""

    pipeline: int
    data: int
    context: int
    tensor: int
    replicate: int
    optimizer: int
    """Which slice of its gradients' rows this rank updates."""
    gradients: int
    """Which slice of its parameters' rows it keeps gradients of."""
    shard: int


@dataclass(frozen=True)
class ParallelLayout:
    """A plan that fits a number of ranks, every group size a number."""

    world: int
    pipeline: int
    context: int
    tensor: int
    parameters: int
    gradients: int
    optimizer: int
    stages: int = 1

    @property
    def copies(self) -> int:
        """Ranks that hold the same part of the model."""
        return self.world // (self.pipeline * self.tensor)

    @property
    def data(self) -> int:
        """Ranks that read different samples."""
        return self.copies // self.context

    @property
    def storage(self) -> tuple[int, int, int, int, int, int]:
        """Sizes of the axes that state is spread over: pipeline, replicate, optimizer, gradients, shard, tensor."""
        g, o = self.gradients // self.parameters, self.optimizer // self.gradients
        return self.pipeline, self.copies // self.optimizer, o, g, self.parameters, self.tensor

    def coordinate(self, rank: int) -> Coordinate:
        """Where a rank stands."""
        rest, tensor = divmod(rank, self.tensor)
        pipeline, copy = divmod(rest, self.copies)
        data, context = divmod(copy, self.context)
        _, _, o, g, s, _ = self.storage
        return Coordinate(
            pipeline, data, context, tensor, copy // (s * g * o), copy // (s * g) % o, copy // s % g, copy % s
        )

    def layers(self, count: int) -> tuple[range, ...]:
        """The layers of each stage, in their order; stage i is on pipeline rank i % pipeline.

        The first and the last stage, which also hold the embedding and the head, take what is over last.
        """
        n = self.pipeline * self.stages
        sizes = [count // n] * n
        order = [*range(1, n - 1), 0, n - 1] if n > 1 else [0]
        for i in order[: count % n]:
            sizes[i] += 1
        starts = [sum(sizes[:i]) for i in range(n)]
        return tuple(range(a, a + s) for a, s in zip(starts, sizes, strict=True))


def lay_out(plan: PlanConfig, world: int) -> ParallelLayout:
    """The plan on `world` ranks. Raises UsageError, with the legal values, for sizes that do not divide."""
    for name, rest in (("pipeline", world), ("tensor", world), ("context", world)):
        size = getattr(plan, name)
        if rest % size:
            raise _refused(name, size, divisors(rest), f"it does not divide {rest} ranks")
    fixed = plan.pipeline * plan.tensor * plan.context
    if world % fixed:
        axes = f"pipeline {plan.pipeline} x tensor {plan.tensor} x context {plan.context}"
        raise UsageError(
            f"the plan's {axes} = {fixed} ranks do not divide the {world} ranks there are",
            hint=f"Start a multiple of {fixed} ranks, or make an axis smaller",
        )
    copies = world // (plan.pipeline * plan.tensor)
    p = _group("parameters", plan.parameters, 1, copies, copies)
    g = _group("gradients", plan.gradients, p, copies, copies)
    o = _group("optimizer", plan.optimizer, g, copies, copies)
    if plan.schedule in ("interleaved", "zero-bubble"):
        if plan.pipeline > 1 and plan.stages < 2:
            raise _refused(
                "stages", plan.stages, (2, 3, 4), f"the {plan.schedule} schedule needs several a rank"
            )
    elif plan.stages > 1:
        raise _refused("stages", plan.stages, (1,), f"the {plan.schedule} schedule has one piece a rank")
    if plan.stages > 1 and plan.pipeline == 1:
        raise _refused("stages", plan.stages, (1,), "there is no pipeline")
    if plan.schedule == "zero-bubble" and plan.pipeline > 1:
        if p > 1:
            raise _refused(
                "parameters",
                p,
                (1,),
                "zero-bubble schedules split the backward pass, which FSDP does not follow",
            )
        if plan.recompute != "none":
            raise UsageError(
                f"--recompute {plan.recompute} with --schedule zero-bubble computes every block three times",
                hint="Legal here: --recompute none, or --schedule interleaved",
            )
    return ParallelLayout(world, plan.pipeline, plan.context, plan.tensor, p, g, o, plan.stages)


def check_model(layout: ParallelLayout, model: ModelConfig, seq: int) -> None:
    """Raises UsageError, with the legal values, for a model or sequence that the layout cannot split."""
    t, c, n = layout.tensor, layout.context, layout.pipeline * layout.stages
    for name in ("heads", "kv_heads", "hidden", "vocab"):
        size = getattr(model, name)
        if size % t:
            raise _refused(
                "tensor", t, divisors(size), f"it does not divide --{name.replace('_', '-')} {size}"
            )
    if n > model.layers:
        raise UsageError(
            f"pipeline {layout.pipeline} x stages {layout.stages} = {n} pieces, but the model has {model.layers} layers",
            hint=f"At most {model.layers} pieces",
        )
    each = (2 * c if c > 1 else 1) * t
    if seq % each:
        raise UsageError(
            f"--seq {seq} does not split: context {c} and tensor {t} need a multiple of {each}",
            hint=f"Legal near it: {max(each, seq // each * each)}, {(seq // each + 1) * each}",
        )
    if model.dropout:
        raise UsageError(
            f"--dropout {model.dropout}: a plan draws no random numbers in the forward pass, they would differ between plans",
            hint="Leave --dropout out, or train without a plan",
        )


def micro_batches(layout: ParallelLayout, data: DataConfig, schedule: str = "1f1b") -> int:
    """How many micro-batches a step has on each rank. Raises UsageError, with the legal values."""
    if data.global_batch % layout.data:
        raise UsageError(
            f"--global-batch {data.global_batch} does not divide among {layout.data} data-parallel ranks",
            hint=f"Legal near it: {_near(data.global_batch, layout.data)}",
        )
    share = data.global_batch // layout.data
    size = data.micro_batch or (share if layout.pipeline == 1 else max(1, share // (2 * layout.pipeline)))
    if share % size:
        raise _refused(
            "micro-batch", size, divisors(share), f"it does not divide a rank's share of {share} samples"
        )
    n = share // size
    if layout.pipeline > 1 and schedule != "gpipe" and n < layout.pipeline:
        raise UsageError(
            f"{n} micro-batches do not fill a pipeline of {layout.pipeline} ranks",
            hint=f"Choose --global-batch and --micro-batch so that there are at least {layout.pipeline}",
        )
    if layout.pipeline > 1 and layout.stages > 1 and n % layout.pipeline:
        raise UsageError(
            f"{n} micro-batches are no multiple of the pipeline's {layout.pipeline} ranks, which this schedule needs",
            hint=f"Legal near it: {_near(n, layout.pipeline)}",
        )
    return n


def check(config: TrainConfig, world: int) -> ParallelLayout:
    """The layout of a whole training, everything checked that can be before the first step. Raises UsageError."""
    layout = lay_out(config.plan, world)
    check_model(layout, config.model, config.data.seq)
    n = micro_batches(layout, config.data, config.plan.schedule)
    if config.data.task == "dpo" and (layout.pipeline, layout.tensor, layout.context) != (1, 1, 1):
        raise UsageError(
            "--task dpo compares whole answers: a plan that cuts layers, matrices or sequences does not have them",
            hint="Legal: --parameters, --gradients and --optimizer of any size, with --recompute",
        )
    if config.run.eval_every:
        each = layout.data * (
            config.data.global_batch // layout.data // n * (n if layout.pipeline > 1 else 1)
        )
        if config.run.eval_samples % each:
            raise UsageError(
                f"--eval-samples {config.run.eval_samples} is no multiple of {each}",
                hint=f"Legal near it: {_near(config.run.eval_samples, each)}",
            )
    return layout


def divisors(n: int) -> tuple[int, ...]:
    """All that divide n, ascending."""
    return tuple(d for d in range(1, n + 1) if n % d == 0)


def group_sizes(copies: int) -> Iterator[tuple[int, int, int]]:
    """Every legal (parameters, gradients, optimizer) of so many copies."""
    for o in divisors(copies):
        for g in divisors(o):
            for p in divisors(g):
                yield p, g, o


def _group(name: str, size: int, inner: int, copies: int, everyone: int) -> int:
    size = {0: inner, -1: everyone}.get(size, size)
    legal = [d for d in divisors(copies) if d % inner == 0]
    if size not in legal:
        raise _refused(name, size, legal, f"the groups are nested in {copies} copies of the model")
    return size


def _near(n: int, step: int) -> str:
    below = n // step * step
    return ", ".join(str(x) for x in (below, below + step) if x)


def _refused(name: str, size: int, legal: Iterable[int], why: str) -> UsageError:
    return UsageError(f"--{name} {size}: {why}", hint=f"Legal: {', '.join(map(str, legal))}")
