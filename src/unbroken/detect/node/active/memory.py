"""A pattern that tells each place of memory from every other one, and its complement, written and read back."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ....units import Bytes
from ..result import CheckResult, State

_BLOCK_GPU, _BLOCK_CPU = 1 << 30, 64 << 20
_SHARE = 0.9
After = Callable[[torch.Tensor], object]


def check_memory(
    device: torch.device, most: int, seconds: float = 10.0, after: After = lambda block: None
) -> CheckResult:
    """Takes up to `most` bytes, at most 90 % of what is free, and gives them back. All is written before any of it is read, so
    that two addresses that are one cell show. `after` is called with each block between: tests flip bits there."""
    place = "cpu" if device.type == "cpu" else f"gpu {device.index or 0}"
    size = min(_BLOCK_GPU if device.type == "cuda" else _BLOCK_CPU, most)
    blocks = _take(device, most, size) if size >= 8 else []
    if not blocks:
        return CheckResult("memory", State.NOT_CHECKED, "none is free", place)
    held, tested, began, wrong, where = len(blocks) * size, 0, time.monotonic(), 0, ""
    pattern = torch.arange(size // 8, dtype=torch.int64, device=device)
    # An odd multiplier: all numbers differ, and neighbours differ in half of their bits.
    pattern.mul_(-0x61C8864680B583EB)
    for flip in (0, -1):
        for i, block in enumerate(blocks):
            torch.bitwise_xor(pattern, i ^ flip, out=block)
        for i, block in enumerate(blocks):
            after(block)
            if not torch.equal(block.bitwise_xor_(i ^ flip), pattern):
                bad = (block != pattern).nonzero()
                wrong += len(bad)
                where = where or f"byte {i * size + 8 * int(bad[0, 0]):,} of what was taken"
            tested += size
        if time.monotonic() - began > seconds:
            break
    del blocks, pattern
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if wrong:
        return CheckResult(
            "memory", State.BAD, f"{wrong} words came back otherwise than they were written ({where})", place
        )
    return CheckResult("memory", State.GOOD, f"{Bytes(held)} keep what is written to them", place)


def _take(device: torch.device, most: int, size: int) -> list[torch.Tensor]:
    """As many blocks as may be had; two more would have to fit, for the pattern and what a comparison takes."""
    if device.type == "cuda":
        free = int(torch.cuda.mem_get_info(device)[0])
    else:
        from ....machine import available_memory

        free = available_memory() or 0
    room = min(most, int(free * _SHARE) - 2 * size)
    blocks: list[torch.Tensor] = []
    try:
        for _ in range(room // max(size, 8)):
            blocks.append(torch.empty(size // 8, dtype=torch.int64, device=device))
    except (torch.OutOfMemoryError, RuntimeError):
        del blocks[-1:]  # what is left is needed for the comparison
    return blocks
