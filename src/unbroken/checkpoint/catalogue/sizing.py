"""How much host memory, disk and time a run's checkpoints will need, before it starts. No torch, no effects."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import UsageError

# Bytes per parameter beside the parameter itself, in the element size of the optimizer's state.
OPTIMIZER_COPIES = {"none": 0, "sgd": 0, "momentum": 1, "adagrad": 1, "lion": 1, "adam": 2, "adamw": 2}
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "float8": 1}


@dataclass(frozen=True)
class SizingPlan:
    """A run to be: its state, how it is spread, and what the keeper holds.

    `state_bytes`: of parameters and optimizer, once. `sharded`: each rank has 1/ranks of it (FSDP, ZeRO-3), else
    all of it (data parallel). `buffers`: snapshots that the keeper holds for each rank. `peer`: whether it also
    holds as much for another node.
    """

    state_bytes: int
    ranks: int
    ranks_per_node: int
    sharded: bool = True
    buffers: int = 3
    peer: bool = False
    keep: int = 3

    def __post_init__(self) -> None:
        for name in ("ranks", "ranks_per_node", "buffers", "keep"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", hint="Give a whole number from 1 up")
        if self.state_bytes < 0:
            raise UsageError("the state cannot have less than no bytes")


@dataclass(frozen=True)
class Need:
    """What the plan needs, in bytes: per rank, per node, and of the folder."""

    rank_bytes: int
    node_host_bytes: int
    checkpoint_bytes: int
    folder_bytes: int


def state_bytes(
    parameters: int, *, dtype: str = "float32", optimizer: str = "adamw", master: bool = False
) -> int:
    """Bytes of parameters and optimizer state; `master`: fp32 copies of 16-bit parameters are saved too.

    The optimizer's state has the parameters' type, or fp32 with `master`. Raises UsageError for unknown names.
    """
    if dtype not in ELEMENT_BYTES:
        raise UsageError(f"the type '{dtype}' is not known", hint=f"Known: {', '.join(ELEMENT_BYTES)}")
    if optimizer not in OPTIMIZER_COPIES:
        raise UsageError(
            f"the optimizer '{optimizer}' is not known", hint=f"Known: {', '.join(OPTIMIZER_COPIES)}"
        )
    size = ELEMENT_BYTES[dtype]
    state = 4 if master else size
    return parameters * (size + (4 if master else 0) + OPTIMIZER_COPIES[optimizer] * state)


def need(plan: SizingPlan) -> Need:
    """Bytes that the plan needs. One checkpoint more than `keep` lies in the folder while the next is written."""
    rank = -(-plan.state_bytes // plan.ranks) if plan.sharded else plan.state_bytes
    here = min(plan.ranks, plan.ranks_per_node)
    node = rank * here * plan.buffers * (2 if plan.peer else 1)
    whole = rank * plan.ranks
    return Need(rank, node, whole, whole * (plan.keep + 1))
