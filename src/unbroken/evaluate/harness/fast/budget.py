"""How many tokens a batch should hold: measured on the device that will read them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

SMALLEST, LARGEST = 512, 32768
GAIN = 1.05
"""A batch twice as large has to be faster by this, or the smaller one is kept: it pads less, and leaves memory."""
WIDTH = 128
"""Tokens of each sequence of the measurement."""
PASS_S = 0.5
"""No larger batch is tried where one pass takes longer: on a CPU nothing is gained by then."""


def best_budget(speeds: Iterator[tuple[int, float]]) -> int:
    """Of (tokens, tokens per second) by growing size, the size from which on nothing is gained; asks for no more than that."""
    best: tuple[int, float] | None = None
    for tokens, speed in speeds:
        if best is not None and speed < best[1] * GAIN:
            break
        best = tokens, speed
    return best[0] if best else SMALLEST


def measure(
    read: Callable[[int, int], Any], longest: int, *, clock: Callable[[], float] = time.perf_counter
) -> Iterator[tuple[int, float]]:
    """(tokens, tokens per second) of growing batches. `read(rows, width)` runs one pass and waits for it; what does not fit
    ends it: RuntimeError and MemoryError are taken for that."""
    width = max(1, min(WIDTH, longest))
    tokens = SMALLEST
    try:
        read(1, width)  # whatever the first pass makes ready
        while tokens <= LARGEST:
            rows = max(1, tokens // width)
            began = clock()
            read(rows, width)
            took = max(clock() - began, 1e-9)
            yield rows * width, rows * width / took
            if took > PASS_S:
                return
            tokens *= 2
    except (RuntimeError, MemoryError):
        return
