"""What `run.step` costs a training, per call, in nanoseconds: the claim "under a microsecond or close to it".

    python benchmarks/progress.py                  # prints a table, writes benchmarks/results/progress.json
    python benchmarks/progress.py --check 1500     # exit 1 if the median of run.step(loss=, tokens=) is above 1500 ns

Measured is processor time of the calling process (a busy machine changes it little), in batches of 20,000 calls, of
which the empty loop is subtracted; told are median, fastest and slowest batch. While one series runs, another process
reads the page 20 times a second, as an agent does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from machine import describe_machine  # noqa: E402

from unbroken.progress import PageReader, Run  # noqa: E402
from unbroken.progress import page as layout  # noqa: E402

CALLS = 20_000
READER = """
import sys, time
from pathlib import Path
from unbroken.progress import PageReader
reader = PageReader(Path(sys.argv[1]))
print("go", flush=True)
while True:
    reader.read(); reader.take(); time.sleep(0.05)
"""


def batch(call: Callable[[int], object] | None) -> float:
    """Nanoseconds per call of one batch; of the loop itself where `call` is None."""
    steps = range(CALLS)
    if call is None:
        began = time.process_time_ns()
        for _ in steps:
            pass
        return (time.process_time_ns() - began) / CALLS
    began = time.process_time_ns()
    for s in steps:
        call(s)
    return (time.process_time_ns() - began) / CALLS


def measure(calls: dict[str, Callable[[int], object]], batches: int) -> dict[str, dict[str, float]]:
    """name -> median, fastest and slowest batch; the contenders take turns, so that a busy spell hits all of them."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    loops = []
    for _ in range(batches):
        loops.append(batch(None))
        for name, call in calls.items():
            took[name].append(batch(call))
    loop = statistics.median(loops)
    return {
        name: {
            "median_ns": round(statistics.median(t) - loop, 1),
            "fastest_ns": round(min(t) - loop, 1),
            "slowest_ns": round(max(t) - loop, 1),
        }
        for name, t in took.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=101)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/progress.json")
    parser.add_argument("--check", type=float, metavar="NS", help="fail if a step costs more than this")
    args = parser.parse_args()
    folder = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="unbroken-bench-", dir=folder) as place:
        path = Path(place) / "rank-0.page"
        layout.create(path, rank=0, attempt=1)
        run, outside = Run(path), Run(None)
        PageReader(path).set_lease(time.monotonic() + 86400, 1)
        loss, tokens = 2.345678, 65536
        calls: dict[str, Callable[[int], object]] = {
            "run.step(step)": run.step,
            "run.step(step, loss=, tokens=)": lambda s: run.step(s, loss=loss, tokens=tokens),
            "run.should_stop(step)": run.should_stop,
            "run.phase(name)": lambda s: run.phase("training"),
            "outside a run: run.step(step, loss=, tokens=)": lambda s: outside.step(
                s, loss=loss, tokens=tokens
            ),
            "for scale: a lambda that does nothing": lambda s: None,
        }
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, str(path)], stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip
        try:
            if reader.stdout is not None:
                reader.stdout.readline()
            found = measure(calls, args.batches)
        finally:
            reader.kill()
            reader.wait()
    result = {
        "machine": describe_machine(),
        "calls_per_batch": CALLS,
        "batches": args.batches,
        "calls": found,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{'nanoseconds per call':<48} {'median':>8} {'fastest':>8} {'slowest':>8}")
    for name, t in found.items():
        print(f"{name:<48} {t['median_ns']:>8.0f} {t['fastest_ns']:>8.0f} {t['slowest_ns']:>8.0f}")
    print(f"written to {args.out}")
    step = found["run.step(step, loss=, tokens=)"]["median_ns"]
    if args.check is not None and step > args.check:
        print(f"a step costs {step:.0f} ns, more than {args.check:.0f} ns", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
