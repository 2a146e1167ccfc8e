"""The supervisor's clocks, as an argument: tests give it simulated ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """`monotonic` measures durations, `wall` is the time of day in seconds since the Unix epoch."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
