"""Who is named for being slow: one rank of eight that works a tenth more, and nobody in 20,000 steps of runs that are well.

    python benchmarks/stragglers.py [--steps 20000] [--slow-ms 100] [--well-ms 20] [--work processor | device] [-o RESULT.json]

Real runs of `straggler_script.py`, four virtual nodes of two ranks on this machine, without a spare; what the supervisor told is
read from the journal (`slow`). Each rank is pinned to a core of its own where there are eight: two threads of one core slow each other
by more than a tenth; some virtual machines hide which those are. `--work device` needs no cores: each rank waits as for a GPU, and tells how long
(`run.step(busy=)`). How much work takes `--slow-ms` or `--well-ms` is
measured first; 20,000 steps of 20 ms take 7 minutes. Of the slow one: after how many steps it was named, and whether it alone. Of the others (steady,
uneven lengths, pauses, waiting for data; a quarter of the steps each): how often a node was named, which has to be never, and what
else was told. The same in simulated time with 64 ranks: `pytest tests/recover/test_slow_simulated.py`, and pure:
`tests/detect/test_stragglers.py`. Exits 1 where the slow one was not named within 100 steps, or anybody else was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

try:
    from machine import describe_machine
    from straggler_script import FROM, SIZE, SLOW_RANK
except ImportError:  # imported by a test
    from benchmarks.machine import describe_machine
    from benchmarks.straggler_script import FROM, SIZE, SLOW_RANK

from unbroken.progress import RunDir, read_journal
from unbroken.progress.records.steps import read_steps

SCRIPT = Path(__file__).with_name("straggler_script.py")
WELL = ("steady", "uneven", "pauses", "loader")
WITHIN, RANKS = 100, 8


def count_products(ms: float) -> int:
    """How many products of the script make a step of so many milliseconds on one core."""
    import torch

    torch.set_num_threads(1)
    a = torch.randn(SIZE, SIZE)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(1000):
            a @ a
        best = min(best, time.perf_counter() - began)
    return max(10, round(ms / best))


def pick_cores() -> list[int]:
    """One processor of each of eight cores that this process may use; all that it may use where they are fewer."""
    allowed = sorted(os.sched_getaffinity(0))
    cores: dict[str, int] = {}
    for cpu in allowed:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(path.read_text() if path.exists() else str(cpu), cpu)
    picked = list(cores.values())
    return picked[:RANKS] if len(picked) >= RANKS else []


def run(
    folder: Path, kind: str, steps: int, work: int, where: str
) -> tuple[list[dict[str, Any]], int, float]:
    """(what was told of slowness, steps made, seconds a step)."""
    argv = [
        sys.executable, "-m", "unbroken", "run", "--run-dir", str(folder), "--nodes", "4", "--nproc", "2", "--",
        str(SCRIPT), kind, str(steps), str(work), where,
    ]  # fmt: skip
    with folder.with_suffix(".txt").open("w") as out:
        subprocess.run(argv, stdout=out, stderr=subprocess.STDOUT, check=False)
    records = read_journal(RunDir(folder)).records
    made = read_steps(RunDir(folder).steps(1))
    each = (made[-1].time - made[0].time) / max(1, len(made) - 1) if made else 0.0
    return [r for r in records if r["kind"] == "slow"], made[-1].step if made else 0, each


def main() -> int:
    """Runs them; prints and writes one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--slow-ms", type=float, default=100.0)
    parser.add_argument("--well-ms", type=float, default=20.0)
    parser.add_argument("--work", choices=("processor", "device"), default="processor")
    parser.add_argument("-o", "--out", type=Path)
    args = parser.parse_args()
    device = args.work == "device"
    where = args.work if device else ",".join(map(str, pick_cores()))

    def measure(ms: float) -> int:
        return round(1e3 * ms) if device else count_products(ms)

    result: dict[str, Any] = {
        "machine": describe_machine(),
        "ranks": RANKS,
        "work": args.work,
        "cores": where,
        "well": {},
    }
    with tempfile.TemporaryDirectory(prefix="unbroken-slow-") as place:
        told, made, each = run(Path(place) / "slow", "slow", 300, measure(args.slow_ms), where)
        first = next((t for t in told if t["nodes"]), None)
        result["slow"] = {
            "steps": made,
            "step_ms": round(1e3 * each, 2),
            "named_after_steps": first["step"] - FROM if first else None,
            "ranks": first["ranks"] if first else [],
            "right": bool(first) and first["ranks"] == [SLOW_RANK],
            "why": first["why"] if first else "",
        }
        print(f"slow: {json.dumps(result['slow'])}", file=sys.stderr, flush=True)
        work = measure(args.well_ms)
        for kind in WELL:
            told, made, each = run(Path(place) / kind, kind, args.steps // len(WELL), work, where)
            names = [t["nodes"] for t in told if t["nodes"]]
            kinds = dict(Counter(t["what"] for t in told))
            result["well"][kind] = {
                "steps": made, "step_ms": round(1e3 * each, 2), "nodes_named": len(names), "told": kinds,
                "why": [t["why"] for t in told][:4],
            }  # fmt: skip
            print(f"{kind}: {json.dumps(result['well'][kind])}", file=sys.stderr, flush=True)
            if args.out:
                args.out.write_text(json.dumps(result, indent=1) + "\n")
    result["steps_that_are_well"] = sum(w["steps"] for w in result["well"].values())
    result["nodes_named_wrongly"] = sum(w["nodes_named"] for w in result["well"].values())
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    after = result["slow"]["named_after_steps"]
    good = result["slow"]["right"] and after is not None and after <= WITHIN
    return 0 if good and not result["nodes_named_wrongly"] else 1


if __name__ == "__main__":
    sys.exit(main())
