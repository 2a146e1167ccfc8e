"""A synchronous training on CPUs for `stragglers.py`: each rank multiplies matrices, then all reduce.

    unbroken run --nodes 4 --nproc 2 -- benchmarks/straggler_script.py KIND STEPS WORK [CORES | device [FOLDER]]

KIND: steady; slow (one rank works a tenth more from step 100 on); uneven (each step another length for each rank); pauses (now and
then a rank stops for a while); loader (ranks wait for their data now and then). WORK is the number of products in a step; CORES are processors, with
commas, of which each rank takes the one of its number. With `device` the work is another's than the processor's, as with a GPU: WORK
microseconds are waited for, and told as `run.step(step, busy=...)`, which is what a script with a GPU does. In FOLDER each rank leaves a file
of what it saw: of each step its end, its work by the clock and by the kernel's count, in seconds, as `struct` format `3d`.
"""

from __future__ import annotations

import math
import os
import random
import struct
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import unbroken
from unbroken.detect.work import read_used

SLOW_RANK, FROM, MORE = 5, 100, 1.1
SIZE = 96
SEEN = struct.Struct("3d")


def main() -> None:
    """One rank."""
    kind, steps, work = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    run, rank = unbroken.attach(total_steps=steps), int(os.environ["RANK"])
    where = sys.argv[4] if len(sys.argv) > 4 else ""
    if where and where != "device":
        os.sched_setaffinity(0, {[int(c) for c in where.split(",")][rank]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seen: list[bytes] = []
    draw, a, value = random.Random(rank), torch.randn(SIZE, SIZE), torch.ones(256)
    for step in range(1, steps + 1):
        products, waits, began = float(work), 0.0, time.perf_counter()
        if kind == "slow" and rank == SLOW_RANK and step >= FROM:
            products *= MORE
        elif kind == "uneven":
            products *= draw.uniform(0.5, 1.5)
        elif kind == "pauses" and draw.random() < 0.01:
            products *= 4
        elif kind == "loader" and draw.random() < 0.02:
            waits = 0.02
            time.sleep(waits)
        if where == "device":
            time.sleep(1e-6 * products)
        else:
            for _ in range(round(products)):
                a @ a
        busy = time.perf_counter() - began - waits
        dist.all_reduce(value)
        run.step(step, loss=1.0, busy=busy if where == "device" else math.nan)
        seen.append(SEEN.pack(time.perf_counter(), busy, read_used(os.getpid())))
    if len(sys.argv) > 5:
        Path(sys.argv[5], f"rank-{rank}").write_bytes(b"".join(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
