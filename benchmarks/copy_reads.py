"""What a number that a training reads from the GPU waits for while a snapshot is copied to the host, by the size of the copies' pieces.

    python benchmarks/copy_reads.py --out copy-reads.json     # a minute on a GPU

A GPU takes copies to the host in their order, and `loss.item()` is one. Four micro-batches of matrix products (90 ms each on an H200)
are timed with and without a snapshot that begins with them, and then waits as an optimizer does: `none` reads nothing, `last` one
number at the end of each, `often` ten in each, `launches` has small kernels instead, as many as a processor can start in that time,
so that a thread which holds the interpreter's lock is seen. Excess: the time with a snapshot less the median without. `all at once` is
how it was done before there were pieces. The stager is the one that `Checkpointer` uses; `--best FILE` writes the numbers of the
way with the least excess, which `hooks_gpu.py --copies "$(cat FILE)"` takes.
"""

from __future__ import annotations

import argparse
import json
import statistics as st
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from machine import describe_machine, driver

from unbroken.checkpoint.device import staging
from unbroken.checkpoint.format.layout import plan, spec

MB = 1 << 20
WAYS = [
    ("all at once", 1 << 62, 8, 1, 1e-3), ("32 MiB, 2 streams", 32 * MB, 8, 2, 1e-3), ("64 MiB, 2 streams", 64 * MB, 8, 2, 1e-3),
    ("16 MiB, 2 streams", 16 * MB, 16, 2, 1e-3), ("32 MiB, one at a time", 32 * MB, 1, 1, 1e-4),
    ("64 MiB, one at a time", 64 * MB, 1, 1, 1e-4), ("128 MiB, one at a time", 128 * MB, 1, 1, 1e-4),
]  # fmt: skip
"""Name, bytes of a piece, how many lie with the GPU, streams, how often it is looked (s)."""


class Work:
    """Micro-batches on the GPU, each `ms` long."""

    def __init__(self, ms: float) -> None:
        self.a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        self.x = torch.zeros((), device="cuda")
        self.small = torch.zeros(64, device="cuda")
        for _ in range(20):
            self.a @ self.a
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(50):
            self.a @ self.a
        torch.cuda.synchronize()
        self.count = max(10, round(ms / 1e3 / ((time.perf_counter() - began) / 50)))
        began = time.perf_counter()
        for _ in range(2000):
            self.small.add_(1)
        self.launches = round(ms / 1e3 / ((time.perf_counter() - began) / 2000))

    def micro_batch(self, pattern: str) -> None:
        if pattern == "launches":
            for _ in range(self.launches):
                self.small.add_(1)
            return
        for number in range(self.count):
            self.a @ self.a
            if pattern == "often" and number % max(1, self.count // 10) == 0:
                self.x.item()
        if pattern == "last":
            self.x.item()

    def step(self, pattern: str, stager: staging.CudaStager | None = None, copy: Any = None) -> float:
        """Seconds of a step, to its end on the GPU."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        if copy is not None:
            copy()
        for _ in range(4):
            self.micro_batch(pattern)
        if stager is not None:
            stager.wait_for_copies()
        torch.cuda.current_stream().synchronize()
        return time.perf_counter() - began


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gigabytes", type=float, default=11.4)
    p.add_argument("--ms", type=float, default=90, help="of a micro-batch")
    p.add_argument("--repeat", type=int, default=5)
    p.add_argument("--patterns", default="none,last,often,launches")
    p.add_argument("--out", type=Path)
    p.add_argument("--best", type=Path)
    a = p.parse_args()
    sizes, left = list[int](), int(a.gigabytes * 1e9)
    for size in [328 * MB // 4 * 4, *[26 * MB] * 12, *[105 * MB] * 5, 10240] * 1000:
        if left <= 0:
            break
        sizes.append(min(size, max(4, left // 4 * 4)))
        left -= sizes[-1]
    state = {f"w{n:03}": torch.empty(size // 4, device="cuda") for n, size in enumerate(sizes)}
    layout = plan([spec(n, str(t.dtype), t.shape) for n, t in state.items()])
    buffer = torch.empty(layout.file_bytes, dtype=torch.uint8, pin_memory=True)
    stager = staging.CudaStager(torch.device("cuda", 0), device_copy=False)
    every = [*stager.streams, torch.cuda.Stream()]
    work = Work(a.ms)

    def copy() -> None:
        stager.copy(state, buffer, layout, frozenset(state), lambda _: None)

    copy()
    stager.drain()
    rows = []
    for pattern in a.patterns.split(","):
        for _ in range(3):
            work.step(pattern)
        for name, *how in WAYS:
            staging._PIECE_BYTES, staging._UNDER_WAY, streams, staging._LOOK_S = how
            stager.streams = every[:streams]
            quiet, took, copied = list[float](), list[float](), list[float]()
            for _ in range(a.repeat):
                quiet.append(work.step(pattern))
                took.append(work.step(pattern, stager, copy))
                stager.drain()
                assert stager.last is not None and stager.last.error is None
                copied.append(stager.last.seconds)
                quiet.append(work.step(pattern))
            usual = st.median(quiet)
            excess = [t - usual for t in took]
            rows.append({
                "pattern": pattern, "way": name, "how": how, "step_s": usual, "excess_s": excess,
                "excess_median_s": st.median(excess), "copy_s": st.median(copied),
            })  # fmt: skip
            print(
                f"{pattern:9} {name:24} step {usual:.4f} s  excess {st.median(excess):+.4f} s"
                f" ({min(excess):+.4f} to {max(excess):+.4f})  copy {st.median(copied):.4f} s",
                flush=True,
            )
    stager.close()
    where = describe_machine() | {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "driver": driver(),
    }
    result = {"machine": where, "bytes": layout.data_bytes, "rows": rows}
    sums = {name: sum(r["excess_median_s"] for r in rows if r["way"] == name) for name, *_ in WAYS}
    best = next(w for w in WAYS if w[0] == min(sums, key=lambda n: sums[n]))
    print("least excess:", best[0])
    if a.best:
        a.best.write_text(" ".join(map(str, best[1:])))
    if a.out:
        a.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
