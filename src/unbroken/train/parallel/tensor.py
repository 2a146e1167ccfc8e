"""Tensor and sequence parallelism: matrices cut over ranks, and between them the sequence (Megatron-LM; torch's DTensor)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ...errors import UsageError
from .experts import Experts
from .stage import Stage

_SEQUENCE = Shard(1)


def split_matrices(stage: Stage, mesh: DeviceMesh) -> None:
    """Cuts a stage's matrices over the ranks of `mesh`, in place; between blocks each rank has a piece of the sequence.

    A stage takes tokens, or the stream cut along the sequence; it gives the stream so, or logits cut along the vocabulary.
    """
    if mesh.size() == 1:
        return
    ends: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=_SEQUENCE),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=_SEQUENCE, output_layouts=Shard(-1), use_local_output=True),
    }
    parallelize_module(stage, mesh, {k: v for k, v in ends.items() if getattr(stage, k) is not None})
    for block in stage.blocks.values():
        parallelize_module(block, mesh, _block_plan(block))
    for name, p in stage.named_parameters():
        if not isinstance(p, DTensor):
            raise UsageError(
                f"--tensor {mesh.size()}: how to cut {name} of this model is not known",
                hint="Legal for a model of your own: --pipeline, --context, --parameters, --gradients and --optimizer",
            )


def _block_plan(block: nn.Module) -> dict[str, ParallelStyle]:
    whole = PrepareModuleInput(
        input_layouts=(_SEQUENCE, None, None), desired_input_layouts=(Replicate(), None, None)
    )
    plan: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "forward_norm": SequenceParallel(),
        "attention": whole,
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=_SEQUENCE),
    }
    if isinstance(getattr(block, "feed_forward", None), Experts):
        return plan | {"feed_forward": _EachExpert()}
    return plan | {
        "feed_forward": PrepareModuleInput(input_layouts=_SEQUENCE, desired_input_layouts=Replicate()),
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=_SEQUENCE),
    }


class _EachExpert(ParallelStyle):
    """Cuts every expert's matrices as those of one feed-forward; the router is whole on each rank."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        places: dict[str, Any] = {"gate": Shard(1), "up": Shard(1), "down": Shard(2)}
        for owner in module.modules():
            for key, p in list(owner.named_parameters(recurse=False)):
                place = places.get(key, Replicate()) if owner is module else Replicate()
                owner.register_parameter(key, nn.Parameter(distribute_tensor(p, mesh, [place])))

        def enter(_: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
            x = inputs[0]
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, mesh, [_SEQUENCE], run_check=False)
            whole: Tensor = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            return whole

        def leave(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            share = DTensor.from_local(output, mesh, [Partial()], run_check=False)
            piece: Tensor = share.redistribute(placements=[_SEQUENCE]).to_local()
            return piece

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        return module
