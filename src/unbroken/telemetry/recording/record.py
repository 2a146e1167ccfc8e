"""The recording loop: every interval, on the clock's multiples, all samplers are read and the tick is kept."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..samplers.reading import Reading, Sampler

Sink = Callable[[float, list[Reading]], None]
"""Takes a tick: wall-clock seconds and its readings."""


@dataclass
class Recorded:
    """What a recording did and what it cost."""

    ticks: int = 0
    readings: int = 0
    missed: int = 0
    """Ticks left out because the one before took too long (a stopped process, a driver that hangs)."""
    cpu_s: float = 0.0
    """CPU time of this thread in reading and writing."""
    wall_s: float = 0.0

    @property
    def cpu_share_pct(self) -> float:
        """CPU time over wall time, percent of one core."""
        return 100.0 * self.cpu_s / self.wall_s if self.wall_s else 0.0


def record(
    samplers: Sequence[Sampler],
    sinks: Sequence[Sink],
    *,
    every_s: float,
    stop: threading.Event,
    for_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
) -> Recorded:
    """Reads every `every_s` seconds until `stop` is set or `for_s` seconds have passed.

    Ticks fall on multiples of the interval of the wall clock, so that nodes sample together. A tick that is late
    by more than an interval is left out and counted, never made up for.
    """
    done = Recorded()
    began = clock()
    cpu = time.thread_time()
    next_tick = began + (math.ceil(wall() / every_s) * every_s - wall())
    while not stop.is_set() and (for_s is None or clock() - began < for_s):
        wait = next_tick - clock()
        if wait > 0 and stop.wait(
            min(wait, max(0.0, (began + for_s) - clock())) if for_s is not None else wait
        ):
            break
        if clock() < next_tick:
            continue
        now, when = clock(), wall()
        readings: list[Reading] = []
        for s in samplers:
            readings += s.read(now)
        for sink in sinks:
            sink(when, readings)
        done.ticks += 1
        done.readings += len(readings)
        next_tick += every_s
        late = clock() - next_tick
        if late > 0:
            skip = math.ceil(late / every_s)
            done.missed += skip
            next_tick += skip * every_s
    done.cpu_s, done.wall_s = time.thread_time() - cpu, clock() - began
    return done
