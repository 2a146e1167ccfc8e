"""The best legal plan for a model on some GPUs, and what any plan would need and take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...errors import UsageError
from ...units import Bytes
from ..config import DataConfig, PlanConfig
from .cost import StepCost, TrainingWorkload, cost
from .hardware import Hardware
from .layout import ParallelLayout, check_model, divisors, lay_out, micro_batches
from .memory import Held, step_bytes
from .sizes import flops_per_token


@dataclass(frozen=True)
class Estimate:
    """A plan that fits, with what it needs and takes."""

    plan: PlanConfig
    layout: ParallelLayout
    micro_batch: int
    memory: Held
    """Of the fullest GPU."""
    step: StepCost
    tokens_per_second: float
    """Of one GPU."""
    mfu: float
    """tokens/s x (6 N + 12 L d T) / the FLOP/s that training reaches there at best."""


def estimate(plan: PlanConfig, gpus: int, work: TrainingWorkload, hw: Hardware) -> Estimate:
    """What a plan needs and takes. Raises UsageError where it does not divide, or does not fit, saying by how much."""
    layout, fullest = _lay_out(plan, gpus, work)
    if fullest.total > hw.memory * hw.usable:
        raise _refuse(fullest, hw)
    return _estimate(layout, fullest, plan, gpus, work, hw)


def _lay_out(plan: PlanConfig, gpus: int, work: TrainingWorkload) -> tuple[ParallelLayout, Held]:
    """Where a plan puts what, and what its fullest GPU holds. Raises UsageError where it does not divide."""
    layout = lay_out(plan, gpus)
    check_model(layout, work.model, work.seq)
    data = DataConfig(seq=work.seq, global_batch=work.global_batch, micro_batch=work.micro_batch)
    n = micro_batches(layout, data, plan.schedule)
    stages = (
        step_bytes(
            layout, layout.coordinate(i * layout.world // layout.pipeline), work.model, plan, seq=work.seq,
            micro_batch=work.micro_batch, micro_batches=n,
        )
        for i in range(layout.pipeline)
    )  # fmt: skip
    return layout, max(stages, key=lambda h: h.total)


def _refuse(fullest: Held, hw: Hardware) -> UsageError:
    parts = ", ".join(
        f"{name} {getattr(fullest, name) / 1e9:.1f} GB"
        for name in ("parameters", "gradients", "optimizer", "activations", "gathered")
    )
    return UsageError(
        f"the plan needs {fullest.total / 1e9:.1f} GB on its fullest GPU ({parts}), "
        f"and {hw.memory * hw.usable / 1e9:.1f} GB of {Bytes(int(hw.memory))} can be planned with",
        hint="Share more (--optimizer -1, --parameters), recompute (--recompute full), or a smaller --micro-batch",
    )


def _estimate(
    layout: ParallelLayout, fullest: Held, plan: PlanConfig, gpus: int, work: TrainingWorkload, hw: Hardware
) -> Estimate:
    step = cost(layout, plan, work, hw)
    rate = work.global_batch * work.seq / gpus / step.seconds
    mfu = rate * flops_per_token(work.model, work.seq) / hw.flops
    return Estimate(plan, layout, work.micro_batch, fullest, step, rate, mfu)


def search(gpus: int, work: TrainingWorkload, hw: Hardware, base: PlanConfig | None = None) -> list[Estimate]:
    """The legal plans that fit, fastest first; of equal ones the one that needs less. `work.micro_batch` 0 tries several.

    Raises UsageError with the reason that stopped the plan which came nearest, where none fits.
    """
    found: list[Estimate] = []
    nearest: tuple[float, UsageError] | None = None
    for plan in _plans(gpus, work, hw, base or PlanConfig()):
        for micro in [work.micro_batch] if work.micro_batch else (1, 2, 4, 8):
            tried, needed = replace(work, micro_batch=micro), float("inf")
            try:
                layout, fullest = _lay_out(plan, gpus, tried)
                if fullest.total <= hw.memory * hw.usable:
                    found.append(_estimate(layout, fullest, plan, gpus, tried, hw))
                    continue
                needed, why = fullest.total, _refuse(fullest, hw)
            except UsageError as e:
                why = e
            if nearest is None or needed < nearest[0]:
                nearest = needed, why
    if not found:
        assert nearest is not None
        raise UsageError(
            f"no plan for {gpus} GPUs fits: of the nearest one, {nearest[1].message}",
            hint="More GPUs, or another --global-batch",
        )
    return sorted(found, key=lambda e: (round(e.step.seconds, 6), e.memory.total))


def _plans(gpus: int, work: TrainingWorkload, hw: Hardware, base: PlanConfig) -> Iterator[PlanConfig]:
    """Plans worth trying: each axis a divisor, tensor parallelism inside a node, groups that nest."""
    layers = work.model.layers
    for pipeline in (d for d in divisors(gpus) if d <= layers):
        for tensor in (d for d in divisors(gpus // pipeline) if d <= hw.gpus_per_node):
            copies = gpus // pipeline // tensor
            for context in (d for d in divisors(copies) if d == 1 or work.seq // d >= 4096):
                for p in divisors(copies):
                    for o in sorted({p, copies, max(p, min(copies, hw.gpus_per_node))}):
                        if copies % o or o % p:
                            continue
                        for g in sorted({p, o}):
                            for recompute in ("none", "selective", "full"):
                                plan = replace(
                                    base, engine="plan", pipeline=pipeline, tensor=tensor, context=context,
                                    parameters=p, gradients=g, optimizer=o, recompute=recompute,
                                )  # fmt: skip
                                yield plan
                                if pipeline > 1 and 2 * pipeline <= layers:
                                    yield replace(plan, schedule="interleaved", stages=2)
