"""The published measurements that the cost model has to reproduce, and the fit of its links to them.

7 B, A100-80G, 8 GPUs a node, 4 x 100 Gb/s between nodes, sequence 2,048, four micro-batches of 2 samples (4 with two-way
tensor parallelism), no recomputation, throughput in tokens per GPU and second: InternLM's training-performance page
(2023), the framework of the study. There new values are broadcast before the next forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from unbroken.train.config import RECIPES, PlanConfig
from unbroken.train.planning.cost import TrainingWorkload, cost
from unbroken.train.planning.hardware import HARDWARE, Hardware, LinkKind
from unbroken.train.planning.layout import lay_out

GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
SETTINGS: Mapping[str, tuple[int, int, tuple[int, ...]]] = {
    # name: tensor, optimizer group (-1: all), measured
    "tp1, optimizer over all ranks": (1, -1, (4062, 3842, 3752, 3690, 3571, 3209, 2861, 2271)),
    "tp1, optimizer in a node (8)": (1, 8, (4078, 3939, 3919, 3944, 3928, 3920, 3835, 3625)),
    "tp2, optimizer over all ranks": (2, -1, (3822, 3595, 3475, 3438, 3308, 3094, 2992, 2785)),
    "tp2, optimizer group 4": (2, 4, (3761, 3658, 3655, 3650, 3651, 3653, 3589, 3486)),
}


@dataclass(frozen=True)
class Cell:
    """One measurement and what the model says."""

    setting: str
    gpus: int
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted / self.measured - 1


def table(hw: Hardware) -> list[Cell]:
    """All 32 cells."""
    return [
        Cell(name, gpus, tgs, throughput(hw, gpus, tensor, group))
        for name, (tensor, group, row) in SETTINGS.items()
        for gpus, tgs in zip(GPUS, row, strict=True)
    ]


def throughput(hw: Hardware, gpus: int, tensor: int, group: int) -> float:
    """Tokens per GPU and second of one cell."""
    plan = PlanConfig(tensor=tensor, optimizer=group, gradient_dtype="bfloat16")
    layout = lay_out(plan, gpus)
    micro = 2 * tensor
    work = TrainingWorkload(RECIPES["7b"], 2048, 4 * micro * layout.data, micro, publish_beside_forward=False)
    return work.global_batch * work.seq / gpus / cost(layout, plan, work, hw).seconds


def crossings(value: Callable[[Cell], float], cells: list[Cell]) -> dict[tuple[str, str], int]:
    """For each two settings whose order changes, the first number of GPUs from which the second is the faster one.

    Where both are the same plan (a group of all ranks) they are equal, and the order there is noise.
    """
    rows = {s: {c.gpus: value(c) for c in cells if c.setting == s} for s in SETTINGS}
    found = {}
    for a in SETTINGS:
        for b in SETTINGS:
            same = [g for g in GPUS if _same_plan(a, b, g)]
            ahead = [rows[b][g] > rows[a][g] for g in GPUS if g not in same]
            if a != b and True in ahead and not all(ahead) and ahead == sorted(ahead):
                found[a, b] = [g for g in GPUS if g not in same][ahead.index(True)]
    return found


def _same_plan(a: str, b: str, gpus: int) -> bool:
    def group(s: str) -> tuple[int, int]:
        tensor, size, _ = SETTINGS[s]
        return tensor, gpus // tensor if size == -1 else size

    return group(a) == group(b)


def fit(start: Hardware | None = None, rounds: int = 60) -> Hardware:
    """The hardware whose links explain the table best: the two bandwidths and two latencies, by coordinate descent on
    the largest error. The arithmetic is not fitted: it is what the first cell leaves when its communication is taken off.
    """
    hw = start or HARDWARE["a100"]
    best, steps = _worst(hw), [0.3] * 4
    for _ in range(rounds):
        for i in range(4):
            for factor in (math.exp(steps[i]), math.exp(-steps[i])):
                tried = _calibrated(_scaled(hw, i, factor))
                if (worst := _worst(tried)) < best:
                    hw, best = tried, worst
                    break
            else:
                steps[i] *= 0.7
    return hw


LIMITS = ((1e10, 3e11), (1e-6, 2e-4), (1e10, 5e10), (1e-6, 1e-3))
"""What the links can be at most: NVLink 3 300 GB/s a direction, 4 x 100 Gb/s a node; latencies within reason."""


def _scaled(hw: Hardware, i: int, factor: float) -> Hardware:
    low, high = LIMITS[i]
    which, part = ("inside", "between")[i // 2], ("bandwidth", "latency")[i % 2]
    link: LinkKind = getattr(hw, which)
    value = min(high, max(low, getattr(link, part) * factor))
    return replace(hw, **{which: replace(link, **{part: value})})  # type: ignore[arg-type]


def _calibrated(hw: Hardware) -> Hardware:
    for _ in range(3):
        hw = replace(hw, flops=hw.flops * 4070 / throughput(hw, 8, 1, 8))
    return hw


LEAD = 0.005
"""By how much the fit wants the faster setting of a column ahead: a crossing on a knife's edge is not reproduced."""


def _worst(hw: Hardware) -> float:
    """The largest error of a cell, and what is missing to the right order in each column."""
    cells = table(hw)
    at = {(c.setting, c.gpus): c for c in cells}
    behind = max(
        LEAD - math.log(at[a, g].predicted / at[b, g].predicted)
        for g in GPUS
        for a in SETTINGS
        for b in SETTINGS
        if not _same_plan(a, b, g) and at[a, g].measured > at[b, g].measured
    )
    return max(abs(c.error) for c in cells) + 4 * max(0.0, behind)


V1 = PlanConfig(pipeline=4, tensor=8, optimizer=-1, gradient_dtype="bfloat16")
V2 = PlanConfig(parameters=64, recompute="full", gradient_dtype="bfloat16")
"""The two versions of the study for 123 B; the group of V2's optimizer state was not published: here as the parameters'."""


def speedup_of_v2(gpus: int, *, seq: int = 2048, batch: int = 2048) -> float:
    """How many times faster V2 trains 123 B than V1 on so many A100 of the study, by the cost model.

    Published: 1.16 on 2,048 GPUs. The global batch was not; 2,048 samples of 2,048 tokens (4 Mi) are what the same authors
    name as usual, one sample a micro-batch.
    """
    work = TrainingWorkload(RECIPES["123b"], seq, batch, 1)
    hw = HARDWARE["a100-kalos"]
    v1, v2 = (cost(lay_out(p, gpus), p, work, hw).seconds for p in (V1, V2))
    return v1 / v2
