"""Where the time of a step goes, from a Kineto trace (torch.profiler): by kind of kernel, and idle."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

KINDS: tuple[tuple[str, str], ...] = (
    # The first that matches; names as cuBLAS, cuDNN, NCCL, torch and Triton give them.
    ("communication", r"nccl"),
    ("attention", r"flash|fmha|sdpa|cudnn_generated|attention"),
    ("matrix products", r"gemm|nvjet|cutlass|xmma|splitK|grouped_mm|sgemv"),
    ("optimizer", r"multi_tensor_apply|[Aa]dam"),
    ("copies", r"^Mem(cpy|set)|copy_kernel|CatArray|direct_copy|unrolled_elementwise.*copy"),
    ("other, compiled", r"^triton_"),
)
_DEVICE = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))


@dataclass(frozen=True)
class Kernel:
    """One kernel or copy on a GPU; microseconds."""

    name: str
    start: float
    seconds: float
    blocks: int = 0

    @property
    def kind(self) -> str:
        """One of `KINDS`, or other."""
        return next((kind for kind, words in KINDS if re.search(words, self.name)), "other")


def read_trace(path: Path) -> list[Kernel]:
    """The kernels of a trace as torch exports it for Chrome, by their start (in seconds)."""
    events = json.loads(path.read_text())["traceEvents"]
    found = [
        Kernel(e["name"], e["ts"] / 1e6, e["dur"] / 1e6, _blocks(e.get("args", {}).get("grid", ())))
        for e in events
        if e.get("cat") in _DEVICE and "dur" in e
    ]
    return sorted(found, key=lambda k: k.start)


def _blocks(grid: Sequence[int]) -> int:
    n = 1 if grid else 0
    for g in grid:
        n *= g
    return n


def time_by_kind(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Seconds of each kind, and `idle`, from the first kernel's start to the last one's end.

    What runs beside another kernel counts where it began first, so that the sum is the whole.
    """
    found: dict[str, float] = {}
    end = idle = 0.0
    for i, k in enumerate(sorted(kernels, key=lambda k: k.start)):
        if i and k.start > end:
            idle += k.start - end
        alone = k.seconds if not i else max(0.0, k.start + k.seconds - max(end, k.start))
        found[k.kind] = found.get(k.kind, 0.0) + alone
        end = max(end, k.start + k.seconds)
    return found | {"idle": idle}


def longest(kernels: Iterable[Kernel], count: int = 12) -> list[tuple[str, str, int, float]]:
    """(kind, name, launches, seconds) of the kernels that take most."""
    of: dict[tuple[str, str], list[float]] = {}
    for k in kernels:
        of.setdefault((k.kind, k.name[:120]), []).append(k.seconds)
    rows = [(kind, name, len(s), sum(s)) for (kind, name), s in of.items()]
    return sorted(rows, key=lambda r: -r[3])[:count]


def estimated_sm_activity(kernels: Sequence[Kernel], multiprocessors: int) -> float:
    """Share of the SMs with work, for cards without GPM: min(blocks / SMs, 1), weighted by time; an estimate."""
    if not kernels:
        return 0.0
    span = max(k.start + k.seconds for k in kernels) - min(k.start for k in kernels)
    busy = sum(min(1.0, k.blocks / multiprocessors) * k.seconds for k in kernels)
    return min(1.0, busy / span) if span else 0.0
