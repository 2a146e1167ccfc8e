"""What a cluster can do, as a cost model needs it: arithmetic, memory, and one bandwidth and latency per kind of link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LinkKind:
    """One kind of link."""

    bandwidth: float
    """Bytes per second and direction: of a GPU inside a node, of a whole node between nodes."""
    latency: float
    """Seconds that each step of a ring takes beside its bytes."""


@dataclass(frozen=True)
class Hardware:
    """GPUs in nodes."""

    name: str
    flops: float
    """Floating-point operations per second that training really reaches on a GPU where nothing is in the way."""
    memory: float
    """Bytes of a GPU."""
    memory_bandwidth: float
    """Bytes per second between a GPU and its memory."""
    inside: LinkKind
    """Between GPUs of a node."""
    between: LinkKind
    """Between nodes."""
    gpus_per_node: int = 8
    taken: float = 0.2
    """Share of a GPU that a collective takes from a computation beside it: NCCL's channels, of about 24 SMs on 108 or 132."""
    usable: float = 0.9
    """Share of memory that can be planned with: the rest is fragmentation, kernels, NCCL."""
    source: str = ""


HARDWARE: Mapping[str, Hardware] = {
    "h200": Hardware(
        "h200", 590e12, 139e9 * 1.0737, 4.8e12, LinkKind(300e9, 5e-6), LinkKind(350e9, 20e-6),
        source="FLOP/s measured (1.3 B, one H200: 59.7 % MFU); links stated: NVLink 4 at two thirds of 450 GB/s, 8 x 400 Gb/s",
    ),
    "h100": Hardware(
        "h100", 480e12, 80e9, 3.35e12, LinkKind(300e9, 5e-6), LinkKind(350e9, 20e-6),
        source="stated: 48 % of 989 TFLOP/s as published for 8 B without float8; links as h200",
    ),
    # FLOP/s and the four numbers of its links come from benchmarks/plan.py, which fits them to the published 7 B table.
    "a100": Hardware(
        "a100", 181.75e12, 80e9, 2.0e12, LinkKind(109.8e9, 72.6e-6), LinkKind(44.84e9, 52.4e-6),
        source="fitted to the published 7 B table by benchmarks/plan.py: 4 x 100 Gb/s between nodes",
    ),
    "a100-kalos": Hardware(
        "a100-kalos", 181.75e12, 80e9, 2.0e12, LinkKind(109.8e9, 72.6e-6), LinkKind(89.7e9, 52.4e-6),
        source="as a100, 4 x 200 Gb/s between nodes (the published 123 B runs)",
    ),
}  # fmt: skip
